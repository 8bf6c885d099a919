"""The operations of a round as torch functions: they define what kernels compute."""

import torch

from sglang_smc.memory.ledger import Ledger
from sglang_smc.ops.interface import Ops
from sglang_smc.smc import distribution, randomness, rounds
from sglang_smc.smc.stratify import same_text, stratify


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
    round_seeds=randomness.round_seeds,
    same_text=same_text,
    stratify=stratify,
    sample_and_score=distribution.sample_and_score,
    score_tokens=distribution.score_tokens,
    reweight_and_resample=rounds.reweight_and_resample,
    collapse=rounds.collapse,
    ledger=Ledger,
)
