"""Which draft yields how many tokens a target pass, how far from the target, and how fast?

    make drafts                                        # everything, resumable at any point
    .venv/bin/python bench/drafts --list               # what there is to measure
    .venv/bin/python bench/drafts --only 'eagle-3-*'   # a part of it
    .venv/bin/python bench/drafts --problems 20        # a quick look, in another --output-dir

As `bench/fidelity`, with an engine for each proposal, whose requests choose N, mode and
temperature. Tokens a second to expect are the planner's, of an 8B. ``drafts-output/`` then holds
all answers and scores, a CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from drafts.chains import Counter, count
from drafts.engines import running
from drafts.plan import DraftsPlan
from drafts.plot import plot_rows
from drafts.report import markdown, note, read_csv, rows_of, write_csv
from fidelity.cli import GOES_ON, at_least_two
from fidelity.grid import TEMPERATURES
from fidelity.measure import Start, measure
from fidelity.scoring import Scorer, by_processes, score_cells
from fidelity.store import fingerprint
from results import provenance
from study import PAIR, PUBLISHED, BenchError, complete, copy, grid_parser, main_of, positive

from sglang_smc.cpu.threads import usable_cores

CSV, TABLE, PLOT, ORIGIN = OUTPUTS = ("drafts.csv", "drafts.md", "drafts.png", "provenance.json")
START: Start = partial(running, pair=PAIR)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = grid_parser(
        "drafts",
        "Tokens per target pass, distance from the target's law, and tokens a second to expect, "
        "of all that drafts.",
        look="--list",
    )
    add = parser.add_argument
    add("--problems", type=at_least_two, default=200, help="held-out problems for each cell")
    add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T")
    add("--jobs", type=positive, default=usable_cores(), help="processes that score answers")
    return parser.parse_args(argv)


def measured(plan: DraftsPlan, start: Start, score: Scorer, count: Counter) -> str:
    """Complete the selected cells, then report on all that is complete."""
    measure([(cell, plan.answers[cell]) for cell in plan.selected], start)
    score_cells(plan.to_score(), PAIR, score, plan.options.jobs)
    folder: Path = plan.options.output_dir
    origin = provenance(plan.settings())
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    write_csv(rows_of(plan.complete(), plan.plugins, count), folder / CSV, origin)
    return written(folder)


def written(folder: Path) -> str:
    """Make table and picture of the numbers in ``folder``; returns the table."""
    rows, origin = read_csv(folder / CSV), json.loads((folder / ORIGIN).read_text())
    text = markdown(rows, note(origin))
    (folder / TABLE).write_text(text)
    plot_rows(rows, folder / PLOT)
    return text


def publish(plan: DraftsPlan) -> None:
    """Copy the results to where the repository keeps them; never a part of the grid."""
    missing = [cell.slug for cell in plan.answers if cell not in plan.complete()]
    if missing:
        raise BenchError(
            f"Not published: {len(missing)} of {len(plan.answers)} cells are not complete, as "
            f"{missing[0]}. Complete them with the same command without --only."
        )
    copy([plan.options.output_dir / name for name in OUTPUTS], PUBLISHED / "drafts")


def main(
    argv: list[str] | None = None,
    start: Start = START,
    score: Scorer = by_processes,
    count: Counter = count,
) -> int:
    """Run the benchmark; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = DraftsPlan(options, fingerprint(PAIR))
        complete(plan, lambda: measured(plan, start, score, count), lambda: publish(plan))

    return main_of(run, GOES_ON)
