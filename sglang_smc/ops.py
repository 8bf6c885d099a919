"""The small operations of a round, as torch functions or as Triton kernels of the same name.

Both give the same tokens for the same seed; the torch functions are the definition. Kernels are
for devices where a launch costs more than the work that it does: there a round's hundreds of small
torch calls would take as long as a model's forward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_smc.smc import proposal, randomness, rounds, siblings


class Ops(NamedTuple):
    """One implementation of each; signatures as in the torch functions below."""

    uniforms: Callable[..., torch.Tensor]
    spread: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    sample_and_score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    score_tokens: Callable[..., torch.Tensor]
    collect: Callable[..., rounds.Collected]


def _uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: randomness.Purpose
) -> torch.Tensor:
    """`randomness.uniforms` for positions ``[G, N]`` or ``[G, N, C]`` of N particles."""
    columns = (1,) * (positions.dim() - 2)
    particle = torch.arange(positions.shape[1], device=positions.device)
    return randomness.uniforms(
        seeds.view(-1, 1, *columns), positions, particle.view(-1, *columns), purpose
    )


TORCH = Ops(
    uniforms=_uniforms,
    spread=siblings.spread,
    sample_and_score=proposal.sample_and_score,
    score_tokens=proposal.score_tokens,
    collect=rounds.collect,
)
