"""Compute batched attention on CPUs: one gather and one attention kernel for many rows.

SGLang's ``torch_native`` backend loops over the rows of a batch in Python, which dominates the time
for many short rows, as in decoding. Here rows are padded to the longest and masked, so that decode
and verify are one call per layer. Particles have a backend of their own (`models.attention`); this
one serves prefill, and decoding without SMC.

Every forward is an *extend*: row ``r`` has ``query_lens[r]`` new tokens after ``prefix_lens[r]``
cached ones, and query ``i`` attends to the keys ``0 .. prefix_lens[r] + i``. Decode is the case of
one new token, verify that of K + 1, where tokens of a tree attend to their ancestors alone. The
keys of a row are in the slots ``req_to_token[req_pool_indices[r], :kv_len]``, as everywhere in
SGLang.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_smc.models.attention import PoolAttention
from sglang_smc.models.softmax import Softmax, additive, attend, finish, gather_slots
from sglang_smc.models.windows import KeyWindow, window_of
from sglang_smc.upstream import kv_layers

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# A row with more new tokens than this keeps all cores busy: batching it with others would only
# add padding, and its mask would be large.
LONG_ROW = 64


class PaddedRows(msgspec.Struct, frozen=True):
    """Short rows that share one attention call, padded to their longest."""

    # Positions of the rows' queries in the flat batch. Padding repeats a row's last token.
    tokens: torch.Tensor  # [rows, query_len] int64
    # Slots of the rows' keys. Padding repeats a row's last slot, so only written slots are read.
    slots: torch.Tensor  # [rows, kv_len] int64
    # From `additive`; query heads that share a key head are folded into the query axis.
    mask: torch.Tensor  # [rows, 1, query_len * group, kv_len]

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        softmax: Softmax,
        output: torch.Tensor,
    ) -> None:
        """Fill these rows' part of ``output``; query and output are [tokens, q_heads, head_dim].

        ``keys`` and ``values`` are [rows, kv_heads, kv_len, head_dim]. The query heads of a key
        head are folded into the query axis, so that no key is repeated in memory.
        """
        rows, query_len = self.tokens.shape
        kv_heads = keys.shape[1]
        head_dim = keys.shape[3]
        tokens = self.tokens.view(-1)
        folded = query[tokens].view(rows, query_len, kv_heads, -1, head_dim).transpose(1, 2)
        # [rows, kv_heads, query_len * group, dim]
        folded = folded.reshape(rows, kv_heads, -1, head_dim)
        if softmax.sinks is not None:  # [kv_heads, query_len * group], as queries are folded
            of_heads = softmax.sinks.view(kv_heads, -1).repeat(1, query_len)
            softmax = softmax._replace(sinks=of_heads)
        result = finish(attend(folded, keys, values, self.mask, softmax), softmax)
        unfolded = result.view(rows, kv_heads, query_len, -1, head_dim).transpose(1, 2)
        # A padding query repeats its row's last one: equal values are written to one place.
        output[tokens] = unfolded.reshape(-1, *query.shape[1:])


class LongRow(msgspec.Struct, frozen=True):
    """A row with many new tokens: the queries ``start .. start + query_len``."""

    start: int
    slots: torch.Tensor  # [1, kv_len] int64
    mask: torch.Tensor | None  # [query_len, kv_len]; None: no prefix, no window, plain causal
    query_len: int

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        softmax: Softmax,
        output: torch.Tensor,
    ) -> None:
        """Fill this row's part of ``output``; arguments as in ``PaddedRows.attend``, of one row.

        Key heads become the batch axis: keys are broadcast over their query heads as views.
        """
        own = slice(self.start, self.start + self.query_len)
        kv_heads = keys.shape[1]
        head_dim = keys.shape[3]
        grouped = query[own].view(self.query_len, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        broadcast = (-1, grouped.shape[1], -1, -1)  # [kv_heads, group, kv_len, head_dim]
        if softmax.sinks is not None:
            softmax = softmax._replace(sinks=softmax.sinks.view(kv_heads, -1, 1))
        attended = attend(
            grouped,  # [kv_heads, group, query_len, head_dim]
            keys[0].unsqueeze(1).expand(broadcast),
            values[0].unsqueeze(1).expand(broadcast),
            self.mask,
            softmax,
        )
        result = finish(attended, softmax)
        output[own] = result.permute(2, 0, 1, 3).reshape(self.query_len, -1, head_dim)


class ForwardPlan(msgspec.Struct, frozen=True):
    """The attention calls of one forward, shared by all layers with the same window."""

    calls: list[PaddedRows | LongRow]
    # Destinations of the gathers. Fresh pages for every layer would cost more than the copy.
    keys: torch.Tensor  # [max slots of a call, kv_heads, head_dim]
    values: torch.Tensor  # the same shape


class CpuAttentionBackend(PoolAttention):
    """Causal decoder attention for a plain CPU; eager only (no graph capture)."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.plan_of: Callable[[KeyWindow | None], ForwardPlan]  # by window, in the running forward

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the calls of this forward once, for all its layers."""
        if forward_batch.forward_mode.is_idle():
            return
        prefix_lens, query_lens = row_lengths(forward_batch)
        req_to_token = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices
        self.set_plan(
            slots_of=lambda index, kv_lens: req_to_token[rows[index, None], columns(kv_lens)],
            prefix_lens=prefix_lens,
            query_lens=query_lens,
            tree=self.tree_of(forward_batch),
        )

    @staticmethod
    def tree_of(forward_batch: ForwardBatch) -> torch.Tensor | None:
        """Return which new tokens attend to which, ``[rows, width, width]`` bool; None for chains.

        SMC verifies chains; `bench/baselines` has trees, for SGLang's own speculation.
        """
        return None

    def set_plan(self, **rows: Any) -> None:
        """Set the plan of the next forward, from the arguments of ``plan_calls``."""

        @cache
        def plan_of(window: KeyWindow | None) -> ForwardPlan:
            calls = plan_calls(**rows, group=self.group, dtype=self.dtype, window=window)
            return ForwardPlan(calls, *self._scratch(calls))

        self.plan_of = plan_of

    def _scratch(self, calls: list[PaddedRows | LongRow]) -> tuple[torch.Tensor, torch.Tensor]:
        # Every layer of a pool has the same row shape: [kv_heads, head_dim].
        cache = self.token_to_kv_pool.get_key_buffer(kv_layers(self.token_to_kv_pool)[0])
        size = max(call.slots.numel() for call in calls)
        return cache.new_empty(size, *cache.shape[1:]), cache.new_empty(size, *cache.shape[1:])

    def attended(self, q: torch.Tensor, layer: RadixAttention, softmax: Softmax) -> torch.Tensor:
        """Run the planned calls; see `PoolAttention.attended`."""
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        output = torch.empty_like(query)
        plan = self.plan_of(window_of(layer))
        for call in plan.calls:
            keys, values = self._gather(layer.layer_id, call.slots, plan)
            call.attend(query, keys.to(q.dtype), values.to(q.dtype), softmax, output)
        if self.rank is None:
            return output.view(q.shape)
        return output[..., : self.rank].reshape(len(output), -1)

    def _gather(
        self, layer_id: int, slots: torch.Tensor, plan: ForwardPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of ``slots`` [rows, kv_len].

        Both are [rows, kv_heads, kv_len, head_dim]. Latents are both: all query heads share one key
        head, values are the first numbers of its keys, and torch has a kernel for values as wide as
        keys.
        """
        pool = self.token_to_kv_pool
        keys = _gather_rows(pool.get_key_buffer(layer_id), slots, plan.keys)
        if self.rank is not None:
            return keys, keys
        return keys, _gather_rows(pool.get_value_buffer(layer_id), slots, plan.values)


def row_lengths(forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cached and new tokens of every row: two int64 tensors [rows]."""
    mode = forward_batch.forward_mode
    seq_lens = forward_batch.seq_lens.long()
    prefix_lens = forward_batch.extend_prefix_lens
    query_lens = forward_batch.extend_seq_lens
    if mode.is_decode():
        return seq_lens - 1, torch.ones_like(seq_lens)
    if mode.is_target_verify() and query_lens is None:
        # A verify batch without extend lengths counts only what is cached in seq_lens.
        width = forward_batch.input_ids.numel() // seq_lens.numel()
        return seq_lens, torch.full_like(seq_lens, width)
    assert prefix_lens is not None and query_lens is not None, "an extend batch has its lengths"
    return prefix_lens.long(), query_lens.long()


def plan_calls(
    *,
    slots_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    prefix_lens: torch.Tensor,
    query_lens: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    tree: torch.Tensor | None = None,
    window: KeyWindow | None = None,
) -> list[PaddedRows | LongRow]:
    """Split a batch into attention calls with little padding.

    Rows of one length (decode, verify) are one call. Short rows of different lengths share a call
    where query and key lengths agree within a factor of two; each long row has its own call.

    Args:
        slots_of: from row indices ``[n]`` and their numbers of keys ``[n]``, the slots ``[n, most
            keys]``
        prefix_lens, query_lens: [rows] int64, cached and new tokens
        group: query heads per key head
        dtype: of the queries
        tree: as of `CpuAttentionBackend.tree_of`
        window: the keys that a query attends to; None for all
    """
    starts = query_lens.cumsum(0) - query_lens  # [rows], first query of each row
    calls: list[PaddedRows | LongRow] = []
    for rows in _buckets(prefix_lens.tolist(), query_lens.tolist(), together=tree is not None):
        index = torch.tensor(rows)
        prefix = prefix_lens[index]
        length = query_lens[index]
        start = starts[index]
        slots = slots_of(index, prefix + length).long()
        offset = columns(length)  # [rows, query_len]
        if length[0] > LONG_ROW and tree is None:
            mask = None
            if prefix[0] or window is not None:
                mask = additive(_hidden(prefix + offset[0], slots.shape[1], window), dtype)
            calls.append(LongRow(start=int(start), slots=slots, mask=mask, query_len=int(length)))
            continue
        hidden = _hidden(prefix[:, None] + offset, slots.shape[1], window)
        if tree is not None:
            new = prefix.view(-1, 1, 1) + torch.arange(tree.shape[1]).expand_as(tree)
            hidden.scatter_(2, new, ~tree)
        folded = additive(hidden, dtype).repeat_interleave(group, dim=1).unsqueeze(1)
        calls.append(PaddedRows(tokens=start[:, None] + offset, slots=slots, mask=folded))
    return calls


def _buckets(prefix_lens: list[int], query_lens: list[int], together: bool) -> list[list[int]]:
    """Return the rows of each call."""
    if together or (len(set(query_lens)) == 1 and query_lens[0] <= LONG_ROW):
        return [list(range(len(query_lens)))]
    buckets: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, (prefix, length) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        if length > LONG_ROW:
            buckets[(row,)].append(row)
        else:
            buckets[length.bit_length(), (prefix + length).bit_length()].append(row)
    return list(buckets.values())


def columns(lengths: torch.Tensor) -> torch.Tensor:
    """Return indices into rows of these lengths, ``[rows, longest]``; padding repeats the last."""
    return torch.arange(int(lengths.max())).minimum(lengths[:, None] - 1)


def _hidden(position: torch.Tensor, kv_len: int, window: KeyWindow | None) -> torch.Tensor:
    """Return the keys masked for queries at ``position``: ``[*position.shape, kv_len]`` bool."""
    key = torch.arange(kv_len)
    position = position.unsqueeze(-1)
    if window is None:
        return key > position
    return (key > position) | ((key < position - window.before) & (key >= window.sink))


def _gather_rows(cache: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    gathered = gather_slots(cache, slots.view(-1), scratch)
    return gathered.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
