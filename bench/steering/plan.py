"""Plan the cells of a run, and the files of the output folder that it reads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from answers import MAX_TOKENS, AnswersPlan, fingerprint
from steering.grid import TEMPERATURE, Cell, cells
from steering.measure import Drawn, Values, settings
from study import PAIR, Log, digest


def code() -> dict[str, Any]:
    """Return the fingerprint of code, models and potentials that answers depend on."""
    here = Path(__file__).parent
    reward = [*(PAIR / "reward").iterdir(), PAIR / "reward_texts.py"]
    potentials = {
        "steps": digest([here / "steps.py"]),
        "judge": digest([here / "judge.py", *reward]),
    }
    return {**fingerprint(), "potentials": potentials}


class SteeringPlan(AnswersPlan[Cell, Drawn, Values]):
    """The cells of this run, and the files of all cells for the report."""

    def __init__(self, options: argparse.Namespace, code: Mapping[str, Any]) -> None:
        self._code = dict(code)
        super().__init__(options, cells(options.particles), Drawn)

    def identity(self, cell: Cell) -> dict[str, Any]:
        """Return the settings that a cell's answers depend on; plain samples are stock SGLang's."""
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

    def remarks_on(self, cell: Cell) -> Values | None:
        """Return the potentials' values of plain samples; None for steered cells."""
        if cell.potential:
            return None
        identity = {**self.identity(cell), "potentials": self._code["potentials"]}
        return Values(Log(self.path("values", cell), identity))

    def drawn(self) -> dict[Cell, list[Drawn]]:
        """Return the answers of every complete cell, plain samples with their values."""
        found = {}
        for cell in self.complete():
            answers, values = self.answers[cell].read(), self.remarks.get(cell)
            found[cell] = answers if values is None else values.of(answers)
        return found

    def settings(self, **more: Any) -> dict[str, Any]:
        return super().settings(
            temperature=TEMPERATURE,
            requests={cell.slug: cell.smc for cell in self.answers if cell.smc},
            engines={cell.engine: settings(cell.engine) for cell in self.answers},
            code=self._code,
            **more,
        )
