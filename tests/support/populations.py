"""Populations with given texts."""

from typing import Any

import torch

from sglang_smc.round.result import Outcome
from sglang_smc.smc.population import Population
from sglang_smc.state.metrics import Counters


def population_of(
    tails: list[list[list[int]]],
    last_emitted: list[list[int]] | None = None,
    *,
    stale: int = 0,
    width: int | None = None,
    **fields: Any,
) -> Population:
    """G groups of N particles with these tails.

    Args:
        tails: of each particle of each group.
        last_emitted: of each, else 0.
        stale: the token in all places behind a tail.
        width: T; one more than the longest tail has, unless given.
        fields: of the population, in place of those of one that has just begun.
    """
    lengths = torch.tensor([[len(tail) for tail in of_group] for of_group in tails])
    tokens = torch.full((*lengths.shape, width or int(lengths.max()) + 1), stale)
    for group, of_group in enumerate(tails):
        for particle, tail in enumerate(of_group):
            tokens[group, particle, : len(tail)] = torch.tensor(tail, dtype=torch.int64)
    per_particle = torch.zeros_like(lengths)
    per_group = torch.zeros_like(lengths[:, 0])
    before = torch.tensor(last_emitted) if last_emitted else per_particle
    begun = {
        "texts": torch.cat([per_particle.unsqueeze(2), before.unsqueeze(2), tokens], dim=2),
        "lengths": lengths,
        "ended": per_particle.bool(),
        "log_weights": per_particle.double(),
        "num_emitted": per_group,
        "log_evidence": per_group.double(),
        "present": per_particle == 0,
        "roots": torch.arange(lengths.shape[1]).expand_as(lengths),
        "unread": per_group.bool(),
        "fidelity": torch.zeros(*lengths.shape, 4).double(),
    }
    return Population(**{**begun, **fields})


def outcome_of(size: int, **changed: Any) -> Outcome:
    """The outcome of a round of so many requests in which nothing happens but what is given."""
    zeros = torch.zeros(size, dtype=torch.int64)
    nothing: dict[str, Any] = {
        **dict.fromkeys(Outcome._fields, zeros),
        "tokens": zeros.unsqueeze(1),
        "counters": torch.zeros(size, len(Counters._fields)),
        "first_tokens": None,
        "extras": {},
    }
    return Outcome(**{**nothing, **changed})
