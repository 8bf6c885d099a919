"""Write the tables of docs/support.md from the trials' results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from support.families import FAMILIES, Family
from support.trial import Trial

BEGIN, END = "<!-- made by bench/support -->", "<!-- end -->"
WORDS = {"run": "yes", "refused": "refused", "not here": "not here", "failed": "**fails**"}


def write_page(page: Path, found: dict[str, Trial]) -> None:
    """Write the tables between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n{END}{after}")


def tables(found: dict[str, Trial]) -> str:
    """Return a table for each kind of attention."""
    parts = []
    for attention, families in groupby(FAMILIES, key=lambda family: family.attention):
        parts += [f"**{attention.capitalize()}**\n", "| families | target | draft | |"]
        parts += ["| --- | --- | --- | --- |", *_rows(list(families), found), ""]
    return "\n".join(parts)


def _rows(families: Sequence[Family], found: Mapping[str, Trial]) -> Iterator[str]:
    """Yield a row for all families with the same result, in the order of the first ones."""
    named: dict[tuple[str, str, str], list[str]] = {}
    for trial in (found[family.name] for family in families if family.name in found):
        named.setdefault((trial.target, trial.draft, trial.note), []).append(trial.family)
    for (target, draft, note), names in named.items():
        yield f"| {'; '.join(names)} | {WORDS[target]} | {WORDS[draft]} | {note} |"
