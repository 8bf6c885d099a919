"""Measure each mode's distance from the target's distribution and its tokens per target pass.

    make fidelity                                        # everything, resumable at any point
    .venv/bin/python bench/fidelity --list               # lists the cells
    .venv/bin/python bench/fidelity --only 'exact-*'     # a part of it
    .venv/bin/python bench/fidelity --problems 20        # a quick run, in another --output-dir

Engines answer; then plain models compute, for each token of each answer, the distributions of
target and draft. Every answer and every score is written as soon as it is complete, so after an
interruption the same command continues where it stopped. ``fidelity-output/`` then holds them, a
CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from answers import GOES_ON, Start, at_least_two, fingerprint
from fidelity.grid import SIZES, TEMPERATURES
from fidelity.measure import running
from fidelity.plan import FidelityPlan
from fidelity.plot import plot_rows
from fidelity.report import CellRow, conclusions, make_rows, markdown
from fidelity.scoring import Scorer, by_processes
from results import Report
from study import complete, grid_parser, main_of, positive

from sglang_smc.cpu.threads import usable_cores

REPORT = Report("fidelity", CellRow, markdown, plot_rows)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    what = "Tokens per target pass, accuracy, and distance from the target's law, of all modes."
    return scored_options("fidelity", what, 2000, argv)


def scored_options(
    name: str, what: str, problems: int, argv: list[str] | None
) -> argparse.Namespace:
    """Parse the options of a study of scored answers."""
    parser = grid_parser(name, what, look="--list")
    add = parser.add_argument
    add("--problems", type=at_least_two, default=problems, help="held-out problems for each cell")
    add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T")
    add("--jobs", type=positive, default=usable_cores(), help="processes that score answers")
    return parser.parse_args(argv)


def measured(plan: FidelityPlan, start: Start, score: Scorer) -> str:
    """Complete the selected cells, then report on all that are complete."""
    plan.finish(start, score)
    rows = make_rows(plan.scored())
    REPORT.write(plan.options.output_dir, rows, plan.settings(), note)
    return conclusions(rows)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    sizes = f"N={SIZES['num_particles']}, K={SIZES['num_steps']}"
    last = origin["settings"]["problems"] - 1
    return (
        f"The shipped pair, {sizes}; held-out problems 0 to {last}, each with "
        f"its number as the seed; on {origin['hardware']}, {origin['date'][:10]}. In brackets 95 % "
        "intervals, over answers. "
        "Tilt: 0 is the target's law. Innovation: log p + H, 0 under the target."
    )


def publish(plan: FidelityPlan) -> None:
    """Copy the results to bench/results; raise BenchError unless the grid is complete."""
    plan.require_all()
    REPORT.publish(plan.options.output_dir)


def main(
    argv: list[str] | None = None,
    start: Start = running,
    score: Scorer = by_processes,
) -> int:
    """Run the benchmark; return exit status 0 if it completes."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = FidelityPlan(options, fingerprint())
        complete(plan, lambda: measured(plan, start, score), lambda: publish(plan))

    return main_of(run, GOES_ON)
