"""Attend over latents (MLA) of particles that share a prefix, in plain torch.

A layer caches one latent per token, and each query head has absorbed its part of the projections
(DeepSeek-V2, arXiv 2405.04434, section 2.1): scores are dot products with the whole latent, values
are its first numbers. So all heads read the same keys, and those of the shared prefix are gathered
once per request for all its particles, columns and heads.

SGLang's DeepSeek layers choose, by the name of the attention backend, between two forms that are
equal in exact arithmetic: absorbed, over latents, and with keys and values of each head
decompressed from the latents. Particles use the absorbed form in all forwards, since it alone reads
the cache as it is stored.
"""

import torch
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sglang_smc.models.softmax import SharedPrefixPlan, Softmax, shared_prefix_attention


def latent_attention(
    query: torch.Tensor, latents: torch.Tensor, plan: SharedPrefixPlan, rank: int, scaling: float
) -> torch.Tensor:
    """Compute causal softmax attention of particles over the latents of prefix and tails.

    The values are whole latents up to the end, since torch has a kernel for values as wide as keys.

    Args:
        query: ``[G, N, C, heads, rank + rope]``.
        latents: ``[slots, 1, rank + rope]``, the cache of one layer.
        plan: for queries of ``heads`` to one key head, see `plan_shared_prefix`.
        rank: width of the value in a latent.
        scaling: factor of the scores, before the softmax.

    Returns:
        ``[G, N, C, heads, rank]``, contiguous.
    """
    whole = shared_prefix_attention(query, latents, None, plan, Softmax(scaling))
    return whole[..., :rank].contiguous()


NAME = "smc_latent"


def absorb(backend_name: str) -> None:
    """Make SGLang's layers use the absorbed form, in all modes, for a backend of this name."""
    AttentionBackendRegistry.register(backend_name, lambda *_: AttnForwardMethod.MLA)
