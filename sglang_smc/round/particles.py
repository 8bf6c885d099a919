"""Return all particles of requests that set ``return_particles``, before the final draw."""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.round.extras import Extra, Stages
from sglang_smc.rules.ends import as_answer
from sglang_smc.smc.population import Population
from sglang_smc.smc.weighing import choose, normalized
from sglang_smc.state.metrics import finite
from sglang_smc.state.request import as_particle, state_of
from sglang_smc.state.texts import shared_ids, tails_of


class ReturnedParticles(Extra):
    """The particles of a round, which those of the last one replace."""

    name = "return_particles"

    def emit(self, rows: torch.Tensor, chains: Chains, stages: Stages | None) -> Population:
        """Return each group's particles; see `shown_particles`."""
        assert stages is not None, "asked for by a request"
        return shown_particles(stages.continued, stages.end.population)

    def keep(self, found: Population, reqs: Sequence[Req], live: Sequence[bool]) -> None:
        """Store the particles of requests that ask for them, with own first tokens."""
        for group, req in enumerate(reqs):
            state = state_of(req)
            if live[group] and state.config.return_particles:
                state.particles = particles_of(req, found, group)


def shown_particles(continued: Population, narrowed: Population) -> Population:
    """Return each group's particles before narrowing if all had ended there, else after it.

    A short lag may draw the sequence of a particle that has ended while others have not. Then
    all remaining particles are copies of it, and SGLang ends the request when it finds the end
    in the emitted tokens: no final draw follows.
    """
    finished = continued.ended.all(1)
    fields = {
        name: choose(finished, getattr(continued, name), getattr(narrowed, name))
        for name in Population._fields
        if name not in ("logprobs", "scores")
    }
    return Population(**fields)


def particles_of(req: Req, population: Population, group: int) -> list[dict[str, Any]] | None:
    """Return one request's particles for `meta_info`; None while some have not ended."""
    if not population.ended[group].all():
        return None
    log_weights = population.log_weights[group]
    rows = zip(
        tails_of(req, population, group),
        normalized(log_weights).tolist(),
        log_weights.tolist(),
        population.present[group].tolist(),
        strict=True,
    )
    shared = shared_ids(req)
    return [
        as_particle(*as_answer(req, shared, tail), weight=weight, log_weight=finite(log_weight))
        for tail, weight, log_weight, present in rows
        if present
    ]
