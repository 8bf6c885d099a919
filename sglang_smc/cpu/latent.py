"""Compute latent attention (MLA) on CPUs: batched attention over one latent per token.

`CpuAttentionBackend` with one key head that all query heads share, and values that are the first
numbers of its keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_smc.cpu.attention import CpuAttentionBackend
from sglang_smc.models.latent_attention import absorb
from sglang_smc.models.softmax import Softmax
from sglang_smc.models.supported import check_layer

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuLatentBackend(CpuAttentionBackend):
    """Causal attention over latents; layers use the absorbed form in prefill, too.

    Args:
        model_runner: of a model with latent attention.
        name: the name under which SGLang registers this backend.
    """

    def __init__(self, model_runner: ModelRunner, name: str) -> None:
        super().__init__(model_runner)
        absorb(name)
        self.rank = model_runner.model_config.kv_lora_rank

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend with the plan of ``init_forward_metadata``.

        Args:
            q: [tokens, heads, rank + rope], or flat
            k: [tokens, 1, rank + rope], written to ``out_cache_loc`` first
            v: the first part of ``k``

        Returns:
            [tokens, heads * rank]
        """
        check_layer(layer, self.group, kwargs, rank=self.rank)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)  # [tokens, heads, rank + rope]
        output = torch.empty_like(query)
        plan, softmax = self.plan_of(None), Softmax(layer.scaling)
        for call in plan.calls:
            latents = self._gather_keys(layer.layer_id, call.slots, plan).to(q.dtype)
            # The values are whole latents, since torch has a kernel for values as wide as keys.
            call.attend(query, latents, latents, softmax, output)
        return output[..., : self.rank].reshape(len(query), -1)

    forward_decode = forward_extend
