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
from logs import BenchError, Log


class Plan:
    """The cells of this run, and the files of all cells that the report may show."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self.options = options
        self._code = dict(code)
        self.selected = cells(options.temperatures, options.only)
        if not self.selected:
            raise BenchError(f"No cell matches --only {' '.join(options.only)}; --list shows all.")
        every = cells(options.temperatures)
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

    def logs(self) -> list[Log]:
        """The files of the selected cells."""
        answers = [self.answers[cell].log for cell in self.selected]
        return answers + list(self.selected_bounds().values())

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

    def forget(self) -> None:
        """Delete what the selected cells have."""
        for log in self.logs():
            log.delete()

    def check(self) -> None:
        """Raise BenchError, before anything is started, where a file does not fit."""
        try:
            for log in self.logs():
                log.read()
        except BenchError as error:
            raise BenchError(
                f"{error}\nAsk for what was measured there, choose another --output-dir, or start "
                "anew with --fresh, which deletes what the folder has of the selected cells."
            ) from error

    def complete(self) -> dict[Cell, list[Record]]:
        """The records of every cell that is complete, by this run or an earlier one like it."""
        return {
            cell: answers.records()
            for cell, answers in self.answers.items()
            if _fits(answers.log) and not answers.missing()
        }

    def complete_bounds(self) -> dict[Cell, Log]:
        """The bounds that are there, likewise."""
        return {cell: log for cell, log in self.bounds.items() if _fits(log)}

    def status(self) -> str:
        """A line for each selected cell."""
        lines = []
        for cell in self.selected:
            done = self.options.problems - len(self.answers[cell].missing())
            lines.append(f"{cell.slug:26} {done:4} of {self.options.problems} answered")
        return "\n".join(lines)


def _fits(log: Log) -> bool:
    try:
        log.read()
    except BenchError:
        return False
    return True
