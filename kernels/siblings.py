"""Siblings that drew the same token remain so, and share their next noise: one launch."""

import torch
import triton
import triton.language as tl


def spread(
    uniforms: torch.Tensor, siblings: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep as siblings those with equal tokens, then spread the uniforms of siblings evenly.

    Reference: `sglang_smc.smc.siblings.spread`, to the last bit.

    Args:
        uniforms: ``[G, N]`` float64.
        siblings: ``[G, N, N]`` bool, an equivalence.
        tokens: ``[G, N]`` int64, one more token each; None leaves the siblings as they are.

    Returns:
        Uniforms ``[G, N]`` and siblings ``[G, N, N]``.
    """
    num_groups, num_particles = uniforms.shape
    spread_out = torch.empty_like(uniforms, memory_format=torch.contiguous_format)
    remaining = siblings  # [G, N, N]
    if tokens is not None:
        remaining = torch.empty_like(siblings, memory_format=torch.contiguous_format)
        tokens = tokens.contiguous()
    _spread[(num_groups,)](
        uniforms.contiguous(),
        siblings.contiguous(),
        tokens,
        spread_out,
        remaining,
        num_particles,
        padded=triton.next_power_of_2(num_particles),
    )
    return spread_out, remaining


@triton.jit
def _spread(uniforms, siblings, tokens, spread_out, remaining, num_particles, padded: tl.constexpr):
    group = tl.program_id(0)
    particle = tl.arange(0, padded)
    one, other = particle[:, None], particle[None, :]
    inside = (one < num_particles) & (other < num_particles)
    pair = (group * num_particles + one) * num_particles + other
    same = tl.load(siblings + pair, mask=inside, other=0) != 0
    if tokens is not None:
        drawn = tokens + group * num_particles
        token = tl.load(drawn + one, mask=one < num_particles, other=0)
        same = same & (token == tl.load(drawn + other, mask=other < num_particles, other=0))
        tl.store(remaining + pair, same, mask=inside)

    eldest = tl.min(tl.where(same, other, padded), 1)
    rank = tl.sum((same & (other < one)).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    here = particle < num_particles
    own = group * num_particles
    shared = tl.load(uniforms + own + eldest, mask=here, other=0.0)
    shifted = shared + rank.to(tl.float64) / count.to(tl.float64)
    tl.store(spread_out + own + particle, shifted - tl.floor(shifted), mask=here)
