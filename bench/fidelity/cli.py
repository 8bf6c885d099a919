"""How faithful is SMC, and how many tokens does a target pass yield, at which setting?

    make fidelity                                        # everything, resumable at any point
    .venv/bin/python bench/fidelity --list               # what there is to measure
    .venv/bin/python bench/fidelity --only 'exact-*'     # a part of it
    .venv/bin/python bench/fidelity --problems 20        # a quick look, in another --output-dir

Every answer is written down as it comes, so after an interruption the same command goes on where
it stopped. ``fidelity-output/`` then holds the answers, a CSV, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from arguments import positive
from fidelity.bounding import Bound, bound_cells, by_plain_models, read_bounds
from fidelity.engines import running
from fidelity.grid import TEMPERATURES
from fidelity.measure import Start, measure
from fidelity.plan import Plan
from fidelity.plot import plot_rows
from fidelity.report import CellRow, conclusions, make_rows, markdown, write_csv
from fidelity.store import fingerprint
from logs import BenchError, prepare_folder
from results import provenance

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PAIR = REPOSITORY / "bench" / "pair"
PUBLISHED = REPOSITORY / "bench" / "results" / "fidelity"
CSV, TABLE, PLOT, ORIGIN = OUTPUTS = (
    "fidelity.csv",
    "fidelity.md",
    "fidelity.png",
    "provenance.json",
)
START: Start = partial(running, pair=PAIR)
BOUND: Bound = partial(by_plain_models, pair=PAIR)
GOES_ON = "All answers so far are kept: the same command goes on from here."


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bench/fidelity",
        description="Accuracy, tokens per target pass and divergence of SMC at many settings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--problems", type=positive, default=400, help="held-out problems for each cell")
    add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T")
    add("--bound-problems", type=_none_or_several, default=8, help="0: no bounds")
    add(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="cells whose slug matches one of these, as a shell would",
    )
    add("--list", action="store_true", help="print the cells, and what is done, and stop")
    add("--fresh", action="store_true", help="forget what the output folder has of these cells")
    add("--publish", action="store_true", help="also copy the results to bench/results/fidelity")
    add("--output-dir", type=Path, default=Path("fidelity-output"))
    return parser.parse_args(argv)


def _none_or_several(text: str) -> int:
    value = int(text)
    if value != 0 and value < 2:
        raise argparse.ArgumentTypeError(f"{value} is neither 0 nor at least 2")
    return value


def run(options: argparse.Namespace, start: Start, bound: Bound) -> None:
    """Complete the selected cells and their bounds, then report on all that is complete."""
    began = time.monotonic()
    plan = Plan(options, fingerprint(REPOSITORY, PAIR))
    if options.fresh and not options.list:
        plan.forget()
    plan.check()
    if options.list:
        print(plan.status())
        return
    prepare_folder(options.output_dir)
    measure([(cell, plan.answers[cell]) for cell in plan.selected], start)
    bound_cells(plan.selected_bounds(), options.bound_problems, bound)
    rows = make_rows(plan.complete(), read_bounds(plan.complete_bounds()))
    write_outputs(rows, plan)
    print(f"\n{conclusions(rows)}\n\n{time.monotonic() - began:.0f} s. {_where(options)}")
    if options.publish:
        publish(plan)


def _where(options: argparse.Namespace) -> str:
    return f"In {options.output_dir}/: {', '.join(OUTPUTS)} and the answers."


def write_outputs(rows: list[CellRow], plan: Plan) -> None:
    """The CSV, the table, the plot, and what one needs to make them again."""
    folder: Path = plan.options.output_dir
    origin = {"settings": plan.settings(), **provenance(REPOSITORY)}
    del origin["argv"]  # it may name folders of this machine; the settings say it all
    note = (
        f"{plan.options.problems} held-out problems a cell, {plan.options.bound_problems} for the "
        f"bounds of few problems; on {origin['hardware']}, {origin['date'][:10]}. In brackets "
        "95 % intervals. Divergences in nats an answer."
    )
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    write_csv(rows, folder / CSV, origin)
    (folder / TABLE).write_text(markdown(rows, note))
    plot_rows(rows, folder / PLOT, problems=plan.options.problems)


def publish(plan: Plan) -> None:
    """Copy the results to where the repository keeps them; never a part of the grid."""
    missing = len(plan.answers) - len(plan.complete())
    if missing:
        raise BenchError(
            f"Not published: {missing} of {len(plan.answers)} cells are not complete. "
            "Complete them with the same command without --only."
        )
    PUBLISHED.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:
        shutil.copy(plan.options.output_dir / name, PUBLISHED / name)


def main(
    argv: list[str] | None = None,
    start: Start = START,
    bound: Bound = BOUND,
) -> int:
    """Run the benchmark; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)
    try:
        run(options, start, bound)
    except BenchError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {GOES_ON}", file=sys.stderr)
        return 130
    return 0
