"""Measure drafts: tokens per target pass, distance from the target, and expected speed.

    make drafts                                        # everything, resumable at any point
    .venv/bin/python bench/drafts --list               # lists the cells
    .venv/bin/python bench/drafts --only 'eagle-3-*'   # a part of it
    .venv/bin/python bench/drafts --problems 20        # a quick run, in another --output-dir

As `bench/fidelity`, with an engine for each proposal; its requests choose N, mode and
temperature. Expected tokens per second are the planner's, of an 8B. ``drafts-output/`` then holds
all answers and scores, a CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse

from answers import GOES_ON, Start, fingerprint
from drafts.chains import Counter, count
from drafts.engines import running
from drafts.plan import DraftsPlan
from drafts.plot import plot_rows
from drafts.report import DraftRow, markdown, note, rows_of
from fidelity.cli import scored_options
from fidelity.scoring import Scorer, by_processes
from results import Report
from study import complete, main_of

REPORT = Report("drafts", DraftRow, markdown, plot_rows)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    what = (
        "Tokens per target pass, distance from the target's law, and tokens a second to expect, "
        "of all that drafts."
    )
    return scored_options("drafts", what, 200, argv)


def measured(plan: DraftsPlan, start: Start, score: Scorer, count: Counter) -> str:
    """Complete the selected cells, then report on all that are complete."""
    plan.finish(start, score)
    rows = rows_of(plan.scored(), plan.plugins, count)
    return REPORT.write(plan.options.output_dir, rows, plan.settings(), note)


def publish(plan: DraftsPlan) -> None:
    """Copy the results to bench/results; raise BenchError unless the grid is complete."""
    plan.require_all()
    REPORT.publish(plan.options.output_dir)


def main(
    argv: list[str] | None = None,
    start: Start = running,
    score: Scorer = by_processes,
    count: Counter = count,
) -> int:
    """Run the benchmark; return exit status 0 if it completes."""
    options = parse_arguments(argv)

    def run() -> None:
        plan = DraftsPlan(options, fingerprint())
        complete(plan, lambda: measured(plan, start, score, count), lambda: publish(plan))

    return main_of(run, GOES_ON)
