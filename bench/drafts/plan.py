"""Which cells a run completes, and the code that the answers of others were measured with."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from drafts.engines import settings
from drafts.grid import Cell, cells, proposal_of
from fidelity.measure import MAX_TOKENS
from fidelity.plan import AnswersPlan, answers_path
from study import PAIR, Log, digest, matching


class DraftsPlan(AnswersPlan):
    """The cells of this run, and the files of all cells that the report may show.

    The selected cells are measured with the code that is here. Of all others what is there is
    shown, and each row of the report names the code (`plugin`) that its answers are of: a
    proposal is added without asking all the others again. Nor do answers depend on how many
    problems are asked: a later run with more of them goes on with what is there.
    """

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self._code, self.options = dict(code), options
        every = cells(options.temperatures)
        self._own = set(matching(every, options.only))
        self.plugins: dict[Cell, str] = {}
        super().__init__(options, every, self._identity)

    def _identity(self, cell: Cell) -> dict[str, Any]:
        self.plugins[cell] = self._code["plugin"] if cell in self._own else self._there(cell)
        proposal = proposal_of(cell.kind.engine)
        folder = None if proposal is None else proposal.folder
        return {
            **self._code,
            "plugin": self.plugins[cell],
            "draft": None if folder is None else digest((PAIR / folder).glob("*")),
            "cell": cell.slug,
            "smc": cell.kind.smc,
            "engine": settings(cell.kind.engine),
            "max_new_tokens": MAX_TOKENS,
        }

    def _there(self, cell: Cell) -> str:
        """The code that a file names; where there is none, this one's."""
        header = Log(answers_path(self.options, cell), {}).header()
        return header.get("plugin", self._code["plugin"])

    def settings(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "problems": self.options.problems,
            "first_problem": 0,
            "seeds": "problem i is asked with seed i",
            "max_new_tokens": MAX_TOKENS,
            "engines": {cell.kind.engine: settings(cell.kind.engine) for cell in self.answers},
            "code": self._code,
        }
