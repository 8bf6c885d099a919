"""Measure chains from one pass: how much N chains of one block yield over a single chain.

    .venv/bin/python bench/chains                     # everything, resumable at any point
    .venv/bin/python bench/chains --only 'dspark-*'   # a part of it
    .venv/bin/python bench/chains --problems 20       # a quick run, in another --output-dir

SGLang's own DFLASH and DSPARK run on no CPU, so they are measured by their laws: DFLASH verifies
the likeliest tokens of a block, DSPARK one sampled chain. With
`--speculative-use-block-verification` the latter keeps as many tokens as `exact` with one chain; of
likeliest tokens both rules keep the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from answers import COMMON, Cell, Record, Reply, Study, about, grade
from drafts.run import NUM_STEPS, TARGET
from fidelity.run import EXACT, SMC_ENGINE
from intervals import Interval, paired_ratio_of_ratios, wilson
from results import (
    Report,
    by_temperature,
    interval_cell,
    table,
    tokens_a_pass,
    tokens_and_passes,
)

# --- Cells

TEMPERATURES = (0.7, 1.0)
PARTICLES = (1, 2, 4, 8)
DFLASH = "DFlash"
DRAFTS = {DFLASH: "dflash", "DSpark": "dspark"}
"""Names of drafts, and their folders beside the target."""

LIKELIEST = 1e-6
"""A temperature of the draft at which a chain has the likeliest tokens."""


@dataclass(frozen=True)
class ChainCell(Cell):
    """A number of chains of a draft."""

    num_particles: int = 1


def cells() -> list[ChainCell]:
    """Return all cells, engine by engine."""
    found = []
    for draft in DRAFTS:
        for temperature in TEMPERATURES:
            found += [likeliest(draft, temperature)] if draft == DFLASH else []
            found += [sampled(draft, temperature, n) for n in PARTICLES]
    return found


def sampled(draft: str, temperature: float, n: int) -> ChainCell:
    """Return the cell of n chains that are sampled from the draft."""
    asked = {"mode": EXACT, "num_particles": n, "num_steps": NUM_STEPS}
    return ChainCell(f"{draft} N={n}", draft, temperature, asked, num_particles=n)


def likeliest(draft: str, temperature: float) -> ChainCell:
    """Return the cell of the one chain that has the likeliest token of each row."""
    asked = {"mode": EXACT, "num_particles": 1, "num_steps": NUM_STEPS}
    asked |= {"draft_temperature": LIKELIEST}
    return ChainCell(f"{draft} of likeliest tokens", draft, temperature, asked)


def as_sglang(draft: str, temperature: float) -> ChainCell:
    """Return the cell that keeps as much as SGLang's own algorithm for this draft."""
    greedy = draft == DFLASH
    return likeliest(draft, temperature) if greedy else sampled(draft, temperature, 1)


# --- Rows


@dataclass(frozen=True, kw_only=True)
class ChainRow:
    """A line of the table."""

    label: str  # without the temperature
    temperature: float
    rows: int  # that the target reads in a pass
    draft_passes: int
    tokens_per_pass: Interval
    to_one_chain: Interval | None  # ratio to N = 1, on the same problems
    to_sglang: Interval | None  # ratio to what SGLang's own algorithm keeps
    accuracy: Interval
    plugin: str  # fingerprint of the code that answered


def rows_of(
    found: Mapping[ChainCell, Sequence[Record]], plugin: Callable[[ChainCell], str]
) -> list[ChainRow]:
    """Return a row for each cell; ``plugin`` names the code that measured it."""

    def times(some: Sequence[Record], other: ChainCell) -> Interval | None:
        there = found.get(other)
        return there and paired_ratio_of_ratios(_counts(some), _counts(there))

    return [
        ChainRow(
            label=cell.label,
            temperature=cell.temperature,
            rows=cell.num_particles * (NUM_STEPS + 1),
            draft_passes=1,
            tokens_per_pass=tokens_a_pass([one.info for one in some]),
            to_one_chain=times(some, sampled(cell.engine, cell.temperature, 1)),
            to_sglang=times(some, as_sglang(cell.engine, cell.temperature)),
            accuracy=wilson(sum(one.right for one in some), len(some)),
            plugin=plugin(cell),
        )
        for cell, some in found.items()
    ]


def _counts(found: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Return each answer's tokens and target passes; see `tokens_and_passes`."""
    return tokens_and_passes([one.info for one in found])


COLUMNS: dict[str, Callable[[ChainRow], str]] = {
    "": lambda row: row.label,
    "rows": lambda row: f"{row.rows}",
    "draft passes": lambda row: f"{row.draft_passes}",
    "tokens / target pass": lambda row: interval_cell(row.tokens_per_pass, ".2f"),
    "times one chain": lambda row: interval_cell(row.to_one_chain, ".2f"),
    "times what SGLang's own keeps": lambda row: interval_cell(row.to_sglang, ".2f"),
    "accuracy, %": lambda row: interval_cell(row.accuracy, ".1f", scale=100),
}


def markdown(rows: Sequence[ChainRow], note: str) -> str:
    """Return a table for each temperature."""
    parts = [note]
    for title, some in by_temperature(rows).items():
        parts.append(f"**{title}**\n\n{table(COLUMNS, some)}")
    return "\n\n".join(parts) + "\n"


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    return (
        f"The shipped pair and its block heads, `exact`, K = {NUM_STEPS}; {about(origin)}"
        "Rows: what the target reads in a pass, equal ones counted. SGLang 0.5.23 starts neither "
        "DFLASH nor DSPARK on a CPU, and block verification on CUDA alone, so what they keep is "
        "that of their laws: DFLASH verifies the likeliest token of each row, of which both of its "
        "rules keep the same; DSPARK verifies one sampled chain, as N = 1."
    )


# --- The study


class ChainStudy(Study[ChainCell, Record]):
    """The study, with an engine for each draft."""

    name = "chains"
    about = "Tokens per target pass of N chains that one pass of a block head drafts."
    kind = Record
    report = Report("chains", ChainRow, markdown)
    note = staticmethod(note)

    def grid(self) -> list[ChainCell]:
        return cells()

    def engine(self, name: str) -> dict[str, Any]:
        return COMMON | SMC_ENGINE

    def models(self, name: str) -> tuple[str, str | None]:
        return TARGET, DRAFTS[name]

    def stored(self, cell: ChainCell, reply: Reply, sample: int) -> Record:
        return grade(reply)

    def rows(self) -> list[ChainRow]:
        return rows_of(self.complete(), self.plugin)


main = ChainStudy.main
