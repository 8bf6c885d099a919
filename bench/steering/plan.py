"""Which cells a run completes, and which files of the output folder it may read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fidelity.measure import MAX_TOKENS
from fidelity.store import fingerprint
from steering.engines import settings
from steering.grid import TEMPERATURE, Cell, cells
from steering.store import Drawn, Pool, Valued
from study import PAIR, Log, digest, selected


def code() -> dict[str, Any]:
    """The code and models that answers depend on, and potentials by name."""
    here = Path(__file__).parent
    reward = [*(PAIR / "reward").iterdir(), PAIR / "reward_texts.py"]
    potentials = {
        "steps": digest([here / "steps.py"]),
        "judge": digest([here / "judge.py", *reward]),
    }
    return {**fingerprint(PAIR), "potentials": potentials}


class SteeringPlan:
    """The cells of this run, and the files of all cells that the report may show."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self.options, self._code = options, dict(code)
        every = cells(options.particles)
        self.selected = selected(every, options.only, look="--list")
        self.pools = {cell: self._pool(cell) for cell in every}
        self.valued = {cell: self._valued(cell) for cell in every if not cell.potential}

    def _pool(self, cell: Cell) -> Pool:
        log = Log(self._path("answers", cell), self._identity(cell))
        return Pool(log, self.options.problems, cell.samples)

    def _valued(self, cell: Cell) -> Valued:
        identity = {**self._identity(cell), "potentials": self._code["potentials"]}
        return Valued(Log(self._path("values", cell), identity), self.pools[cell])

    def _path(self, folder: str, cell: Cell) -> Path:
        return self.options.output_dir / folder / f"{cell.slug}.jsonl"

    def _identity(self, cell: Cell) -> dict[str, Any]:
        """What the answers of a cell depend on: plain samples are stock SGLang's."""
        unused = {"potentials"} if cell.potential else {"potentials", "plugin"}
        return {
            **{name: value for name, value in self._code.items() if name not in unused},
            "cell": cell.slug,
            "potential": self._code["potentials"].get(cell.potential),
            "smc": cell.smc,
            "engine": settings(cell.engine),
            "temperature": TEMPERATURE,
            "max_new_tokens": MAX_TOKENS,
        }

    def own_logs(self) -> list[Log]:
        """The files of the selected cells."""
        answers = [self.pools[cell].log for cell in self.selected]
        return answers + [valued.log for valued in self.to_value()]

    def to_value(self) -> list[Valued]:
        """The plain samples of the selected cells."""
        return [self.valued[cell] for cell in self.selected if cell in self.valued]

    def logs(self) -> list[Log]:
        """The same files: nothing else is read before the report."""
        return self.own_logs()

    def todo(self) -> list[tuple[Cell, Pool]]:
        """The selected cells with their files."""
        return [(cell, self.pools[cell]) for cell in self.selected]

    def complete(self) -> dict[Cell, list[Drawn]]:
        """The answers of every cell that is complete, by this run or an earlier one like it."""
        return {cell: self._answers(cell) for cell in self.pools if self._is_complete(cell)}

    def _answers(self, cell: Cell) -> list[Drawn]:
        return (self.valued.get(cell) or self.pools[cell]).read()

    def _is_complete(self, cell: Cell) -> bool:
        pool, valued = self.pools[cell], self.valued.get(cell)
        if not pool.log.fits or pool.missing():
            return False
        return valued is None or (valued.log.fits and not valued.missing())

    def status(self) -> str:
        """A line for each selected cell."""
        lines = []
        for cell, pool in self.todo():
            wanted = pool.problems * pool.samples
            lines.append(f"{cell.slug:24} {wanted - len(pool.missing()):5} of {wanted} answered")
        return "\n".join(lines)

    def settings(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "problems": self.options.problems,
            "first_problem": 0,
            "temperature": TEMPERATURE,
            "max_new_tokens": MAX_TOKENS,
            "requests": {cell.slug: cell.smc for cell in self.pools if cell.smc},
            "engines": {cell.engine: settings(cell.engine) for cell in self.pools},
            "code": self._code,
        }
