"""Engines: each model alone, and under SMC with both potentials."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fidelity import engines
from fidelity.measure import Asker
from steering.grid import DRAFT, ITSELF, NUM_STEPS, SAMPLES, TARGET

SMC: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": NUM_STEPS,
    "speculative_smc_num_particles": SAMPLES,
    "speculative_smc_potential": ["steps=steering.steps:Steps", "judge=steering.judge:Judge"],
    # Two cores, which others use too, may take long for a batch.
    "speculative_smc_potential_timeout": 60.0,
    # Twice the particles of the fidelity study share its room.
    "max_running_requests": 16,
}


def settings(name: str) -> dict[str, Any]:
    """The keywords of `sgl.Engine` but for the models."""
    return engines.COMMON | (SMC if name.startswith("smc ") else {})


def arguments(name: str, pair: Path) -> dict[str, Any]:
    """The keywords of `sgl.Engine` for the engine ``name``."""
    kind, _, model = name.partition(" ")
    folder = TARGET if model == ITSELF else model
    found = {**settings(name), "model_path": str(pair / folder)}
    if kind == "smc":
        drafts = TARGET if model == ITSELF else DRAFT
        found["speculative_draft_model_path"] = str(pair / drafts)
    return found


@contextlib.contextmanager
def running(name: str, pair: Path) -> Iterator[Asker]:
    """The engine ``name`` for the ``with`` block."""
    with engines.started(arguments(name, pair)) as asker:
        yield asker
