"""Exact verification of N drafted chains: the output follows p, whatever q is.

The chains were drafted independently from q and start from one text. Verification walks down
their columns. At each, the chains that still follow the accepted text are siblings, and are
tried one after another against what is left of p, as in SpecInfer (Miao et al. 2024, arXiv
2305.09781, algorithm 2) and, for N = 1, in Leviathan et al. (2023, arXiv 2211.17192):

accept x ~ q with probability min(1, r(x) / q(x)), where r = p at first;
else r becomes (r - q)+ normalised, and the next sibling is tried;
when all are rejected, the token is drawn from r, and the walk ends.

Siblings are independent given the accepted text: one that carries a rejected token is rejected
again, since r is zero there, and one that was not tried yet says nothing about q.
"""

from typing import NamedTuple

import torch


class Verified(NamedTuple):
    """What a walk accepted, per group."""

    num_columns: torch.Tensor  # [G] int64 in 0..K: drafted tokens accepted
    winner: torch.Tensor  # [G] int64: a chain that carries them
    next_probs: torch.Tensor  # [G, V] float64: law of the token that follows


class _Trial(NamedTuple):
    """One column's outcome, per group."""

    accept: torch.Tensor  # [G] int64: the accepted chain, N if none
    residual: torch.Tensor  # [G, V]: what is left of p when none is


def verify(
    tokens: torch.Tensor,
    ends: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    uniforms: torch.Tensor,
) -> Verified:
    """Walk down the chains of each group.

    Args:
        tokens: ``[G, N, K]`` int64, drafted from q.
        ends: ``[G, N, K]`` bool: the text ends with this token, so the walk does too.
        log_p: ``[G, N, K + 1, V]``; column k follows a chain's first k tokens.
        log_q: ``[G, N, K, V]``; column k is what its token k was drawn from.
        uniforms: ``[G, N, K]`` float64, independent of those that drew the tokens.
    """
    num_groups, num_chains, num_steps = tokens.shape
    group = torch.arange(num_groups, device=tokens.device)
    chain = torch.arange(num_chains, device=tokens.device)
    follows = torch.ones_like(tokens[:, :, 0], dtype=torch.bool)  # [G, N]
    walking = torch.ones_like(follows[:, 0])  # [G]
    winner, num_columns = torch.zeros_like(group), torch.zeros_like(group)
    next_probs = log_p[:, 0, 0].double().exp()  # [G, V]
    for step in range(num_steps):
        sibling = follows.long().argmax(1)  # any: they have one text, hence one p and one q
        trial = _try_siblings(
            tokens[:, :, step],
            log_p[group, sibling, step].double().exp(),
            log_q[group, sibling, step].double().exp(),
            follows,
            uniforms[:, :, step],
        )
        next_probs = torch.where(walking.unsqueeze(1), trial.residual, next_probs)
        walking = walking & (trial.accept < num_chains)
        winner = torch.where(walking, trial.accept, winner)
        num_columns = num_columns + walking
        chosen = tokens[group, winner, step].unsqueeze(1)
        follows = follows & (chain >= winner.unsqueeze(1)) & (tokens[:, :, step] == chosen)
        walking = walking & ~ends[group, winner, step]
    behind_all = log_p[group, winner, num_steps].double().exp()
    next_probs = torch.where(walking.unsqueeze(1), behind_all, next_probs)
    return Verified(num_columns, winner, next_probs)


def _try_siblings(
    tokens: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    follows: torch.Tensor,
    uniforms: torch.Tensor,
) -> _Trial:
    """Try one column's tokens ``[G, N]`` in order, of the chains that follow the text."""
    num_chains = tokens.shape[1]
    residual, accept = p, torch.full_like(tokens[:, 0], num_chains)
    for n in range(num_chains):
        token = tokens[:, n : n + 1]
        ratio = (residual.gather(1, token) / q.gather(1, token)).squeeze(1)
        tried = follows[:, n] & (accept == num_chains)
        takes = tried & (uniforms[:, n] < ratio)
        accept = torch.where(takes, n, accept)
        left = (residual - q).clamp_min(0.0)
        total = left.sum(1, keepdim=True)
        # Nothing is left only where r = q: all are accepted there, but for rounding.
        left = torch.where(total > 0, left / total, residual)
        residual = torch.where((tried & ~takes).unsqueeze(1), left, residual)
    return _Trial(accept, residual)
