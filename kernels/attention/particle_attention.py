"""Attend over a prefix that particles share, as `sglang_smc.models.softmax` does, in Triton.

Flash decoding in one launch over *spans* of keys, and a second one that joins their softmaxes:

- A prefix is split into a number of spans that depends on shapes alone. Its queries are all of a
  request's: N particles * C columns * the query heads of one key head, in blocks of rows.
- A particle's tail is split into spans of one length, as many as the longest tail may have. Its
  queries are its own C * group.

A layer with a sliding window reads the end of a prefix alone, as far as its earliest query attends,
and a head no keys before its first: spans are split from the rest. Programs without keys or queries
return at once. The grid follows from shapes and bounds on the host, so that a CUDA graph can
capture it.
"""

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.join import join_spans
from sglang_smc.kernels.attention.work import MAX_HEAD_DIM, cut_work

LOG2_E = 1.4426950408889634


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

    It never waits for the device.

    Args:
        query: ``[G, N, C, q_heads, head_dim]``; heads that share a key head are adjacent. Read in
            place if its tokens have one stride, as in a slice of a wider matrix.
        keys, values: ``[slots, kv_heads, head_dim]`` of one layer, the new tokens' included; of the
            queries' dtype, or 8-bit.
        req_to_token: ``[rows, width]`` slots by row and position.
        tails: ``[rows, W]`` slots by row and position modulo W, a power of two.
        rows, committed: ``[G]`` int64, rows of the shared prefixes and their lengths.
        particle_rows: ``[G, N]`` int64, rows of the tails, which begin at ``committed``.
        starts: ``[G, N]`` int64, position of each particle's first query, at least ``committed -
            1``.
        max_prefix, max_tail: upper bounds of the prefix length, and of a particle's keys after it.
        scaling: factor of the scores.
        cap: scores become cap * tanh(score / cap); 0 for no cap.
        sinks: ``[q_heads]`` scores of a key without a value.
        value_scale: factor of the output.
        window: the number of keys before its own that a query attends to; None for all.
        sees_block: whether a query attends to all new tokens of its particle that have slots of
            their own, also those ahead of it. Not with a window.
        first_key: the first position that has a key; those before it are not attended.

    Returns:
        The output, contiguous, in the shape of ``query``.

    Raises:
        ValueError: for heads of more than 256 dimensions: their blocks do not fit on the chip.
    """
    size, num_particles, num_columns, q_heads, head_dim = query.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}; the Triton kernel takes at most {MAX_HEAD_DIM}")
    assert window is None or not sees_block, "checked with the layers"
    kv_heads = keys.shape[1]
    if window is not None:
        max_prefix = min(max_prefix, window + 1)
    chip = work.chip_of(query.device)
    cut = cut_work(query.shape, kv_heads, query.element_size(), max_prefix, max_tail, chip)
    num_prefix = size * kv_heads * cut.prefix_blocks * cut.prefix_spans
    num_tail = size * num_particles * kv_heads * cut.tail_blocks * cut.tail_spans

    # Every query has a partial result from each span: [spans, G * N * C, q_heads, ...].
    spans = cut.prefix_spans + cut.tail_spans
    tokens = size * num_particles * num_columns
    partial = query.new_empty(spans, tokens, q_heads, head_dim, dtype=torch.float32)
    log_sums = query.new_empty(spans, tokens, q_heads, dtype=torch.float32)
    output = query.new_empty(query.shape)
    queries = query.flatten(0, 2)  # [G * N * C, q_heads, head_dim]
    _attend_spans[(num_prefix + num_tail,)](
        queries,
        keys,
        values,
        *(req_to_token, tails),
        *(places.contiguous() for places in (rows, committed, particle_rows, starts)),
        partial,
        log_sums,
        scaling / cap if cap else scaling * LOG2_E,
        cap * LOG2_E,
        window or 0,
        first_key,
        num_particles,
        tokens,
        num_prefix,
        *cut[4:],  # blocks and spans
        *(*queries.stride()[:2], *keys.stride()[:2], *values.stride()[:2]),
        *(req_to_token.stride(0), tails.shape[1]),
        block_rows=cut.block_rows,
        block_keys=cut.block_keys,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **_constants(query.shape, kv_heads),
        has_window=window is not None,
        has_cap=cap > 0,
        sees_block=sees_block,
    )
    join_spans(partial, log_sums, output, sinks, value_scale)
    return output


def _constants(shape: torch.Size, kv_heads: int) -> dict[str, int]:
    """Return the compile-time constants for queries ``[G, N, C, q_heads, head_dim]``."""
    num_columns, q_heads, head_dim = shape[2:]
    return {
        "num_columns": num_columns,
        "kv_heads": kv_heads,
        "group": q_heads // kv_heads,
        "head_dim": head_dim,
        "block_dim": triton.next_power_of_2(head_dim),
        "block_columns": triton.next_power_of_2(num_columns),
    }


# Arguments that differ from batch to batch are not specialized.
@triton.jit(
    do_not_specialize=[
        *("window", "first_key", "num_particles", "all_tokens", "num_prefix"),
        *("prefix_blocks", "prefix_spans", "tail_blocks", "tail_spans", "tail_span"),
    ]
)
def _attend_spans(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    tails_ptr,
    rows_ptr,
    committed_ptr,
    particle_rows_ptr,
    starts_ptr,
    partial_ptr,
    log_sum_ptr,
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
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    tails_width,
    num_columns: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    sees_block: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Attend with query rows of one key head over one span of a prefix or a tail, per program."""
    is_tail, block, span, head, owner = _own_work(
        num_prefix, prefix_blocks, prefix_spans, tail_blocks, tail_spans, kv_heads
    )
    committed = tl.load(committed_ptr + owner // tl.where(is_tail, num_particles, 1)).to(tl.int32)
    # Every query attends to all of a prefix.
    start = tl.load(starts_ptr + owner, mask=is_tail, other=1 << 30).to(tl.int32)
    own_row = tl.load(particle_rows_ptr + owner, mask=is_tail, other=0)
    own_tail = tails_ptr + own_row * tails_width
    shared_row = tl.load(rows_ptr + owner, mask=is_tail == 0, other=0)
    first, even = _cut_prefix(committed, window, first_key, prefix_spans, block_keys, has_window)
    length = tl.where(is_tail, tail_span, even)
    begin = tl.where(is_tail, tl.maximum(committed, first_key), first) + span * length
    end = tl.where(is_tail, start + num_columns, committed)
    if sees_block:  # without the padding of a request with fewer columns than others
        columns = tl.where(is_tail, num_columns, 0)
        end -= _padding(own_tail, tails_width - 1, start, committed, columns, block_columns)
    num_tokens = tl.where(is_tail, 1, num_particles) * num_columns
    partial_span = span + tl.where(is_tail, prefix_spans, 0)
    _attend_span(
        query_ptr,
        key_ptr + head * key_head_stride,
        value_ptr + head * value_head_stride,
        tl.where(is_tail, own_tail, table_ptr + shared_row * table_stride),
        tl.where(is_tail, tails_width - 1, 0x7FFFFFFF),  # a tail's row is a ring buffer
        starts_ptr,
        partial_ptr,
        log_sum_ptr,
        scaling,
        cap,
        window,
        start,
        begin,
        tl.minimum(begin + length, end),
        block,
        head,
        owner * num_tokens,
        num_tokens,
        partial_span.to(tl.int64) * all_tokens,
        query_stride,
        query_head_stride,
        key_stride,
        value_stride,
        num_columns,
        kv_heads,
        group,
        head_dim,
        block_rows,
        block_keys,
        block_dim,
        has_window,
        has_cap,
        sees_block,
    )


@triton.jit
def _own_work(num_prefix, prefix_blocks, prefix_spans, tail_blocks, tail_spans, kv_heads):
    """Return this program's work: whether it is a tail, its block, span, key head and owner.

    The innermost index runs fastest: blocks of rows that read the same keys run concurrently. The
    owner of a tail is a particle, that of a prefix a request.
    """
    program = tl.program_id(0)
    is_tail = program >= num_prefix
    rest = program - tl.where(is_tail, num_prefix, 0)
    blocks = tl.where(is_tail, tail_blocks, prefix_blocks)
    block, rest = rest % blocks, rest // blocks
    spans = tl.where(is_tail, tail_spans, prefix_spans)
    span, rest = rest % spans, rest // spans
    return is_tail, block, span, rest % kv_heads, rest // kv_heads


@triton.jit
def _cut_prefix(committed, window, first_key, spans, block_keys, has_window: tl.constexpr):
    """Return the first attended key of a prefix, and the length of its spans in whole blocks."""
    # The first key of the earliest possible query, which is at the prefix's end.
    first = tl.maximum(committed - 1 - window, first_key) if has_window else first_key
    left = tl.maximum(committed - first, 0)
    return first, tl.cdiv(left, block_keys * spans) * block_keys


@triton.jit
def _padding(tail_ptr, in_row, start, committed, columns, block_columns: tl.constexpr):
    """Return how many columns of a tail have no slot; those before a tail are in the prefix."""
    column = tl.arange(0, block_columns)
    own = (column < columns) & (start + column >= committed)
    slot = tl.load(tail_ptr + ((start + column) & in_row), mask=own, other=1)
    return tl.sum((slot == 0).to(tl.int32), 0)


@triton.jit
def _attend_span(
    query_ptr,
    key_ptr,
    value_ptr,
    slot_ptr,
    in_row,
    starts_ptr,
    partial_ptr,
    log_sum_ptr,
    scaling,
    cap,
    window,
    start,
    begin,
    end,
    block,
    head,
    first_token,
    num_tokens,
    first_partial,
    query_stride,
    query_head_stride,
    key_stride,
    value_stride,
    num_columns: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    sees_block: tl.constexpr,
):
    """Compute flash attention of query rows (token, head) over the positions [begin, end)."""
    # Unsigned, since division by other numbers than powers of two takes fewer registers.
    row = (block * block_rows + tl.arange(0, block_rows)).to(tl.uint32)
    nth_token, nth_head = (row // group).to(tl.int32), (row % group).to(tl.int32)
    token, own_head = first_token + nth_token, head * group + nth_head
    dim = tl.arange(0, block_dim)
    in_dim = dim < head_dim
    # An empty span loads nothing, runs no iteration, and stores log-sums of -inf alone.
    in_rows = row < num_tokens * group
    place = token * (kv_heads * group) + own_head
    query_place = token.to(tl.int64) * query_stride + own_head * query_head_stride
    query = tl.load(
        query_ptr + query_place[:, None] + dim[None, :],
        mask=(in_rows & (begin < end))[:, None] & in_dim[None, :],
        other=0.0,
    )
    last_seen = start + nth_token % num_columns
    if has_window:
        own_start = tl.load(starts_ptr + token // num_columns, mask=in_rows, other=0)
        first_seen = own_start.to(tl.int32) + nth_token % num_columns - window

    highest = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    output = tl.zeros([block_rows, block_dim], tl.float32)
    for at in range(begin, end, block_keys):
        position = at + tl.arange(0, block_keys)
        inside = position < end
        slot = tl.load(slot_ptr + (position & in_row), mask=inside, other=0).to(tl.int64)
        # All requests write to slot 0, which may hold NaN, and NaN times a weight of 0 is NaN.
        loaded = (slot > 0)[:, None] & in_dim[None, :]
        key = tl.load(key_ptr + slot[:, None] * key_stride + dim[None, :], mask=loaded, other=0.0)
        value = tl.load(
            value_ptr + slot[:, None] * value_stride + dim[None, :], mask=loaded, other=0.0
        )
        scores = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="tf32x3") * scaling
        if has_cap:  # cap * tanh(score), in a form that does not overflow
            scores = cap - 2 * cap / (1 + tl.exp(2 * scores))
        seen = inside[None, :]
        if not sees_block:
            seen &= position[None, :] <= last_seen[:, None]
        if has_window:
            seen &= position[None, :] >= first_seen[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # For a row without keys so far: -inf - 0, not -inf - -inf.
        reference = tl.where(new_highest > float("-inf"), new_highest, 0.0)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(highest - reference)
        total = total * decay + tl.sum(weights, 1)
        output = output * decay[:, None] + tl.dot(
            weights.to(query.dtype), value.to(query.dtype), input_precision="tf32x3"
        )
        highest = new_highest

    some = total != 0  # true for NaN, so that NaN propagates
    log_sum = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(log_sum_ptr + first_partial * (kv_heads * group) + place, log_sum, mask=in_rows)
    tl.store(
        partial_ptr
        + (first_partial * (kv_heads * group) + place)[:, None] * head_dim
        + dim[None, :],
        output / tl.where(some, total, 1.0)[:, None],
        mask=(in_rows & some)[:, None] & in_dim[None, :],
    )
