"""Compare steering by potentials with choices among as many plain samples.

    make steering                                        # everything, resumable at any point
    .venv/bin/python bench/steering --list               # lists the cells
    .venv/bin/python bench/steering --only 'smc-draft-*' # a part of it
    .venv/bin/python bench/steering --problems 20        # a quick run, in another --output-dir

The shipped pair answers held-out problems: the draft alone as the model, and the target. A rule
that checks each step of arithmetic, and the trained reward model, score lines and answers.
``steering-output/`` then holds all answers, a CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from answers import GOES_ON, Start, at_least_two, measure
from results import Report
from steering.grid import PARTICLES
from steering.measure import Potentials, drawn, running, shipped, value
from steering.plan import SteeringPlan, code
from steering.plot import plot_rows
from steering.report import Row, markdown, note, rows_of, write_page
from study import REPOSITORY, complete, grid_parser, main_of, positive

REPORT = Report("steering", Row, markdown, plot_rows)
PAGE = REPOSITORY / "docs" / "potentials.md"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = grid_parser(
        "steering",
        "Accuracy with potentials, beside votes and choices among as many plain samples.",
        look="--list",
    )
    add = parser.add_argument
    add("--problems", type=at_least_two, default=200, help="held-out problems for each cell")
    sizes = {"type": positive, "nargs": "+", "default": list(PARTICLES), "metavar": "N"}
    add("--particles", choices=PARTICLES, help="numbers of particles", **sizes)
    return parser.parse_args(argv)


def measured(plan: SteeringPlan, start: Start, opened: Callable[[], Potentials]) -> str:
    """Complete the selected cells, then report on all that are complete."""
    measure(plan.todo(), start, drawn)
    value(plan.unremarked(), opened)
    return REPORT.write(plan.options.output_dir, rows_of(plan.drawn()), plan.settings(), note)


def publish(plan: SteeringPlan) -> None:
    """Copy the results to bench/results, and the tables to the page."""
    plan.require_all()
    REPORT.publish(plan.options.output_dir)
    write_page(PAGE, REPORT.read(plan.options.output_dir))


def main(
    argv: list[str] | None = None,
    start: Start = running,
    opened: Callable[[], Potentials] = shipped,
) -> int:
    """Run the benchmark; return exit status 0 if it completes."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = SteeringPlan(options, code())
        complete(plan, lambda: measured(plan, start, opened), lambda: publish(plan))

    return main_of(run, GOES_ON)
