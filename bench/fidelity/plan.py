"""Plan the cells of a run, and the files of the output folder that it reads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from answers import MAX_TOKENS, AnswersPlan, Start, measure
from fidelity.grid import Cell, cells
from fidelity.measure import Record, graded, settings
from fidelity.scoring import Score, Scorer, Scores, score_cells, score_log

SEEDS = "problem i is asked with seed i"


class ScoredPlan(AnswersPlan[Cell, Record, Scores]):
    """The cells of a run, with answers scored by plain models.

    Args:
        settings: returns the keywords of an engine except the models.
        code: the fingerprint that all answers depend on.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        every: Sequence[Cell],
        settings: Callable[[str], dict[str, Any]],
        code: Mapping[str, Any],
    ) -> None:
        self._code, self._settings = dict(code), settings
        super().__init__(options, every, Record)

    def identity(self, cell: Cell) -> dict[str, Any]:
        return {
            **self._code,
            "cell": cell.slug,
            "smc": cell.kind.smc,
            "engine": self._settings(cell.engine),
            "max_new_tokens": MAX_TOKENS,
        }

    def remarks_on(self, cell: Cell) -> Scores:
        return score_log(self.path("scores", cell), self.identity(cell))

    def finish(self, start: Start, score: Scorer) -> None:
        """Complete the selected cells: answers, then scores."""
        measure(self.todo(), start, graded)
        score_cells(self.unremarked(), score, self.options.jobs)

    def scored(self) -> dict[Cell, list[tuple[Record, Score]]]:
        """Return the answers of every complete cell with their scores."""
        found = {}
        for cell in self.complete():
            scores = self.remarks[cell].read()
            found[cell] = [(one, scores[one.index]) for one in self.answers[cell].read()]
        return found


class FidelityPlan(ScoredPlan):
    """The cells of this run, and the files of all cells for the report."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        super().__init__(options, cells(options.temperatures), settings, code)

    def identity(self, cell: Cell) -> dict[str, Any]:
        return super().identity(cell) | {"problems": self.options.problems}

    def settings(self, **more: Any) -> dict[str, Any]:
        return super().settings(seeds=SEEDS, engine=settings("smc"), code=self._code, **more)
