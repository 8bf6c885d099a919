"""How far is each mode from the target's law, and how many tokens does a target pass yield?

    make fidelity                                        # everything, resumable at any point
    .venv/bin/python bench/fidelity --list               # what there is to measure
    .venv/bin/python bench/fidelity --only 'exact-*'     # a part of it
    .venv/bin/python bench/fidelity --problems 20        # a quick look, in another --output-dir

Engines answer; then the plain models say of each token of each answer what the target's law and the
draft's were there. Every answer and every score is written down as it comes, so after an
interruption the same command goes on where it stopped. ``fidelity-output/`` then holds them, a
CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from fidelity.engines import running
from fidelity.grid import SIZES, TEMPERATURES
from fidelity.measure import MAX_PROBLEMS, Start, measure
from fidelity.plan import FidelityPlan
from fidelity.plot import plot_rows
from fidelity.report import CellRow, conclusions, make_rows, markdown, write_csv
from fidelity.scoring import Scorer, by_processes, score_cells
from fidelity.store import fingerprint
from results import provenance
from study import PAIR, PUBLISHED, BenchError, complete, copy, grid_parser, main_of, positive

from sglang_smc.cpu.threads import usable_cores

CSV, TABLE, PLOT, ORIGIN = OUTPUTS = (
    "fidelity.csv",
    "fidelity.md",
    "fidelity.png",
    "provenance.json",
)
START: Start = partial(running, pair=PAIR)
GOES_ON = "All answers so far are kept: the same command goes on from here."


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = grid_parser(
        "fidelity",
        "Tokens per target pass, accuracy, and distance from the target's law, of all modes.",
        look="--list",
    )
    add = parser.add_argument
    add("--problems", type=at_least_two, default=2000, help="held-out problems for each cell")
    add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T")
    add("--jobs", type=positive, default=usable_cores(), help="processes that score answers")
    return parser.parse_args(argv)


def at_least_two(text: str) -> int:
    """One answer has no interval, and problems beyond the last are others'."""
    value = int(text)
    if not 2 <= value <= MAX_PROBLEMS:
        raise argparse.ArgumentTypeError(f"{value} is not from 2 to {MAX_PROBLEMS}")
    return value


def measured(plan: FidelityPlan, start: Start, score: Scorer) -> str:
    """Complete the selected cells, then report on all that is complete."""
    measure([(cell, plan.answers[cell]) for cell in plan.selected], start)
    score_cells(plan.to_score(), PAIR, score, plan.options.jobs)
    rows = make_rows(plan.complete())
    write_outputs(rows, plan)
    return conclusions(rows)


def write_outputs(rows: list[CellRow], plan: FidelityPlan) -> None:
    """The CSV, the table, the plot, and what one needs to make them again."""
    folder: Path = plan.options.output_dir
    origin = provenance(plan.settings())
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    write_csv(rows, folder / CSV, origin)
    (folder / TABLE).write_text(markdown(rows, note(plan, origin)))
    plot_rows(rows, folder / PLOT)


def note(plan: FidelityPlan, origin: dict[str, Any]) -> str:
    """What stands above the tables."""
    sizes = f"N={SIZES['num_particles']}, K={SIZES['num_steps']}"
    return (
        f"The shipped pair, {sizes}; held-out problems 0 to {plan.options.problems - 1}, each with "
        f"its number as the seed; on {origin['hardware']}, {origin['date'][:10]}. In brackets 95 % "
        "intervals, over answers. "
        "Tilt: 0 is the target's law. Innovation: log p + H, 0 under the target."
    )


def publish(plan: FidelityPlan) -> None:
    """Copy the results to where the repository keeps them; never a part of the grid."""
    missing = len(plan.answers) - len(plan.complete())
    if missing:
        raise BenchError(
            f"Not published: {missing} of {len(plan.answers)} cells are not complete. "
            "Complete them with the same command without --only."
        )
    copy([plan.options.output_dir / name for name in OUTPUTS], PUBLISHED / "fidelity")


def main(
    argv: list[str] | None = None,
    start: Start = START,
    score: Scorer = by_processes,
) -> int:
    """Run the benchmark; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = FidelityPlan(options, fingerprint(PAIR))
        complete(plan, lambda: measured(plan, start, score), lambda: publish(plan))

    return main_of(run, GOES_ON)
