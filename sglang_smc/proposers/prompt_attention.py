"""Attend with a draft over prompts, where no backend of SGLang does it."""

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch.nn.attention.bias import causal_lower_right

from sglang_smc.models.attention import PoolAttention
from sglang_smc.models.latent_attention import NAME as LATENTS
from sglang_smc.models.softmax import Softmax, additive, attend, finish, gather_slots
from sglang_smc.models.windows import KeyWindow, window_of
from sglang_smc.upstream import kv_layers

_AT_ONCE = 1024  # queries of a layer with a window, whose mask is a tensor


class PromptAttention(PoolAttention):
    """Causal attention of a draft over prompts, or windows of them.

    No backend of SGLang leaves out the first token, or has first keys beside a window. Prompts are
    processed one by one, each in one call of torch's, or in some where a layer has a window: then
    no query is compared with more than the window's keys and those of the queries beside it.

    Args:
        runner: the draft's, its pools built.
        first_key: the first position of a sequence that has a key.
        keys_alone: whether the last layer's keys end the pass, by `KeysWritten`.
    """

    # Latents (MLA) are written in the form that `ParticleAttention` reads.
    prefill_attention_backend_str = decode_attention_backend_str = LATENTS

    def __init__(self, runner: ModelRunner, *, first_key: int, keys_alone: bool) -> None:
        super().__init__(runner)
        self.ends_at = kv_layers(self.token_to_kv_pool)[-1] if keys_alone else None
        self._first_key = first_key
        self._rows: torch.Tensor  # [G]
        self._spans: list[tuple[int, int]]  # of each prompt: cached tokens, and new tokens

    def plan(self, batch: ScheduleBatch) -> None:
        """Plan all layers of a pass over a batch of prompts."""
        assert batch.prefix_lens is not None and batch.extend_lens is not None
        self._rows = batch.req_pool_indices
        self._spans = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))

    def attended(self, q: torch.Tensor, layer: RadixAttention, softmax: Softmax) -> torch.Tensor:
        table = self.req_to_token_pool.req_to_token
        query = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
        output = torch.zeros_like(query)
        first = 0
        for row, (known, new) in zip(self._rows.split(1), self._spans, strict=True):
            without_key = max(self._first_key - known, 0)
            rows = slice(first + without_key, first + new)
            first += new
            if rows.start < rows.stop:
                position = torch.arange(self._first_key, known + new, device=q.device)
                slots = table[row, position].long()
                output[rows] = self._attend(query[rows], slots, layer, softmax)
        return output.view(q.shape)

    def _attend(
        self, query: torch.Tensor, slots: torch.Tensor, layer: RadixAttention, softmax: Softmax
    ) -> torch.Tensor:
        """Attend with queries ``[Q, q_heads, head_dim]`` of the last of slots ``[L]``."""
        window = window_of(layer)
        if window is None:
            whole = causal_lower_right(len(query), len(slots))
            return self._softmax(query, slots, layer, softmax, whole)
        found = []
        before = len(slots) - len(query)
        for first, part in zip(
            range(before, len(slots), _AT_ONCE), query.split(_AT_ONCE), strict=True
        ):
            begin = max(first - window.before, 0)
            seen = slots[begin : first + len(part)]
            if window.sink:
                seen = torch.cat([slots[: min(window.sink, begin)], seen])
            mask = _mask_within(window, len(part), len(seen), query.device)
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
        query = query.transpose(0, 1).unsqueeze(0)  # [1, q_heads, Q, head_dim]
        keys = keys.unsqueeze(0)
        values = values.unsqueeze(0)
        if softmax.cap or softmax.sinks is not None:  # torch's own has neither
            if softmax.sinks is not None:
                softmax = softmax._replace(sinks=softmax.sinks.unsqueeze(1))
            output = finish(
                attend(query, keys, values, additive(~mask, query.dtype), softmax), softmax
            )
        else:
            output = softmax.value_scale * torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=softmax.scaling
            )
        return output.squeeze(0).transpose(0, 1)

    def _of_heads(
        self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return cached values of ``slots`` per query head: ``[q_heads, L, head_dim]``."""
        found = gather_slots(cache, slots, cache.new_empty(len(slots), *cache.shape[1:]))
        return found.to(dtype).repeat_interleave(self.group, dim=1).transpose(0, 1)


def _mask_within(
    window: KeyWindow, num_queries: int, num_keys: int, device: torch.device
) -> torch.Tensor:
    """Return which keys the queries of the last of them attend to, ``[Q, L]`` bool.

    The keys are those of the first query's window and all later ones, behind first ones that the
    window leaves out.
    """
    own = num_keys - num_queries  # key of the first query
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril_(own)
    within = seen.triu(own - window.before)
    within[:, : window.sink] = seen[:, : window.sink]
    return within
