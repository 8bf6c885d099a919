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

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sglang_smc.models.attention import Implementation, ParticleAttention
from sglang_smc.models.softmax import SharedPrefixPlan, Softmax, shared_prefix_attention

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.models.attention import Attend


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


class LatentParticleAttention(ParticleAttention):
    """`ParticleAttention` over latents, with the same arguments, errors and use.

    Heads that draft are not supported: it raises for ``first_key`` and ``blocks``.
    """

    # SGLang's layers read these names before the server's.
    prefill_attention_backend_str = decode_attention_backend_str = NAME

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        implementation: Implementation,
        **sight: Any,
    ) -> None:
        if any(sight.values()):
            raise ValueError(
                f"heads with latent attention (MLA) are not supported ({sight}): pass a head with "
                "ordinary attention, or a draft model"
            )
        super().__init__(runner, tails, implementation)
        absorb(NAME)
        self._rank: int = runner.model_config.kv_lora_rank
        if implementation == "triton":
            from sglang_smc.kernels.attention.latent import check_sizes

            check_sizes(runner.dtype, self._rank, runner.model_config.qk_rope_head_dim)

    def _caches(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's latents, ``[slots, 1, rank + rope]``."""
        return (self.token_to_kv_pool.get_key_buffer(layer_id),)

    def _in_torch(self, plan: SharedPrefixPlan) -> "Attend":
        return lambda query, latents, softmax: latent_attention(
            query, latents, plan, self._rank, softmax.scaling
        )

    def _in_triton(self, places: dict[str, Any], window: int | None, block: bool) -> "Attend":
        from sglang_smc.kernels.attention.latent import latent_attention

        assert window is None and not block, "checked with the layers"
        return lambda query, latents, softmax: latent_attention(
            query, latents, rank=self._rank, scaling=softmax.scaling, **places
        )
