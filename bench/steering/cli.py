"""What do potentials add, beside choosing among as many plain samples?

    make steering                                        # everything, resumable at any point
    .venv/bin/python bench/steering --list               # what there is to measure
    .venv/bin/python bench/steering --only 'smc-draft-*' # a part of it
    .venv/bin/python bench/steering --problems 20        # a quick look, in another --output-dir

The shipped pair answers held-out problems: the draft alone as the model, and the target. A rule
that checks each step of arithmetic, and the trained reward model, judge lines and answers.
``steering-output/`` then holds all answers, a CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fidelity.cli import GOES_ON, at_least_two
from fidelity.measure import Start
from results import provenance
from steering.engines import running
from steering.grid import PARTICLES
from steering.measure import Values, measure, value
from steering.plan import SteeringPlan, code
from steering.plot import plot_rows
from steering.report import markdown, note, read_csv, rows_of, write_csv, write_page
from study import (
    PAIR,
    PUBLISHED,
    REPOSITORY,
    BenchError,
    complete,
    copy,
    grid_parser,
    main_of,
    positive,
)

CSV, TABLE, PLOT, ORIGIN = OUTPUTS = (
    *("steering.csv", "steering.md", "steering.png"),
    "provenance.json",
)
PAGE = REPOSITORY / "docs" / "steering.md"
START: Start = partial(running, pair=PAIR)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
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


def measured(plan: SteeringPlan, start: Start, values: Callable[[], Values]) -> str:
    """Complete the selected cells, then report on all that is complete."""
    measure(plan.todo(), start)
    value(plan.to_value(), values)
    folder: Path = plan.options.output_dir
    origin = provenance(plan.settings())
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    write_csv(rows_of(plan.complete()), folder / CSV, origin)
    return written(folder)


def written(folder: Path) -> str:
    """Make table and picture of the numbers in ``folder``; returns the table."""
    rows, origin = read_csv(folder / CSV), json.loads((folder / ORIGIN).read_text())
    text = markdown(rows, note(origin))
    (folder / TABLE).write_text(text)
    plot_rows(rows, folder / PLOT)
    return text


def publish(plan: SteeringPlan) -> None:
    """Copy the results to where the repository keeps them, and the tables to their page."""
    missing = [cell.slug for cell in plan.pools if cell not in plan.complete()]
    if missing:
        raise BenchError(
            f"Not published: {len(missing)} of {len(plan.pools)} cells are not complete, as "
            f"{missing[0]}. Complete them with the same command without --only."
        )
    copy([plan.options.output_dir / name for name in OUTPUTS], PUBLISHED / "steering")
    write_page(PAGE, read_csv(PUBLISHED / "steering" / CSV))


def main(
    argv: list[str] | None = None,
    start: Start = START,
    values: Callable[[], Values] = Values.shipped,
) -> int:
    """Run the benchmark; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = SteeringPlan(options, code())
        complete(plan, lambda: measured(plan, start, values), lambda: publish(plan))

    return main_of(run, GOES_ON)
