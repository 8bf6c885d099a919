"""Attend with a head over prompts."""

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch.nn.attention.bias import causal_lower_right

from sglang_smc.models.attention import PoolAttention
from sglang_smc.models.latent_attention import NAME as LATENTS
from sglang_smc.models.softmax import Softmax, gather_slots
from sglang_smc.models.supported import window_of
from sglang_smc.upstream import kv_layers

_AT_ONCE = 1024  # queries of a layer with a window, whose mask is a tensor


class PromptAttention(PoolAttention):
    """Causal attention of a head over prompts, or windows of them, without their first token.

    No backend of SGLang does that. Prompts are processed one by one, each in one call of torch's,
    or in some where a layer has a window. The last layer's keys end the pass, by `KeysWritten`.

    Args:
        runner: the head's, its pools built.
    """

    # Latents (MLA) are written in the form that `ParticleAttention` reads.
    prefill_attention_backend_str = decode_attention_backend_str = LATENTS

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.ends_at = kv_layers(self.token_to_kv_pool)[-1]
        self._rows: torch.Tensor  # [G]
        self._spans: list[tuple[int, int]]  # of each prompt: cached tokens, and new tokens

    def plan(self, batch: ScheduleBatch) -> None:
        """Plan all layers of a pass over a batch of prompts."""
        assert batch.prefix_lens is not None and batch.extend_lens is not None
        self._rows = batch.req_pool_indices
        self._spans = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))

    def attended(self, q: torch.Tensor, layer: RadixAttention, softmax: Softmax) -> torch.Tensor:
        assert softmax.sinks is None, "heads have none"
        table = self.req_to_token_pool.req_to_token
        query = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
        output = torch.zeros_like(query)
        first = 0
        for row, (known, new) in zip(self._rows.split(1), self._spans, strict=True):
            rows = slice(first + (known == 0), first + new)  # without the sequence's first token
            first += new
            if rows.start < rows.stop:
                position = torch.arange(1, known + new, device=q.device)
                slots = table[row, position].long()
                output[rows] = self._attend(query[rows], slots, layer, softmax)
        return output.view(q.shape)

    def _attend(
        self, query: torch.Tensor, slots: torch.Tensor, layer: RadixAttention, softmax: Softmax
    ) -> torch.Tensor:
        """Attend with queries ``[Q, q_heads, head_dim]`` of the last of slots ``[L]``."""
        window = window_of(layer)
        if window is None:
            mask = causal_lower_right(len(query), len(slots))
            return self._softmax(query, slots, layer, softmax, mask)
        found = []
        before = len(slots) - len(query)
        for first, part in zip(
            range(before, len(slots), _AT_ONCE), query.split(_AT_ONCE), strict=True
        ):
            seen = slots[max(first - window, 0) : first + len(part)]
            every = torch.ones(len(part), len(seen), dtype=torch.bool, device=query.device)
            own = len(seen) - len(part)  # key of the first query
            mask = every.tril(own).triu(own - window)
            found.append(self._softmax(part, seen, layer, softmax, mask))
        return torch.cat(found)

    def _softmax(
        self,
        query: torch.Tensor,
        slots: torch.Tensor,
        layer: RadixAttention,
        softmax: Softmax,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Attend with queries to the keys of ``slots`` that a mask ``[Q, L]`` shows them."""
        stored = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        keys, values = (self._of_heads(cache, slots, query.dtype) for cache in stored)
        found = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            scale=softmax.scaling,
        )
        return found.squeeze(0).transpose(0, 1) * softmax.value_scale

    def _of_heads(
        self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return cached values of ``slots`` per query head: ``[q_heads, L, head_dim]``."""
        found = gather_slots(cache, slots, cache.new_empty(len(slots), *cache.shape[1:]))
        return found.to(dtype).repeat_interleave(self.group, dim=1).transpose(0, 1)
