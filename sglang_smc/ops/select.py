"""The small operations of a round, as torch functions or as Triton kernels of the same name.

Both give the same tokens for the same seed; the torch functions are the definition. Kernels are
for devices where a launch costs more than the work that it does: there a round's hundreds of small
torch calls would take as long as a model's forward.
"""

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from sglang_smc.memory.ledger import Ledger
from sglang_smc.smc import proposal, randomness, rounds, siblings

Kind = Literal["torch", "triton"]


class Ops(NamedTuple):
    """One implementation of each; signatures as in the torch functions below."""

    uniforms: Callable[..., torch.Tensor]
    round_seeds: Callable[..., torch.Tensor]
    siblings: Callable[..., torch.Tensor]
    spread: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    sample_and_score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    score_tokens: Callable[..., torch.Tensor]
    collect: Callable[..., rounds.Collected]
    collapse: Callable[..., rounds.Resampled]
    ledger: type[Ledger]


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
    siblings=siblings.siblings,
    spread=siblings.spread,
    sample_and_score=proposal.sample_and_score,
    score_tokens=proposal.score_tokens,
    collect=rounds.collect,
    collapse=rounds.collapse,
    ledger=Ledger,
)


def kind_of(kernels: str, device: str) -> Kind:
    """What `--speculative-smc-kernels` means on a device.

    Raises:
        ValueError: kernels are wanted where Triton has neither a GPU nor its interpreter.
    """
    if kernels == "auto":
        return "torch" if device == "cpu" else "triton"
    if kernels == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"--speculative-smc-kernels is {kernels!r} on --device {device}; allowed: 'auto' or "
            "'torch', since Triton needs a GPU. Leave it out, or set TRITON_INTERPRET=1 to run "
            "kernels in Triton's interpreter, thousands of times slower."
        )
    return "torch" if kernels == "torch" else "triton"


def ops_of(kind: Kind) -> Ops:
    """The implementation of that kind; Triton is imported only where it is wanted."""
    if kind == "torch":
        return TORCH
    from sglang_smc.ops.triton_ops import TRITON

    return TRITON
