"""Plan the cells of a run, and the files of the output folder that it reads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from speed.engines import environment, settings
from speed.grid import Cell, cells
from speed.measure import TEMPERATURE
from speed.presets import PRESETS, Pair, Preset, quick
from speed.store import CellLog
from study import BenchError, Log, selected

from sglang_smc.tools.plan.shapes import from_config


class SpeedPlan:
    """The cells of this run, and the files of all cells for the report."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self.options = options
        self.preset = preset_of(options)
        self._code = dict(code)
        _check_sizes(self.preset, options)
        asked = cells(self.preset, options.batch, options.prompt)
        self.selected = selected(asked, options.only, look="--dry-run")
        every = dict.fromkeys([*cells(self.preset), *self.selected, *self._references()])
        self.cell_logs = {cell: self._log(cell) for cell in every}

    def _references(self) -> list[Cell]:
        return [cell.reference for cell in self.selected]

    @property
    def folder(self) -> Path:
        """Return the folder of the preset's files."""
        return self.options.output_dir / self.preset.name

    def _log(self, cell: Cell) -> CellLog:
        return CellLog(Log(self.folder / "cells" / f"{cell.slug}.jsonl", self._identity(cell)))

    def _identity(self, cell: Cell) -> dict[str, Any]:
        return {
            **self._code,
            "cell": cell.slug,
            "pair": self.preset.pair.name,
            "engine": settings(cell.system, self.preset),
            "environment": environment(cell.system, self.preset),
            "new_tokens": self.preset.new_tokens,
            "temperature": TEMPERATURE,
        }

    def own_logs(self) -> list[Log]:
        """Return the files of the selected cells."""
        return [self.cell_logs[cell].log for cell in self.selected]

    def logs(self) -> list[Log]:
        """Return the files of the selected cells, and of plain decoding, their reference."""
        return [self.cell_logs[cell].log for cell in [*self.selected, *self._references()]]

    def todo(self) -> dict[Cell, list[int]]:
        """Return the selected cells that lack repeats, with these repeats."""
        missing = {
            cell: self.cell_logs[cell].missing(self.preset.repeats) for cell in self.selected
        }
        return {cell: repeats for cell, repeats in missing.items() if repeats}

    def known(self) -> dict[Cell, CellLog]:
        """Return all cells with entries, from this run or an earlier one with equal settings."""
        return {
            cell: log for cell, log in self.cell_logs.items() if log.log.fits and log.log.read()
        }

    def status(self) -> str:
        """Return a line for each selected cell."""
        lines = []
        for cell in self.selected:
            log, repeats = self.cell_logs[cell], self.preset.repeats
            done = f"{repeats - len(log.missing(repeats))} of {repeats} repeats"
            reason = log.refused()
            lines.append(f"{cell.slug:30} {f'not run here: {reason}' if reason else done}")
        return "\n".join(lines)

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
            "side_by_side": preset.side_by_side,
            "engines": {system.name: settings(system, preset) for system in used},
            "environments": {system.name: environment(system, preset) for system in used},
            "code": self._code,
        }


def _check_sizes(preset: Preset, options: argparse.Namespace) -> None:
    """Raise BenchError for sizes above the preset's, for which its engines are sized."""
    for name, asked, most in (
        ("batch", options.batch, preset.max_batch),
        ("prompt", options.prompt, max(preset.prompts)),
    ):
        if asked and max(asked) > most:
            raise BenchError(
                f"--{name} {max(asked)} is more than the {most} that the engines of preset "
                f"{preset.name} are sized for; ask for at most that, or choose another preset."
            )


def preset_of(options: argparse.Namespace) -> Preset:
    """Return the preset with the options' changes."""
    preset = PRESETS[options.preset]
    preset = quick(preset) if options.quick else preset
    if options.target:
        preset = replace(preset, pair=_real_pair(options), name=f"{preset.name}-real")
    changes = {
        name: value
        for name in ("new_tokens", "repeats")
        if (value := getattr(options, name)) is not None
    }
    return replace(preset, engine=preset.engine | dict(options.engine), **changes)


def _real_pair(options: argparse.Namespace) -> Pair:
    target, draft = options.target, options.draft
    name = f"{target.name}+{draft.name}"
    return Pair(name, from_config(target), from_config(draft), folders=(target, draft))
