"""Compute the tokens that a round is expected to keep, by rule, on trees that drafts draw.

    .venv/bin/python bench/verifier                                 # the shipped pair, an hour
    .venv/bin/python bench/verifier --only '*-t0.7' --contexts 20
    .venv/bin/python bench/verifier --only 'coder-*' --contexts 20  # after make real-models

A context is a prompt and a part of an answer that the target draws. The draft draws N chains
behind it, plain models give p and q, and `smc.verification.descend` gives the shares, whose sum is
the expected number of tokens, the target's own included: only the tree is left to chance.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import study
from intervals import mean_of
from results import interval_cell, table
from study import PUBLISHED, Log, bar
from verifier.cells import VerifierCell, cells


def measure(cell: VerifierCell, log: Log, count: int) -> list[dict[str, float]]:
    """Return each context's numbers, of which the file may have some."""
    found = log.read()
    if len(found) < count:
        from verifier.trees import contexts_of, expected_of  # imports torch

        contexts = contexts_of(cell.pair, count, cell.temperature)
        rest = bar(
            iterable=range(len(found), count), initial=len(found), total=count, desc=cell.slug
        )
        with log.writing() as append, rest:
            for index in rest:
                append(expected_of(cell, contexts[index], seed=index))
    return log.read()


NOTE = (
    "Expected tokens of a round with {} contexts a cell and 95 % intervals; `q1`: drawn at draft "
    "temperature 1.\n\n"
)


def markdown(measured: dict[VerifierCell, list[dict[str, float]]]) -> str:
    """Return a table with a line for each cell."""
    first = next(iter(measured.values()))
    names = list(first[0])
    columns = {"": lambda row: f"`{row[0].slug}`"} | {
        name: lambda row, name=name: interval_cell(mean_of([one[name] for one in row[1]]), ".2f")
        for name in names
    }
    return NOTE.format(len(first)) + table(columns, list(measured.items())) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells; return exit status 0 if it completes."""
    made = study.parser("verifier", "Expected tokens of a round, by rule, on trees that are drawn.")
    study.add_selection(made)
    made.add_argument("--contexts", type=study.positive, default=100, help="of each cell")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), study.GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    patterns = options.only if options.only != ["*"] else ["draft-*", "head-*"]
    grid = study.selected(cells(), patterns)
    if options.list:
        print(*(cell.slug for cell in grid), sep="\n")
        return
    study.prepare_folder(options.output_dir)
    measured: dict[VerifierCell, list[dict[str, float]]] = {}
    for cell in grid:
        identity = study.code_fingerprint() | {"cell": cell.slug, "contexts": options.contexts}
        log = Log(options.output_dir / f"{cell.slug}.jsonl", identity)
        if options.fresh:
            log.drop()
        measured[cell] = measure(cell, log, options.contexts)
        (options.output_dir / "verifier.md").write_text(markdown(measured))
    print(markdown(measured))
    if options.publish:
        study.copy([options.output_dir / "verifier.md"], PUBLISHED / "verifier")
