"""Importance weights in log space.

A group of N particles carries unnormalised log-weights. They start at zero, add
``log p - log q`` for each drafted token, and return to zero when the group is
resampled; what they had gained by then goes into the evidence estimate.
NaN never gets in: `accumulate` turns it into a dead particle.
"""

from typing import NamedTuple

import torch


class Weights(NamedTuple):
    """The weights of a group, and what follows from them, worked out once."""

    log: torch.Tensor  # [..., N] unnormalised, float64
    shares: torch.Tensor  # [..., N] they sum to one; all zero if all are dead
    log_mean: torch.Tensor  # [...] log((1/N) sum_n w_n); -inf if all are dead

    @classmethod
    def of(cls, log_weights: torch.Tensor, num_particles: torch.Tensor) -> "Weights":
        """From log-weights ``[..., N]`` of which ``num_particles`` ``[...]`` are there."""
        log_mean = log_mean_exp(log_weights, num_particles)
        return cls(log_weights, normalized(log_weights), log_mean)


def accumulate(log_weights: torch.Tensor, increments: torch.Tensor) -> torch.Tensor:
    """Running log-weights after each drafted column.

    Args:
        log_weights: ``[..., N]`` before the block.
        increments: ``[..., N, K]`` of ``log p(x) - log q(x)``. NaN counts as ``-inf``, and so
            does ``+inf``: a drawn token has q > 0, so only a broken draft can give one.

    Returns:
        ``[..., N, K + 1]`` float64; column ``k`` holds the weights after ``k`` tokens.
    """
    dead = -torch.inf
    steps = torch.nan_to_num(increments.double(), nan=dead, posinf=dead, neginf=dead)
    start = log_weights.double().unsqueeze(-1)
    return torch.cat([start, steps], dim=-1).cumsum(-1)


def log_mean_exp(
    log_weights: torch.Tensor, num_particles: torch.Tensor | None = None
) -> torch.Tensor:
    """``log((1/N) sum_n w_n)`` over the last dimension; ``-inf`` if all are dead.

    N is the size of that dimension, or ``num_particles`` ``[...]`` where places are empty; an
    empty place weighs nothing, like a dead particle, but does not count.
    """
    if num_particles is None:
        num_particles = log_weights.new_tensor(log_weights.shape[-1])
    return torch.logsumexp(log_weights, dim=-1) - torch.log(num_particles.to(log_weights))


def normalized(log_weights: torch.Tensor) -> torch.Tensor:
    """Weights that sum to one over the last dimension; all zero if all are dead."""
    unnormalized = _relative(log_weights)
    total = unnormalized.sum(-1, keepdim=True)
    return unnormalized / total.clamp_min(torch.finfo(total.dtype).tiny)


def effective_sample_size(log_weights: torch.Tensor) -> torch.Tensor:
    """``(sum w)^2 / sum w^2`` (Kong 1992), from 1 to N; 0 if all are dead.

    Exactly N for equal weights, so that no threshold up to 1 resamples those.
    """
    unnormalized = _relative(log_weights)
    squares = unnormalized.square().sum(-1)
    return unnormalized.sum(-1).square() / squares.clamp_min(torch.finfo(squares.dtype).tiny)


def _relative(log_weights: torch.Tensor) -> torch.Tensor:
    """Weights over the largest one, so that equal log-weights give exact ones."""
    highest = log_weights.amax(-1, keepdim=True)
    # A dead group has no largest weight: shift by 0 and keep exp(-inf) = 0.
    return torch.exp(log_weights - highest.masked_fill(highest == -torch.inf, 0.0))
