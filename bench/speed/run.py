"""Compare the speed of SMC with plain decoding and with SGLang's own speculative decoding.

    make speed                                           # this machine's preset, resumable
    .venv/bin/python bench/speed --quick                 # a trial, about 3 minutes on two cores
    .venv/bin/python bench/speed --dry-run               # lists the engines and cells
    .venv/bin/python bench/speed --preset h200-8b --only 'smc-block-n8-k8*' --batch 1 4

Every cell is written once it is measured, so after an interruption the same command continues
where it stopped, and several partial runs add up to one table.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import study
from results import Report, provenance
from speed.grid import PRESETS, Pair, Preset, cells, quick, systems
from speed.measure import TEMPERATURE, EngineCase, engine_cases
from speed.report import BYTES, CellRow, make_rows, markdown
from speed.runner import Case, Clock, Records, Runner, Stage, read_results

from sglang_smc.tools.plan import devices
from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.shapes import from_config

MACHINE = "machine.json"
#: Far more than starts and cells take: what exceeds it thrice hangs.
START_SECONDS, CELL_SECONDS = 120.0, 600.0
REPORT = Report("speed", CellRow, markdown)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    about = "Tokens per second of AR, SGLang's speculative decoding and SMC, side by side."
    made = study.parser("speed", about)
    add = made.add_argument
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="engines, as a shell matches")
    add("--list", "--dry-run", action="store_true", help="print the engines and cells, and stop")
    add("--fresh", action="store_true", help="measure again what has a result")
    add("--publish", action="store_true", help="also copy to bench/results/speed")
    add("--preset", choices=list(PRESETS), help="by default what fits this machine")
    add("--quick", action="store_true", help="one setting of each mode, few tokens")
    for flag, metavar in (("--batch", "B"), ("--prompt", "TOKENS")):
        add(flag, nargs="+", type=study.positive, metavar=metavar, help="instead of the preset's")
    add("--repeats", type=study.positive, help="instead of the preset's")
    for flag in ("--target", "--draft"):
        add(flag, type=Path, help="folder of real weights; both or none")
    options = made.parse_args(argv)
    if (options.target is None) != (options.draft is None):
        made.error("--target and --draft belong together")
    return options


def preset_of(options: argparse.Namespace) -> Preset:
    """Return the preset with the options' changes; raise BenchError for sizes above it."""
    if options.preset is None:
        import torch  # slow to import

        options.preset = "h200-8b" if torch.cuda.is_available() else "cpu"
    preset = PRESETS[options.preset]
    preset = quick(preset) if options.quick else preset
    if options.target:
        folders = options.target, options.draft
        target, draft = map(from_config, folders)
        pair = Pair(f"{folders[0].name}+{folders[1].name}", target, draft, folders)
        preset = replace(preset, pair=pair, name=f"{preset.name}-real")
    sizes = ("batch", options.batch, preset.batches), ("prompt", options.prompt, preset.prompts)
    for name, asked, known in sizes:
        if max(asked or [0]) > max(known):
            raise study.BenchError(
                f"--{name} {max(asked)} is more than the {max(known)} that the engines of preset "
                f"{preset.name} are sized for; ask for at most that, or choose another preset."
            )
    return replace(preset, repeats=options.repeats or preset.repeats)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return exit status 0 if it completes."""
    options = parse_arguments(argv)
    return study.main_of(partial(run, options), study.GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    preset = preset_of(options)
    folder = options.output_dir / preset.name
    batches, prompts = options.batch or preset.batches, options.prompt or preset.prompts
    cases = study.matching(cases_of(preset, batches, prompts, folder), options.only)
    if not cases:
        raise study.BenchError(
            f"No engine matches --only {' '.join(options.only)}; --list shows all."
        )
    if options.list:
        done = read_results(folder)[0].get("speed", {})
        for part in (part for case in cases for part in case.parts):
            failed = done.get(part, {}).get("failed")
            told = f"not run here: {failed}" if failed else "measured" if part in done else "-"
            print(f"{part:30} {told}")
        return
    study.prepare_folder(options.output_dir)
    records = Records([folder], [], provenance(settings(preset)))
    runner = Runner(records, Clock(math.inf), fresh=options.fresh)
    if any(runner.missing("speed", case) for case in cases):
        measure_machine(preset, folder / MACHINE)
    runner.run(Stage("speed", math.inf, "", lambda: cases))
    sizes = sorted({*preset.batches, *batches}), sorted({*preset.prompts, *prompts})
    done = records.of("speed")
    every = (part for case in cases_of(preset, *sizes, folder) for part in case.parts.items())
    # Of other parts there is no result, or it was measured otherwise.
    results = {
        one: done[one] for one, identity in every if not records.lacks("speed", one, identity)
    }
    machine = read_machine(preset, folder / MACHINE)
    rows = make_rows(cells(preset, *sizes), results, preset, machine)
    text = REPORT.write(folder, rows, settings(preset), partial(note, preset, folder))
    print(f"\n{text}\nAll is in {folder}/.")
    if options.publish and all(row.refused for row in rows):
        raise study.BenchError("Not published: none of the cells ran here.")
    if options.publish:
        paths = (folder / name for name in (*REPORT.files, MACHINE))
        study.copy(paths, study.PUBLISHED / "speed" / preset.name)


def measure_machine(preset: Preset, path: Path) -> None:
    """Measure this machine's bandwidth and FLOP/s, and store the best so far in ``path``.

    Other load on the machine can only slow a measurement down.
    """
    # A child process returns its memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(devices.measure, (preset.device, BYTES[preset.dtype]))
    best = found._asdict()
    if path.exists():
        earlier = json.loads(path.read_text())
        best |= {key: max(best[key], earlier[key]) for key in ("bandwidth", "flops")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(best, indent=2) + "\n")


def read_machine(preset: Preset, path: Path) -> Device | None:
    """Return the stored measurement; None if there is none.

    Eight-bit products are assumed to be twice as fast as sixteen-bit ones, as in data sheets.
    """
    if not path.exists():
        return None
    device = Device(**json.loads(path.read_text()))
    return device._replace(flops=2 * device.flops) if preset.pair.quantization else device


def cases_of(
    preset: Preset, batches: Sequence[int], prompts: Sequence[int], folder: Path
) -> list[Case]:
    """Return a case for each system of the preset."""
    sizes = [(batch, prompt) for batch in batches for prompt in prompts]
    every = [EngineCase(one, sizes, START_SECONDS, CELL_SECONDS) for one in systems(preset)]
    return engine_cases(every, preset, folder, paired=True)


def settings(preset: Preset) -> dict[str, Any]:
    """Return the settings that the numbers depend on; each result has its engine's."""
    return {
        "preset": preset.name,
        "pair": preset.pair.name,
        "weights": "real" if preset.pair.folders else "dummy",
        "new_tokens": preset.new_tokens,
        "repeats": preset.repeats,
        "temperature": TEMPERATURE,
    }


def note(preset: Preset, folder: Path, origin: Mapping[str, Any]) -> str:
    """Return the notes above the table."""
    parts = [
        f"{preset.pair.name} in {preset.pair.quantization or preset.dtype}, "
        f"{preset.new_tokens} new tokens a request, {preset.repeats} repeats in turns with AR; "
        f"on {origin['hardware']}, {origin['date'][:10]}. Speeds are of all requests together; "
        "decoding is without the pass over the prompts, and ratios are of decoding. In "
        "brackets 95 % intervals."
    ]
    if not preset.pair.folders:
        parts.append(
            "Weights are dummies: what STANDALONE accepts is simulated by SGLang "
            "(SGLANG_SIMULATE_ACC_LEN), as published for Llama 8B + 1B; SMC exact accepts what "
            "such weights make it accept, nearly all; SMC block keeps whole blocks by its rule."
        )
    machine = read_machine(preset, folder / MACHINE)
    if machine:
        parts.append(
            f"The bound is this machine's, measured before: {machine.bandwidth / 1e9:.1f} GB/s "
            f"and {machine.flops / 1e9:.0f} GFLOP/s, for the weights, KV and logits of a round."
        )
    return " ".join(parts)
