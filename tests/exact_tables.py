"""Exact verification of laws that are given as tables."""

from typing import Any, NamedTuple

import torch

from sglang_smc.ops.interface import TORCH
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution


class Verified(NamedTuple):
    """What is accepted, and the law of the token that follows."""

    num_columns: torch.Tensor  # [G]
    winner: torch.Tensor  # [G]
    next_probs: torch.Tensor  # [G, V] float64


def verify(
    tokens: torch.Tensor,
    ends: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    walker: Any = TORCH,
) -> Verified:
    """`exact.verify` of log p ``[G, N, K + 1, V]`` and log q ``[G, N, K, V]``."""
    p = TokenDistribution.of_log_probs(log_p.flatten(0, 2))
    q = [TokenDistribution.of_log_probs(column.flatten(0, 1)) for column in log_q.unbind(2)]
    walk = walker.begin_walk, walker.walk_on
    found = verification.verify(*walk, tokens, ends, p, q, uniforms)
    group = torch.arange(len(tokens), device=tokens.device)
    behind = log_p[group, found.winner, found.num_columns].double().exp()
    left = found.residuals[found.left].double()
    left = left / left.sum(1, keepdim=True)
    probs = torch.where(found.rejects.unsqueeze(1), left, behind)
    return Verified(found.num_columns, found.winner, probs)
