"""Compare the speed of SMC with plain decoding and with SGLang's own speculative decoding.

    make speed                                           # this machine's preset, resumable
    .venv/bin/python bench/speed --quick                 # a trial, about 3 minutes on two cores
    .venv/bin/python bench/speed --dry-run               # lists the cells
    .venv/bin/python bench/speed --preset h200-8b --only 'smc-block-n8-k8*' --batch 1 4

Every sample is written at once, so after an interruption the same command continues where
it stopped, and several partial runs add up to one table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import Report
from speed.bound import measure_machine, read_machine
from speed.grid import Cell, System, cells, environment, launch, settings
from speed.measure import TEMPERATURE, Bench, CellLog, Start
from speed.presets import PRESETS, Pair, Preset, quick, write_models
from speed.remote import Asker, running
from speed.report import CellRow, make_rows, markdown
from study import BenchError, Log, Study, code_fingerprint, positive

from sglang_smc.tools.plan.shapes import from_config

MACHINE = "machine.json"


class Speed(Study):
    """The study.

    Args:
        start: starts the engine of a system, or a stand-in.
    """

    name = "speed"
    about = "Tokens per second of AR, SGLang's speculative decoding and SMC, side by side."
    report = Report("speed", CellRow, markdown)

    def __init__(self, options: argparse.Namespace, start: Start | None = None) -> None:
        super().__init__(options)
        self.preset = preset_of(options)
        self.folder = options.output_dir / self.preset.name
        self._start = start or self.running
        self._code = code_fingerprint()
        self._check_sizes()
        self.selected = self.select(cells(self.preset, options.batch, options.prompt))
        self._references = [cell.reference for cell in self.selected]
        every = dict.fromkeys([*cells(self.preset), *self.selected, *self._references])
        self.cell_logs = {cell: self._log(cell) for cell in every}

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        add = made.add_argument
        add("--preset", choices=list(PRESETS), help="by default what fits this machine")
        add("--quick", action="store_true", help="one setting of each mode, few tokens")
        for flag, metavar in (("--batch", "B"), ("--prompt", "TOKENS")):
            add(flag, nargs="+", type=positive, metavar=metavar, help="instead of the preset's")
        add("--repeats", type=positive, help="instead of the preset's")
        for flag in ("--target", "--draft"):
            add(flag, type=Path, help="folder of real weights; both or none")
        return made

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> argparse.Namespace:
        options = super().parse(argv)
        if (options.target is None) != (options.draft is None):
            cls.parser().error("--target and --draft belong together")
        options.preset = options.preset or _preset_of_this_machine()
        return options

    def _check_sizes(self) -> None:
        """Raise BenchError for sizes above the preset's, for which its engines are sized."""
        for name, asked, most in (
            ("batch", self.options.batch, self.preset.max_batch),
            ("prompt", self.options.prompt, max(self.preset.prompts)),
        ):
            if asked and max(asked) > most:
                raise BenchError(
                    f"--{name} {max(asked)} is more than the {most} that the engines of preset "
                    f"{self.preset.name} are sized for; ask for at most that, or choose another "
                    "preset."
                )

    def _log(self, cell: Cell) -> CellLog:
        identity = {
            **self._code,
            "cell": cell.slug,
            "pair": self.preset.pair.name,
            "engine": settings(cell.system, self.preset),
            "environment": environment(cell.system, self.preset),
            "new_tokens": self.preset.new_tokens,
            "temperature": TEMPERATURE,
        }
        return CellLog(Log(self.folder / "cells" / f"{cell.slug}.jsonl", identity))

    def own_logs(self) -> list[Log]:
        return [self.cell_logs[cell].log for cell in self.selected]

    def logs(self) -> list[Log]:
        """Return the files of the selected cells, and of plain decoding, their reference."""
        return [self.cell_logs[cell].log for cell in [*self.selected, *self._references]]

    def todo(self) -> dict[Cell, list[int]]:
        """Return the selected cells that lack repeats, with these repeats."""
        missing = {c: self.cell_logs[c].missing(self.preset.repeats) for c in self.selected}
        return {cell: repeats for cell, repeats in missing.items() if repeats}

    def known(self) -> dict[Cell, CellLog]:
        """Return all cells with entries, from this run or an earlier one with equal settings."""
        return {
            cell: log for cell, log in self.cell_logs.items() if log.log.fits and log.log.read()
        }

    def status(self) -> str:
        lines = []
        for cell in self.selected:
            log, repeats = self.cell_logs[cell], self.preset.repeats
            done = f"{repeats - len(log.missing(repeats))} of {repeats} repeats"
            reason = log.refused()
            lines.append(f"{cell.slug:30} {f'not run here: {reason}' if reason else done}")
        return "\n".join(lines)

    def measured(self) -> str:
        todo = self.todo()
        if todo:
            measure_machine(self.preset, self.folder / MACHINE)
            Bench(self.preset, self.cell_logs, self._start).measure(todo)
        machine = read_machine(self.preset, self.folder / MACHINE)
        rows = make_rows(self.known(), self.preset, machine)
        if not rows:
            raise BenchError("Nothing was measured.")
        return self.report.write(self.folder, rows, self.settings(), self.note)

    @contextmanager
    def running(self, system: System) -> Iterator[Asker]:
        """Start a system's engine for the ``with`` block."""
        models = write_models(self.preset.pair, self.options.output_dir / "models")
        log = self.folder / "logs" / f"{system.slug}.log"
        with running(launch(system, self.preset, models), log) as engine:
            yield engine

    def settings(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on."""
        preset, used = self.preset, dict.fromkeys(cell.system for cell in self.known())
        return {
            "preset": preset.name,
            "pair": preset.pair.name,
            "weights": "dummy" if preset.pair.is_dummy else "real",
            "new_tokens": preset.new_tokens,
            "repeats": preset.repeats,
            "temperature": TEMPERATURE,
            "engines": {system.name: settings(system, preset) for system in used},
            "environments": {system.name: environment(system, preset) for system in used},
            "code": self._code,
        }

    def note(self, origin: Mapping[str, Any]) -> str:
        """Return the notes above the table."""
        preset = self.preset
        parts = [
            f"{preset.pair.name} in {preset.pair.quantization or preset.dtype}, "
            f"{preset.new_tokens} new tokens a request, {preset.repeats} repeats in turns with AR; "
            f"on {origin['hardware']}, {origin['date'][:10]}. Speeds are of all requests together; "
            "decoding is without the pass over the prompts, and ratios are of decoding. In "
            "brackets 95 % intervals."
        ]
        if preset.pair.is_dummy:
            parts.append(
                "Weights are dummies: what STANDALONE accepts is simulated by SGLang "
                "(SGLANG_SIMULATE_ACC_LEN), as published for Llama 8B + 1B; SMC exact accepts what "
                "such weights make it accept, nearly all; SMC block keeps whole blocks by its rule."
            )
        machine = read_machine(preset, self.folder / MACHINE)
        if machine:
            parts.append(
                f"The bound is this machine's, measured before: {machine.bandwidth / 1e9:.1f} GB/s "
                f"and {machine.flops / 1e9:.0f} GFLOP/s, for the weights, KV and logits of a round."
            )
        return " ".join(parts)

    def publish(self) -> None:
        if self.todo():
            raise BenchError("Not published: some of the selected cells are not complete.")
        self.report.publish(self.folder, MACHINE, to=self.preset.name)


def _preset_of_this_machine() -> str:
    import torch  # slow to import

    return "h200-8b" if torch.cuda.is_available() else "cpu"


def preset_of(options: argparse.Namespace) -> Preset:
    """Return the preset with the options' changes."""
    preset = PRESETS[options.preset]
    preset = quick(preset) if options.quick else preset
    if options.target:
        folders = options.target, options.draft
        target, draft = map(from_config, folders)
        pair = Pair(f"{folders[0].name}+{folders[1].name}", target, draft, folders)
        preset = replace(preset, pair=pair, name=f"{preset.name}-real")
    return replace(preset, repeats=options.repeats or preset.repeats)
