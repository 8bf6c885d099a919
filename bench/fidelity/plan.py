"""Which cells this run completes, and which files of the output folder it may read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fidelity.engines import settings
from fidelity.grid import Cell, cells
from fidelity.measure import MAX_TOKENS
from fidelity.scoring import Score, Scores, score_log
from fidelity.store import Answers, Record
from study import Log, selected

#: An answer, and what the plain models say of it.
Scored = tuple[Record, Score]


def answers_path(options: argparse.Namespace, cell: Cell) -> Path:
    """Where the answers of a cell are kept."""
    return options.output_dir / "answers" / f"{cell.slug}.jsonl"


class AnswersPlan:
    """The cells of a run whose engines answer and whose answers are scored, and their files.

    Args:
        options: of the command line.
        every: all cells, whether selected or not.
        identity: what the answers of a cell depend on.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        every: Sequence[Cell],
        identity: Callable[[Cell], dict[str, Any]],
    ) -> None:
        self.options = options
        self._identity_of = identity
        self.selected = selected(every, options.only, look="--list")
        self.answers = {cell: self._answers(cell) for cell in every}
        self.scores = {cell: self._scores(cell) for cell in every}

    def _answers(self, cell: Cell) -> Answers:
        log = Log(answers_path(self.options, cell), self._identity_of(cell))
        return Answers(log, self.options.problems)

    def _scores(self, cell: Cell) -> Scores:
        return score_log(self.options.output_dir / "scores", cell, self._identity_of(cell))

    def own_logs(self) -> list[Log]:
        """The files of the selected cells."""
        answers = [self.answers[cell].log for cell in self.selected]
        return answers + [self.scores[cell].log for cell in self.selected]

    def logs(self) -> list[Log]:
        """The same files: nothing else is read before the report."""
        return self.own_logs()

    def to_score(self) -> list[tuple[Cell, list[Record], Scores]]:
        """The selected cells with their answers."""
        return [(cell, self.answers[cell].records(), self.scores[cell]) for cell in self.selected]

    def complete(self) -> dict[Cell, list[Scored]]:
        """The answers of every cell that is complete, by this run or an earlier one like it."""
        return {cell: self._scored(cell) for cell in self.answers if self._is_complete(cell)}

    def _scored(self, cell: Cell) -> list[Scored]:
        scores = self.scores[cell].read()
        records = sorted(self.answers[cell].records(), key=lambda record: record.index)
        asked = (record for record in records if record.index < self.options.problems)
        return [(record, scores[record.index]) for record in asked]

    def _is_complete(self, cell: Cell) -> bool:
        answers, scores = self.answers[cell], self.scores[cell]
        if not (answers.log.fits and scores.log.fits):
            return False
        return not answers.missing() and not scores.missing(answers.records())

    def status(self) -> str:
        """A line for each selected cell."""
        lines = []
        for cell in self.selected:
            records, problems = self.answers[cell].records(), self.options.problems
            scored = len(records) - len(self.scores[cell].missing(records))
            lines.append(f"{cell.slug:20} {len(records):4} of {problems} answered, {scored} scored")
        return "\n".join(lines)


class FidelityPlan(AnswersPlan):
    """The cells of this run, and the files of all cells that the report may show."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self._code = dict(code)
        every = cells(options.temperatures)
        super().__init__(options, every, lambda cell: self._identity(options, cell))

    def _identity(self, options: argparse.Namespace, cell: Cell) -> dict[str, Any]:
        return {
            **self._code,
            "cell": cell.slug,
            "smc": cell.kind.smc,
            "engine": settings(cell.kind.engine),
            "problems": options.problems,
            "max_new_tokens": MAX_TOKENS,
        }

    def settings(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "problems": self.options.problems,
            "first_problem": 0,
            "seeds": "problem i is asked with seed i",
            "max_new_tokens": MAX_TOKENS,
            "engine": settings("smc"),
            "code": self._code,
        }
