"""RoundBatch of one batch that take different ways: all are taken, and each group keeps its own."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.state.distribution import TokenDistribution


def by_method(scheme: torch.Tensor, methods: Iterable[str], step: Callable[[str], Any]) -> Any:
    """A resampling step of each group by its own method: ``scheme`` ``[G]``, in ``methods``."""
    first, *others = methods
    found = step(first)
    for method in others:
        mine = scheme == list(SCHEMES).index(method)
        found = choose(mine, step(method), found)
    return found


def choose(where: torch.Tensor, yes: Any, no: Any) -> Any:
    """``yes`` or ``no`` for each group, of tensors ``[G, ...]``, of laws, or of tuples of them."""
    if isinstance(yes, TokenDistribution):
        columns = [(law.log_probs(), law.log_masses()) for law in (yes, no)]
        log_p, log_mass = (
            choose(where, *(column.unflatten(0, (len(where), -1)) for column in both)).flatten(0, 1)
            for both in zip(*columns, strict=True)
        )
        return TokenDistribution.of_log_probs(log_p)._replace(log_mass=log_mass)
    if isinstance(yes, torch.Tensor):
        return torch.where(where.view(-1, *(1,) * (yes.dim() - 1)), yes, no)
    return type(yes)(*(choose(where, a, b) for a, b in zip(yes, no, strict=True)))
