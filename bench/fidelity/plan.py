"""Which cells this run completes, and which files of the output folder it may read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fidelity.bounding import NUM_CONDITIONAL, bound_log, bounded
from fidelity.engines import settings
from fidelity.grid import Cell, cells
from fidelity.measure import MAX_TOKENS
from fidelity.store import Answers, Record
from study import Log, selected


class FidelityPlan:
    """The cells of this run, and the files of all cells that the report may show."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self.options = options
        self._code = dict(code)
        every = cells(options.temperatures)
        self.selected = selected(every, options.only, look="--list")
        self.answers = {cell: self._answers(cell) for cell in every}
        self.bounds = {cell: self._bound_log(cell) for cell in bounded(every)}

    def _answers(self, cell: Cell) -> Answers:
        problems = self.options.problems
        identity = {
            **self._code,
            "cell": cell.slug,
            "smc": cell.kind.smc,
            "engine": settings(cell.kind.engine),
            "problems": problems,
            "max_new_tokens": MAX_TOKENS,
        }
        path = self.options.output_dir / "answers" / f"{cell.slug}.jsonl"
        return Answers(Log(path, identity), problems)

    def _bound_log(self, cell: Cell) -> Log:
        folder = self.options.output_dir / "bounds"
        return bound_log(folder, cell, self.options.bound_problems, self._code)

    def own_logs(self) -> list[Log]:
        """The files of the selected cells."""
        answers = [self.answers[cell].log for cell in self.selected]
        return answers + list(self.selected_bounds().values())

    def logs(self) -> list[Log]:
        """The same files: nothing else is read before the report."""
        return self.own_logs()

    def selected_bounds(self) -> dict[Cell, Log]:
        """Where the bounds of the selected cells go."""
        if not self.options.bound_problems:
            return {}
        return {cell: self.bounds[cell] for cell in bounded(self.selected)}

    def settings(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "problems": self.options.problems,
            "bound_problems": self.options.bound_problems,
            "num_conditional": NUM_CONDITIONAL,
            "max_new_tokens": MAX_TOKENS,
            "engine": settings("smc"),
            "code": self._code,
        }

    def complete(self) -> dict[Cell, list[Record]]:
        """The records of every cell that is complete, by this run or an earlier one like it."""
        return {
            cell: answers.records()
            for cell, answers in self.answers.items()
            if answers.log.fits and not answers.missing()
        }

    def complete_bounds(self) -> dict[Cell, Log]:
        """The bounds that are there, likewise."""
        return {cell: log for cell, log in self.bounds.items() if log.fits}

    def status(self) -> str:
        """A line for each selected cell."""
        lines = []
        for cell in self.selected:
            done = self.options.problems - len(self.answers[cell].missing())
            lines.append(f"{cell.slug:26} {done:4} of {self.options.problems} answered")
        return "\n".join(lines)
