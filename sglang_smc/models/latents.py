"""Models of latent attention (MLA), as SGLang runs them: how their layers are to call, and ours.

SGLang's DeepSeek layers choose, by the name of the attention backend, among two ways to attend that
are the same in exact arithmetic: with the projections absorbed into the queries, over latents, and
with keys and values of each head made from the latents. Particles take the first in all forwards,
since it alone reads what the cache holds.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sglang_smc.models.attention import Implementation, ParticleAttention
from sglang_smc.models.latent_attention import latent_attention
from sglang_smc.models.shared_prefix import SharedPrefixPlan
from sglang_smc.models.supported import check_layer

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.models.attention import Attend

NAME = "smc_latent"


def absorb(backend_name: str) -> None:
    """Have SGLang's layers absorb their projections for the backend of this name, in all modes."""
    AttentionBackendRegistry.register(backend_name, lambda *_: AttnForwardMethod.MLA)


class LatentParticleAttention(ParticleAttention):
    """`ParticleAttention` over latents; arguments, errors and use are the same.

    Heads that propose are not among the models it runs: it refuses ``first_key`` and ``blocks``.
    """

    # Read by SGLang's layers, which look for a backend's own names before the server's.
    prefill_attention_backend_str = decode_attention_backend_str = NAME

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        implementation: Implementation,
        *,
        first_key: int = 0,
        blocks: bool = False,
    ) -> None:
        if first_key or blocks:
            raise ValueError(
                "heads with latent attention (MLA) are not supported "
                f"(first_key={first_key}, blocks={blocks}): pass a head with ordinary attention, "
                "or a draft model"
            )
        super().__init__(runner, tails, implementation)
        absorb(NAME)
        self._rank = runner.model_config.kv_lora_rank
        if implementation == "triton":
            from sglang_smc.kernels.attention.latent import check_sizes

            check_sizes(runner.dtype, self._rank, runner.model_config.qk_rope_head_dim)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend as `plan` said.

        Args:
            q: ``[G * N * C, heads, rank + rope]``, or flat.
            k: ``[G * N * C, 1, rank + rope]``, the new latents, written to ``out_cache_loc``
                first.
            v: the first part of ``k``.

        Returns:
            ``[G * N * C, heads * rank]``.
        """
        check_layer(layer, self._group, kwargs, rank=self._rank)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        query = q.view(*self._shape, layer.tp_q_head_num, layer.head_dim)
        latents = pool.get_key_buffer(layer.layer_id)
        attend = self._attend_over(None, False)
        output = attend(query, latents, rank=self._rank, scaling=layer.scaling)
        return output.view(-1, layer.tp_q_head_num * self._rank)

    forward_decode = forward_extend

    def _in_torch(self, plan: SharedPrefixPlan) -> "Attend":
        return partial(latent_attention, plan=plan)

    def _in_triton(self, places: dict[str, Any], window: int | None, block: bool) -> "Attend":
        from sglang_smc.kernels.attention.latent import latent_attention

        assert window is None and not block, "checked with the layers"
        return partial(latent_attention, **places)
