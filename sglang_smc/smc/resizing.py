"""A resampling step to another number of particles.

N equally weighted particles stand for the same law as M do, each drawn from the weights as in any
resampling step: what changes is how many ancestors are drawn. The mean weight is banked, so the
estimate Z-hat stays unbiased, and texts of properly weighted particles stay properly weighted.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.weights import Weights


class Resized(NamedTuple):
    """A population after it has been resized."""

    ancestors: torch.Tensor  # [G, N] int64
    log_weights: torch.Tensor  # [G, N]
    log_evidence: torch.Tensor  # [G] what this step adds to log Z-hat
    present: torch.Tensor  # [G, N] bool: the particles from now on


def resize(
    log_weights: torch.Tensor,
    present: torch.Tensor,
    num_particles: torch.Tensor,
    uniforms: torch.Tensor,
    method: str,
) -> Resized:
    """Resample the groups whose number of particles changes; the others stay as they are.

    Args:
        log_weights: ``[G, N]``, at least one finite a group; N places are enough before and after.
        present: ``[G, N]`` bool: the particles so far.
        num_particles: ``[G]`` int64 from now on.
        uniforms: ``[G, N]`` float64.
        method: a key of `SCHEMES`.
    """
    place = torch.arange(log_weights.shape[1], device=log_weights.device)
    changes = present.sum(1) != num_particles
    after = place < num_particles.unsqueeze(1)
    weights = Weights.of(log_weights, present.sum(1))
    drawn = SCHEMES[method](weights.shares, uniforms, num_particles)
    equal = torch.where(after, 0.0, -torch.inf).to(log_weights)
    redrawn = changes.unsqueeze(1)
    return Resized(
        ancestors=torch.where(redrawn & after, drawn, place),
        log_weights=torch.where(redrawn, equal, log_weights),
        log_evidence=torch.where(changes, weights.log_mean, 0.0),
        present=after,
    )
