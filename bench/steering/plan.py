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
from steering.store import Drawn, Pool
from study import PAIR, Log, digest, selected


def code() -> dict[str, Any]:
    """The code and models that answers depend on; a change of the server is told, not refused."""
    here = Path(__file__).parent
    own = [here / f"{name}.py" for name in ("steps", "judge", "measure")]
    reward = [*(PAIR / "reward").iterdir(), PAIR / "reward_texts.py"]
    return {**fingerprint(PAIR), "steering": digest([*own, *reward])}


class SteeringPlan:
    """The cells of this run, and the files of all cells that the report may show."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self.options, self._code = options, dict(code)
        every = cells(options.particles)
        self.selected = selected(every, options.only, look="--list")
        self.pools = {cell: self._pool(cell) for cell in every}

    def _pool(self, cell: Cell) -> Pool:
        known = dict(self._code)
        if not cell.potential:
            del known["plugin"]  # plain samples are stock SGLang's
        path = self.options.output_dir / "answers" / f"{cell.slug}.jsonl"
        identity = {
            **known,
            "cell": cell.slug,
            "smc": cell.smc,
            "engine": settings(cell.engine),
            "temperature": TEMPERATURE,
            "max_new_tokens": MAX_TOKENS,
        }
        return Pool(Log(path, identity), self.options.problems, cell.samples)

    def own_logs(self) -> list[Log]:
        """The files of the selected cells."""
        return [self.pools[cell].log for cell in self.selected]

    def logs(self) -> list[Log]:
        """The same files: nothing else is read before the report."""
        return self.own_logs()

    def todo(self) -> list[tuple[Cell, Pool]]:
        """The selected cells with their files."""
        return [(cell, self.pools[cell]) for cell in self.selected]

    def complete(self) -> dict[Cell, list[Drawn]]:
        """The answers of every cell that is complete, by this run or an earlier one like it."""
        there = {cell: pool for cell, pool in self.pools.items() if pool.log.fits}
        return {cell: pool.read() for cell, pool in there.items() if not pool.missing()}

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
