"""Latent attention (MLA) of particles that share a prefix, in plain torch.

A layer caches one latent per token, and each query head has taken its part of the projections into
itself ("absorbed", DeepSeek-V2, arXiv 2405.04434, section 2.1): scores are products with the whole
latent, values are its first numbers. So all heads read the same keys, and those of the shared
prefix are gathered once per request for all its particles, columns and heads.
"""

import torch

from sglang_smc.models.shared_prefix import SharedPrefixPlan
from sglang_smc.models.softmax import Attended, Softmax, attend, gather_slots, join


def latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    plan: SharedPrefixPlan,
    rank: int,
    scaling: float,
) -> torch.Tensor:
    """Causal softmax attention of particles over the latents of their prefix and tails.

    Args:
        query: ``[G, N, C, heads, rank + rope]``.
        latents: ``[slots, 1, rank + rope]``, the cache of one layer.
        plan: for queries of ``heads`` to one key head, see `plan_shared_prefix`.
        rank: numbers of a latent that are its value.
        scaling: factor of the scores, before the softmax.

    Returns:
        ``[G, N, C, heads, rank]``, contiguous.
    """
    size, num_particles, _, _, width = query.shape
    num_prefix, softmax = plan.prefix_mask.numel(), Softmax(scaling)
    gathered = gather_slots(latents, plan.slots, plan.key_scratch).to(query.dtype)
    prefix = _attend(
        query.reshape(size, 1, -1, width),  # [G, 1, N * C * heads, width]
        gathered[:num_prefix],
        plan.prefix_mask,
        softmax,
    )
    tails = _attend(
        query.reshape(size * num_particles, 1, -1, width),  # [G * N, 1, C * heads, width]
        gathered[num_prefix:],
        plan.tail_mask,
        softmax,
    )
    joined = join(_cut(prefix, rank), _cut(tails, rank), softmax)  # [G * N * C * heads, rank]
    return joined.view(*query.shape[:-1], rank)


def _attend(
    query: torch.Tensor, gathered: torch.Tensor, mask: torch.Tensor, softmax: Softmax
) -> Attended:
    """Attention to ``[rows * L, 1, width]`` latents of ``rows`` rows of queries.

    The values are whole latents: heads of one width are what torch has a kernel for.
    """
    latents = gathered.view(len(query), 1, -1, gathered.shape[2])
    return attend(query, latents, latents, mask, softmax)


def _cut(attended: Attended, rank: int) -> Attended:
    """Attention ``[B, 1, Q, ...]`` as ``[B * Q, ...]``, of values no wider than they are."""
    return Attended(attended.output[..., :rank].reshape(-1, rank), attended.log_sum.flatten())
