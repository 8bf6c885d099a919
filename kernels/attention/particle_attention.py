"""Attend over a prefix that particles share, as `sglang_smc.models.softmax` does, in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.spans import (
    LOG2_E,
    Layer,
    Slots,
    add_scores,
    attend,
    own_rows,
    own_span,
    slots_of,
    store,
)
from sglang_smc.kernels.attention.work import MAX_HEAD_DIM, cut_work


class _Cache(NamedTuple):
    """Keys and values of a layer."""

    key: torch.Tensor
    key_stride: int
    key_head_stride: int
    value: torch.Tensor
    value_stride: int
    value_head_stride: int


def particle_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    req_to_token: torch.Tensor,
    tails: torch.Tensor,
    rows: torch.Tensor,
    committed: torch.Tensor,
    particle_rows: torch.Tensor,
    starts: torch.Tensor,
    max_prefix: int,
    max_tail: int,
    scaling: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
    window: int | None = None,
    sees_block: bool = False,
    first_key: int = 0,
) -> torch.Tensor:
    """Compute softmax attention of particles over prefix and tails, causal except in blocks.

    Reference: `sglang_smc.models.softmax.shared_prefix_attention`, with its plan's arguments. It
    never waits for the device.

    Args:
        query: ``[G, N, C, q_heads, head_dim]``; heads that share a key head are adjacent. Read in
            place if its tokens have one stride, as in a slice of a wider matrix.
        keys, values: ``[slots, kv_heads, head_dim]`` of one layer, the new tokens' included; of the
            queries' dtype, or 8-bit.
        req_to_token, tails, starts, window, sees_block, first_key: as in `plan_shared_prefix`.
        rows, committed, particle_rows, max_tail: as in `KVLocations`.
        max_prefix: upper bound of the prefix length.
        scaling, cap, sinks, value_scale: as in `Softmax`.

    Returns:
        The output, contiguous, in the shape of ``query``.

    Raises ValueError for heads of more than 256 dimensions: their blocks do not fit on the chip.
    """
    head_dim = query.shape[4]
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}; the Triton kernel takes at most {MAX_HEAD_DIM}")
    assert window is None or not sees_block, "checked with the layers"
    kv_heads = keys.shape[1]
    if window is not None:
        max_prefix = min(max_prefix, window + 1)
    chip = work.chip_of(query.device)
    split = cut_work(query.shape, kv_heads, query.element_size(), max_prefix, max_tail, chip)
    flags = {"has_window": window is not None, "has_cap": cap > 0, "sees_block": sees_block}
    return attend(
        _attend_spans,
        query,
        _Cache(keys, *keys.stride()[:2], values, *values.stride()[:2]),
        Slots.of(req_to_token, tails, rows, committed, particle_rows, starts),
        (scaling / cap if cap else scaling * LOG2_E, cap * LOG2_E, window or 0, first_key),
        split,
        Layer.of(query, kv_heads, head_dim, split, **flags),
        sinks,
        value_scale,
    )


# Arguments that differ from batch to batch are not specialized, as fields of records always are.
@triton.jit(
    do_not_specialize=[
        *("window", "first_key", "num_particles", "all_tokens", "num_prefix"),
        *("prefix_blocks", "prefix_spans", "tail_blocks", "tail_spans", "tail_span"),
    ]
)
def _attend_spans(
    queries,
    cache,
    slots,
    partial,
    layer,
    scaling,
    cap,
    window,
    first_key,
    num_particles,
    all_tokens,
    num_prefix,
    prefix_blocks,
    prefix_spans,
    tail_blocks,
    tail_spans,
    tail_span,
):
    """Compute flash attention of rows of one key head over one span of a prefix or a tail."""
    sizes = num_particles, all_tokens, num_prefix
    parts = prefix_blocks, prefix_spans, tail_blocks, tail_spans, tail_span
    span = own_span(slots, layer, window, first_key, sizes, parts)
    token, head, column, in_rows = own_rows(span, layer)
    dim = tl.arange(0, layer.block_dim)
    in_dim = dim < layer.head_dim
    # An empty span loads nothing, runs no iteration, and stores log-sums of -inf alone.
    asked = (in_rows & (span.begin < span.end))[:, None]
    place = token.to(tl.int64) * queries.stride + head * queries.head_stride
    own = queries.tensor + place[:, None] + dim[None, :]
    query = tl.load(own, mask=asked & in_dim[None, :], other=0.0)
    keys = cache.key + span.head * cache.key_head_stride
    values = cache.value + span.head * cache.value_head_stride
    last_seen = span.start + column
    if layer.has_window:
        own_start = tl.load(slots.starts + token // layer.num_columns, mask=in_rows, other=0)
        first_seen = own_start.to(tl.int32) + column - window

    highest = tl.full([layer.block_rows], float("-inf"), tl.float32)
    total = tl.zeros([layer.block_rows], tl.float32)
    output = tl.zeros([layer.block_rows, layer.block_dim], tl.float32)
    for first in range(span.begin, span.end, layer.block_keys):
        position = first + tl.arange(0, layer.block_keys)
        slot = slots_of(span, position)
        loaded = (slot > 0)[:, None] & in_dim[None, :]
        at = slot[:, None] * cache.key_stride + dim[None, :]
        key = tl.load(keys + at, mask=loaded, other=0.0)
        at = slot[:, None] * cache.value_stride + dim[None, :]
        value = tl.load(values + at, mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="tf32x3") * scaling
        if layer.has_cap:  # cap * tanh(score), in a form that does not overflow
            scores = cap - 2 * cap / (1 + tl.exp(2 * scores))
        seen = (position < span.end)[None, :]
        if not layer.sees_block:
            seen &= position[None, :] <= last_seen[:, None]
        if layer.has_window:
            seen &= position[None, :] >= first_seen[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        weights, decay, highest, total = add_scores(scores, highest, total)
        output = output * decay[:, None] + tl.dot(
            weights.to(query.dtype), value.to(query.dtype), input_precision="tf32x3"
        )
    store(partial, span, token, head, output, highest, total, in_rows, layer)
