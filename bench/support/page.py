"""Write the tables of docs/support.md from the trials' results."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from support.families import FAMILIES, Family
from support.pairs import pairs_table
from support.trial import Trial

BEGIN, END = "<!-- made by bench/support -->", "<!-- end -->"
WORDS = {"run": "yes", "refused": "refused", "not here": "not here", "failed": "**fails**"}


def write_page(page: Path, found: dict[str, Trial]) -> None:
    """Write the tables between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n{END}{after}")


def tables(found: dict[str, Trial]) -> str:
    """Return a table for each kind of attention, and one of natural pairs."""
    parts = []
    for attention, families in groupby(FAMILIES, key=lambda family: family.attention):
        rows = [_row(family, found[family.name]) for family in families if family.name in found]
        parts += [f"**{attention.capitalize()}**\n", "| family | target | draft | |"]
        parts += ["| --- | --- | --- | --- |", *rows, ""]
    return "\n".join([*parts, "**Pairs**\n", pairs_table(), ""])


def _row(family: Family, trial: Trial) -> str:
    return f"| {family.name} | {WORDS[trial.target]} | {WORDS[trial.draft]} | {trial.note} |"
