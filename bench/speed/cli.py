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
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from results import Report
from speed.bound import measure_machine, read_machine
from speed.engines import launch
from speed.grid import System
from speed.measure import Bench, Start
from speed.plan import SpeedPlan
from speed.plot import plot_rows
from speed.presets import PRESETS, write_models
from speed.remote import Asker, running
from speed.report import CellRow, conclusions, make_rows, markdown
from study import (
    BenchError,
    code_fingerprint,
    complete,
    grid_parser,
    main_of,
    positive,
)

REPORT = Report("speed", CellRow, markdown, plot_rows)
MACHINE = "machine.json"
GOES_ON = "All samples so far are kept: the same command goes on from here."


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = grid_parser(
        "speed",
        "Tokens per second of AR, SGLang's speculative decoding and SMC, side by side.",
        look="--dry-run",
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="by default what fits this machine")
    add("--quick", action="store_true", help="one setting of each mode, few tokens")
    add("--batch", nargs="+", type=positive, metavar="B", help="instead of the preset's")
    add("--prompt", nargs="+", type=positive, metavar="TOKENS", help="instead of the preset's")
    add("--new-tokens", type=positive, help="instead of the preset's")
    add("--repeats", type=positive, help="instead of the preset's")
    add("--minutes", type=float, default=math.inf, help="begin nothing new after so many")
    add("--target", type=Path, help="folder of real weights, with --draft")
    add("--draft", type=Path, help="folder of real weights, with --target")
    add("--engine", nargs="+", type=_keyword, default=[], metavar="KEY=VALUE", help="for all")
    options = parser.parse_args(argv)
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft belong together")
    options.preset = options.preset or _preset_of_this_machine()
    return options


def _keyword(text: str) -> tuple[str, Any]:
    """Parse a keyword of `sgl.Engine`; the value is JSON, or else a plain string."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _preset_of_this_machine() -> str:
    import torch  # slow to import

    return "h200-8b" if torch.cuda.is_available() else "cpu"


def compared(plan: SpeedPlan, start: Start | None) -> str:
    """Complete the selected cells, then report on all cells with samples."""
    todo, name = plan.todo(), time.strftime("%Y%m%dT%H%M%S")
    if todo:
        measure_machine(plan.preset, plan.folder / MACHINE)
        deadline = time.monotonic() + 60 * plan.options.minutes
        Bench(plan.preset, plan.cell_logs, start or starter(plan), name, deadline).measure(todo)
    rows = make_rows(plan.known(), plan.preset, read_machine(plan.preset, plan.folder / MACHINE))
    if not rows:
        raise BenchError("Nothing was measured.")
    text = REPORT.write(plan.folder, rows, plan.settings(), partial(note, plan))
    return f"{text}\n{conclusions(rows)}"


def starter(plan: SpeedPlan) -> Start:
    """Return a function that starts real engines."""
    models = write_models(plan.preset.pair, plan.options.output_dir / "models")
    return partial(_start, plan, models)


@contextmanager
def _start(plan: SpeedPlan, models: tuple[Path, Path], system: System) -> Iterator[Asker]:
    with running(
        launch(system, plan.preset, models), plan.folder / "logs" / f"{system.slug}.log"
    ) as engine:
        yield engine


def note(plan: SpeedPlan, origin: Mapping[str, Any]) -> str:
    """Return the notes above the table."""
    preset = plan.preset
    how = "in turns with AR" if preset.side_by_side else "between two runs of AR"
    parts = [
        f"{preset.pair.name} in {preset.pair.quantization or preset.dtype}, "
        f"{preset.new_tokens} new tokens a request, {preset.repeats} repeats {how}; on "
        f"{origin['hardware']}, {origin['date'][:10]}. Speeds are of all requests together; "
        "decoding is without the pass over the prompts, and ratios are of decoding. In brackets "
        "95 % intervals."
    ]
    if preset.pair.is_dummy:
        parts.append(
            "Weights are dummies: what STANDALONE accepts is simulated by SGLang "
            "(SGLANG_SIMULATE_ACC_LEN), as published for Llama 8B + 1B; SMC exact accepts what "
            "such weights make it accept, nearly all; SMC block keeps whole blocks by its rule."
        )
    machine = read_machine(preset, plan.folder / MACHINE)
    if machine:
        parts.append(
            f"The bound is this machine's, measured before: {machine.bandwidth / 1e9:.1f} GB/s and "
            f"{machine.flops / 1e9:.0f} GFLOP/s, for the weights, KV and logits of a round."
        )
    return " ".join(parts)


def publish(plan: SpeedPlan) -> None:
    """Copy the results to bench/results; raise BenchError unless the selection is complete."""
    if plan.todo():
        raise BenchError("Not published: some of the selected cells are not complete.")
    if not (plan.folder / "speed.png").exists():
        raise BenchError("Not published: none of the cells ran here.")
    REPORT.publish(plan.folder, MACHINE, to=plan.preset.name)


def main(argv: list[str] | None = None, start: Start | None = None) -> int:
    """Run the benchmark with ``start``, or real engines; return the exit status."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = SpeedPlan(options, code_fingerprint())
        complete(plan, lambda: compared(plan, start), lambda: publish(plan))

    return main_of(run, GOES_ON)
