"""Define the cells: model, potential, and number of particles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TEMPERATURE = 1.0
NUM_STEPS = 8
#: Tokens drafted per round where every third token is the target's own.
FEW_STEPS = 2
PARTICLES = (4, 8, 16)
#: Plain samples per problem, of which a vote or choice takes the first N.
SAMPLES = max(PARTICLES)
#: Models. For the target the draft proposes, in long or short rounds, or the target itself, so that
#: particles are sampled from it.
DRAFT, TARGET, SHORT, ITSELF = MODELS = ("draft", "target", "target by twos", "target itself")
#: The potentials' names, with the arguments of requests.
POTENTIALS: dict[str, dict[str, Any]] = {"steps": {"cost": 5.0}, "judge": {}}
#: The last line of an answer.
ANSWER_PATTERN = r"#### (-?\d+)\s*$"
#: The end of a step.
DELIMITER = "\n"


@dataclass(frozen=True)
class Cell:
    """Answers of one model, plain or steered by a potential."""

    model: str
    potential: str  # empty for plain samples
    num_particles: int  # 1 for plain samples

    @property
    def slug(self) -> str:
        model = self.model.replace(" ", "-")
        if not self.potential:
            return f"plain-{model}"
        return f"smc-{model}-{self.potential}-n{self.num_particles}"

    @property
    def engine(self) -> str:
        """Return the engine's name: the kind of sampling, and the model."""
        model = TARGET if self.model == SHORT else self.model
        return f"{'smc' if self.potential else 'plain'} {model}"

    @property
    def samples(self) -> int:
        """Return the number of answers to each problem."""
        return 1 if self.potential else SAMPLES

    @property
    def smc(self) -> dict[str, Any] | None:
        """Return the SMC request fields; all particles are returned, for every kind of choice."""
        if not self.potential:
            return None
        asked = {
            "name": self.potential,
            "args": POTENTIALS[self.potential],
            "when": {"delimiter": DELIMITER},
        }
        return {
            "mode": "smc",
            "num_steps": FEW_STEPS if self.model == SHORT else NUM_STEPS,
            "num_particles": self.num_particles,
            "potentials": [asked],
            "selection": "vote",
            "answer_pattern": ANSWER_PATTERN,
            "return_particles": True,
        }


def cells(particles: Sequence[int] = PARTICLES) -> list[Cell]:
    """Return all cells, grouped by engine to start each once."""
    found = []
    for model in MODELS:
        if model not in (SHORT, ITSELF):  # their plain samples are the target's
            found.append(Cell(model, "", 1))
        found += [Cell(model, name, count) for name in POTENTIALS for count in particles]
    return found
