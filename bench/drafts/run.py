"""Measure drafts: tokens per target pass, distance from the target, and expected speed.

    make drafts                                        # everything, resumable at any point
    .venv/bin/python bench/drafts --list               # lists the cells
    .venv/bin/python bench/drafts --only 'eagle-3-*'   # a part of it
    .venv/bin/python bench/drafts --problems 20        # a quick run, in another --output-dir

As `bench/fidelity`, with an engine for each proposal; its requests choose N, mode and
temperature. Expected tokens per second are the planner's, of an 8B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafts import grid
from drafts.grid import Cell, cells, proposal_of
from drafts.report import BATCH, CONTEXT, DEVICE, TARGET, DraftRow, markdown, plot_rows, rows_of
from fidelity.scoring import ScoredStudy
from results import Report
from study import PAIR, Log, digest, matching


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    last = origin["settings"]["problems"] - 1
    return (
        f"The shipped pair and its heads, K = 8; held-out problems 0 to {last}, "
        f"each with its number as the seed; on {origin['hardware']}, {origin['date'][:10]}. In "
        "brackets 95 % intervals, over answers. Milliseconds are the planner's bound for a round "
        f"of {TARGET} on an {DEVICE.upper()}, batch {BATCH}, {CONTEXT:,} tokens of context, with a "
        "draft of the same kind; tokens / s to expect are tokens / target pass over these, a "
        "bound, too, and no measurement on a GPU. KL and tilt are looked for in the direction of "
        "the shipped draft, whatever drafted; the server's own tilt is to the draft at work. "
        "STANDALONE is SGLang's chain, measured."
    )


class Drafts(ScoredStudy[Cell]):
    """The study, with an engine for each proposal.

    The selected cells are measured with the current code. For the others existing answers are
    shown, and each row of the report names the code (`plugin`) that measured it: a proposal is
    added without measuring all the others again.
    """

    name = "drafts"
    about = (
        "Tokens per target pass, distance from the target's law, and tokens a second to expect, "
        "of all that drafts."
    )
    report = Report("drafts", DraftRow, markdown, plot_rows)
    note = staticmethod(note)

    def grid(self) -> list[Cell]:
        return cells(self.options.temperatures)

    def engine(self, name: str) -> dict[str, Any]:
        return grid.settings(name)

    def models(self, name: str) -> tuple[str, str | None]:
        proposal = proposal_of(name)
        return grid.TARGET, proposal and proposal.folder

    def identity(self, cell: Cell) -> dict[str, Any]:
        _, folder = self.models(cell.engine)
        draft = None if folder is None else digest((PAIR / folder).glob("*"))
        return super().identity(cell) | {"plugin": self.plugin(cell), "draft": draft}

    def plugin(self, cell: Cell) -> str:
        """Return the code of a cell; of one that is not selected, what its file names."""
        is_selected = matching([cell], self.options.only)
        there = {} if is_selected else Log(self.path("answers", cell), {}).header()
        return there.get("plugin", self.code["plugin"])

    def rows(self) -> list[DraftRow]:
        return rows_of(self.scored(), self.plugin)
