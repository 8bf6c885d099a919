"""Which families of models run: each is started, asked in all modes, and held against transformers.

    python bench/support                   the families that have no result yet
    python bench/support --only 'Gemma 2'  these again
    python bench/support --publish         write the results and the tables of docs/support.md

An engine that dies takes its process with it, so each runs in one of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from results import provenance
from study import GOES_ON, PUBLISHED, REPOSITORY, main_of, parser, write_between
from support.families import FAMILIES, VOCAB, Family
from support.trial import Trial, try_family

RESULTS = PUBLISHED / "support" / "support.json"
PAGE = REPOSITORY / "docs" / "support.md"
MARKS = "<!-- made by bench/support -->", "<!-- end -->"
WORDS = {"run": "yes", "refused": "refused", "not here": "not here", "failed": "**fails**"}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the families; return exit status 0 if it completes."""
    made = parser("support", (__doc__ or "").splitlines()[0])
    made.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    made.add_argument("--publish", action="store_true", help="write results and the page")
    options = made.parse_args(argv)
    return main_of(lambda: run(options), GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    path = options.output_dir / "trials.json"
    found = read(path)
    wanted = [
        f for f in FAMILIES if (f.name in options.only if options.only else f.name not in found)
    ]
    for number, family in enumerate(wanted, 1):
        with tempfile.TemporaryDirectory() as folder:
            found[family.name] = trial = try_family(family, Path(folder))
        print(f"{number}/{len(wanted)}  {'  '.join(trial)}", flush=True)
        write(path, found)
    if options.publish:
        write(RESULTS, found, provenance=provenance({"vocabulary": VOCAB}))
        write_between(PAGE, MARKS, tables(found))


def read(path: Path) -> dict[str, Trial]:
    """Return the trials of an earlier run, by family."""
    if not path.exists():
        return {}
    return {one["family"]: Trial(**one) for one in json.loads(path.read_text())["families"]}


def write(path: Path, found: dict[str, Trial], **more: Any) -> None:
    """Write the trials, in the families' order."""
    rows = [found[family.name]._asdict() for family in FAMILIES if family.name in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**more, "families": rows}, indent=1) + "\n")


def tables(found: dict[str, Trial]) -> str:
    """Return a table for each kind of attention."""
    parts = []
    for attention, families in groupby(FAMILIES, key=lambda family: family.attention):
        parts += [f"**{attention.capitalize()}**\n", "| families | target | draft | |"]
        parts += ["| --- | --- | --- | --- |", *_rows(list(families), found), ""]
    return "\n".join(parts).rstrip()


def _rows(families: Sequence[Family], found: dict[str, Trial]) -> Iterator[str]:
    """Yield a row for all families with the same result, in the order of the first ones."""
    named: dict[tuple[str, str, str], list[str]] = {}
    for trial in (found[family.name] for family in families if family.name in found):
        named.setdefault((trial.target, trial.draft, trial.note), []).append(trial.family)
    for (target, draft, note), names in named.items():
        yield f"| {'; '.join(names)} | {WORDS[target]} | {WORDS[draft]} | {note} |"
