"""Measure each mode's distance from the target's distribution and its tokens per target pass.

    make fidelity                                        # everything, resumable at any point
    .venv/bin/python bench/fidelity --list               # lists the cells
    .venv/bin/python bench/fidelity --only 'exact-*'     # a part of it
    .venv/bin/python bench/fidelity --problems 20        # a quick run, in another --output-dir

Engines answer; then plain models compute, for each token of each answer, the distributions of
target and draft. Every answer and every score is written as soon as it is complete, so after an
interruption the same command continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from answers import COMMON
from fidelity.grid import SIZES, SMC_ENGINE, Cell, cells
from fidelity.report import CellRow, make_rows, markdown, plot_rows
from fidelity.scoring import ScoredStudy
from results import Report


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    sizes = f"N={SIZES['num_particles']}, K={SIZES['num_steps']}"
    last = origin["settings"]["problems"] - 1
    return (
        f"The shipped pair, {sizes}; held-out problems 0 to {last}, each with "
        f"its number as the seed; on {origin['hardware']}, {origin['date'][:10]}. In brackets 95 % "
        "intervals, over answers. "
        "Tilt: 0 is the target's law. Innovation: log p + H, 0 under the target."
    )


class Fidelity(ScoredStudy[Cell]):
    """The study, with one engine for all modes."""

    name = "fidelity"
    about = "Tokens per target pass, accuracy, and distance from the target's law, of all modes."
    problems = 2000
    report = Report("fidelity", CellRow, markdown, plot_rows)
    note = staticmethod(note)

    def grid(self) -> list[Cell]:
        return cells(self.options.temperatures)

    def engine(self, name: str) -> dict[str, Any]:
        return COMMON | (SMC_ENGINE if name == "smc" else {})

    def models(self, name: str) -> tuple[str, str | None]:
        return ("target", "draft") if name == "smc" else (name, None)

    def rows(self) -> list[CellRow]:
        return make_rows(self.scored())
