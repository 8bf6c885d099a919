"""Plan the cells of a run, and record the code that measured the other cells."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from drafts.engines import settings
from drafts.grid import cells, proposal_of
from fidelity.grid import Cell
from fidelity.plan import SEEDS, ScoredPlan
from study import PAIR, Log, digest, matching


class DraftsPlan(ScoredPlan):
    """The cells of this run, and the files of all cells for the report.

    The selected cells are measured with the current code. For the others existing answers are
    shown, and each row of the report names the code (`plugin`) that measured it: a proposal is
    added without measuring all the others again. Answers do not depend on the number of problems:
    a later run with more problems continues.
    """

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        every = cells(options.temperatures)
        self._own = set(matching(every, options.only))
        self.plugins: dict[Cell, str] = {}
        super().__init__(options, every, settings, code)

    def identity(self, cell: Cell) -> dict[str, Any]:
        # For a cell that is not selected, use the code that its file names, if there is one.
        there = {} if cell in self._own else Log(self.path("answers", cell), {}).header()
        self.plugins[cell] = there.get("plugin", self._code["plugin"])
        proposal = proposal_of(cell.engine)
        folder = None if proposal is None else proposal.folder
        draft = None if folder is None else digest((PAIR / folder).glob("*"))
        return super().identity(cell) | {"plugin": self.plugins[cell], "draft": draft}

    def settings(self, **more: Any) -> dict[str, Any]:
        engines = {cell.engine: settings(cell.engine) for cell in self.answers}
        return super().settings(seeds=SEEDS, engines=engines, code=self._code, **more)
