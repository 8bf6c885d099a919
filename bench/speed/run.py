"""Compare the speed of SMC with plain decoding and with SGLang's own speculative decoding.

    make speed                                           # this machine's preset, resumable
    .venv/bin/python bench/speed --quick                 # a trial, about 3 minutes on two cores
    .venv/bin/python bench/speed --dry-run               # lists the engines and cells
    .venv/bin/python bench/speed --preset h200-8b --only 'smc-block-n8-k8*' --batch 1 4
    .venv/bin/python bench/speed --preset served         # what the plain command serves: `served`

Every cell is written once it is measured, so after an interruption the same command continues
where it stopped, and several partial runs add up to one table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import study
from results import Report, provenance
from speed import served
from speed.grid import PRESETS, Pair, Preset, cells, quick, systems
from speed.measure import TEMPERATURE, EngineCase, engine_cases
from speed.report import CellRow, make_rows, markdown
from speed.runner import Case, Clock, Records, Runner, Stage, read_results

from sglang_smc_tools.plan.shapes import from_config

#: Far more than starts and cells take: what exceeds it thrice hangs.
START_SECONDS = 120.0
CELL_SECONDS = 600.0
REPORT = Report("speed", CellRow, markdown)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    about = "Tokens per second of AR, SGLang's speculative decoding and SMC, side by side."
    made = study.parser("speed", about)
    study.add_selection(made)
    add = made.add_argument
    names = [*PRESETS, served.NAME]
    add("--preset", choices=names, help="by default what fits this machine")
    add("--minutes", type=float, default=math.inf, help="begin nothing that ends later")
    add("--quick", action="store_true", help="one setting of each mode, few tokens")
    for flag, metavar in (("--batch", "B"), ("--prompt", "TOKENS")):
        add(flag, nargs="+", type=study.positive, metavar=metavar, help="instead of the preset's")
    add("--repeats", type=study.positive, help="instead of the preset's")
    for flag in ("--target", "--draft"):
        add(flag, type=Path, help="folder of real weights; both or none")
    options = made.parse_args(argv)
    sized = options.batch, options.prompt, options.repeats, options.target, options.quick
    if options.preset == served.NAME and any(sized):
        made.error(
            f"--preset {served.NAME} has models, prompts and sizes of its own: leave out --quick, "
            "--batch, --prompt, --repeats, --target and --draft; --only selects from it."
        )
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
    chosen = served.run if options.preset == served.NAME else run
    return study.main_of(partial(chosen, options), study.GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    preset = preset_of(options)
    folder = options.output_dir / preset.name
    batches = options.batch or preset.batches
    prompts = options.prompt or preset.prompts
    cases = study.selected(cases_of(preset, batches, prompts, folder), options.only)
    if options.list:
        machines = read_results(folder)[0].values()
        done = {part: one for stages in machines for part, one in stages["speed"].items()}
        for part in (part for case in cases for part in case.parts):
            failed = done.get(part, {}).get("failed")
            told = f"not run here: {failed}" if failed else "measured" if part in done else "-"
            print(f"{part:30} {told}")
        return
    study.prepare_folder(options.output_dir)
    records = Records([folder], [], provenance(settings(preset)))
    runner = Runner(records, Clock(options.minutes), fresh=options.fresh)
    runner.run(Stage("speed", "", lambda: cases))
    sizes = sorted({*preset.batches, *batches}), sorted({*preset.prompts, *prompts})
    done = records.of("speed")
    every = (part for case in cases_of(preset, *sizes, folder) for part in case.parts.items())
    # Of other parts there is no result, or it was measured otherwise.
    results = {
        one: done[one] for one, identity in every if not records.lacks("speed", one, identity)
    }
    rows = make_rows(cells(preset, *sizes), results, preset)
    text = REPORT.write(folder, rows, settings(preset), partial(note, preset))
    print(f"\n{text}\nAll is in {folder}/.")
    if options.publish and all(row.refused for row in rows):
        raise study.BenchError("Not published: none of the cells ran here.")
    if options.publish:
        REPORT.publish(folder, study.PUBLISHED / "speed" / preset.name)


def cases_of(
    preset: Preset, batches: Sequence[int], prompts: Sequence[int], folder: Path
) -> list[Case]:
    """Return a case for each engine of the preset: fixed sizes of a grid share one."""
    sizes = [(batch, prompt) for batch in batches for prompt in prompts]
    every = [EngineCase(one, sizes, START_SECONDS, CELL_SECONDS) for one in systems(preset)]
    if preset.adaptive is not None:
        *fixed, widest, adaptive = every
        every = [widest._replace(chosen=[one.system for one in fixed]), adaptive]
    return engine_cases(every, preset, folder, paired=True)


def settings(preset: Preset) -> dict[str, Any]:
    """Return the settings that the numbers depend on; each result has its engine's."""
    return {
        "preset": preset.name,
        "pair": preset.pair.name,
        "weights": preset.pair.weights,
        "new_tokens": preset.new_tokens,
        "repeats": preset.repeats,
        "temperature": TEMPERATURE,
    }


def note(preset: Preset, origin: Mapping[str, Any]) -> str:
    """Return the notes above the table."""
    parts = [
        f"{preset.pair.name} in {preset.pair.quantization or preset.number_format}, "
        f"{preset.new_tokens} new tokens a request, {preset.repeats} repeats in turns with AR; "
        f"on {origin['hardware']}, {origin['date'][:10]}. Speeds are of all requests together; "
        "decoding is without the pass over the prompts, and ratios are of decoding. In "
        "brackets 95 % intervals."
    ]
    if preset.pair.drawn is not None:
        parts.append(
            "Weights are random, the draft is the target's first layer between its embedding and "
            "its LM head; one thread each."
        )
    if preset.pair.weights == "dummy":
        parts.append(
            "Weights are dummies: what STANDALONE accepts is simulated by SGLang "
            "(SGLANG_SIMULATE_ACC_LEN), as published for Llama 8B + 1B; SMC exact accepts what "
            "such weights make it accept, nearly all; SMC block keeps whole blocks by its rule."
        )
    return " ".join(parts)
