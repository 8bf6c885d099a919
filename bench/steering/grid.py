"""Define the cells: model, potential, and number of particles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import answers

TEMPERATURE = 1.0
NUM_STEPS = 8
PARTICLES = (4, 8, 16)
#: Plain samples per problem, of which a vote or choice takes the first N.
SAMPLES = max(PARTICLES)
#: Models. For the target the draft proposes, weighed or verified, or the target itself, so that
#: particles are sampled from it.
TARGET, VERIFIED, ITSELF = MODELS = ("target", "target verified", "target itself")
DRAFT = "draft"
#: The potentials' names, with the arguments of requests.
POTENTIALS: dict[str, dict[str, Any]] = {"steps": {"cost": 5.0}, "judge": {}}
#: The last line of an answer.
ANSWER_PATTERN = r"#### (-?\d+)\s*$"
#: The end of a step.
DELIMITER = "\n"


@dataclass(frozen=True)
class Cell(answers.Cell):
    """Answers of one model, plain or steered by a potential."""

    model: str = ""
    potential: str = ""  # empty for plain samples
    num_particles: int = 1

    @property
    def slug(self) -> str:
        """Return the name for files and patterns: ``smc-target-judge-n8``."""
        return answers.slug_of(self.label)


def plain(model: str) -> Cell:
    """Return the cell of a model's plain samples."""
    name = f"plain {model}"
    return Cell(name, name, TEMPERATURE, samples=SAMPLES, model=model)


def steered(model: str, potential: str, num_particles: int) -> Cell:
    """Return a cell of particles; all are returned, for every kind of choice."""
    asked = {"name": potential, "args": POTENTIALS[potential], "when": {"delimiter": DELIMITER}}
    smc = {
        "mode": "smc",
        "proposal": "verified" if model == VERIFIED else "draft",
        "num_steps": NUM_STEPS,
        "num_particles": num_particles,
        "potentials": [asked],
        "selection": "vote",
        "answer_pattern": ANSWER_PATTERN,
        "return_particles": True,
    }
    label = f"smc {model} {potential} N={num_particles}"
    engine = f"smc {TARGET if model == VERIFIED else model}"
    return Cell(label, engine, TEMPERATURE, smc, 1, model, potential, num_particles)


def cells(particles: Sequence[int] = PARTICLES) -> list[Cell]:
    """Return all cells, grouped by engine to start each once."""
    found = []
    for model in MODELS:
        if model not in (VERIFIED, ITSELF):  # their plain samples are the target's
            found.append(plain(model))
        found += [steered(model, name, count) for name in POTENTIALS for count in particles]
    return found
