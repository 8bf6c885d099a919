"""Attend over a prefix that particles share, as `sglang_smc.models.softmax` does, in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.spans import (
    LOG2_E,
    Grid,
    KeySlots,
    Layer,
    add_scores,
    attend,
    join_last,
    no_softmax,
    num_columns,
    own_rows,
    own_span,
    part_of,
    slots_of,
    store,
)
from sglang_smc.kernels.attention.work import MAX_HEAD_DIM, cut_work
from sglang_smc.kernels.tensors import contiguous
from sglang_smc.smc.ledger import AttentionContext


class New(NamedTuple):
    """Keys and values of the rows of a pass, to be rotated and written; queries are rotated, too.

    Rotations are NeoX's, of all of a head (RoPE, arXiv 2104.09864).
    """

    key: torch.Tensor  # [R, kv_heads, head_dim]
    key_stride: int
    value: torch.Tensor  # [R, kv_heads, head_dim]
    value_stride: int
    slots: torch.Tensor  # [R] int64; 0 for a first token that is written already, or no token
    positions: torch.Tensor  # [R] int64 rows of `cos_sin`
    cos_sin: torch.Tensor  # [positions, head_dim]: cosines, then sines

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor, *places: torch.Tensor) -> "New":
        """Return the new keys, with the places, its last fields, made contiguous."""
        return cls(key, key.stride(0), value, value.stride(0), *contiguous(places))


def new_arrivals(num_requests: int, kv_heads: int, device: torch.device | str) -> torch.Tensor:
    """Return counters for all launches of `particle_attention` for up to so many requests."""
    size = max(num_requests * kv_heads, work.MOST_WALKING)
    return torch.zeros(size, dtype=torch.int32, device=device)


class _Cache(NamedTuple):
    """Keys and values of a layer."""

    key: torch.Tensor
    key_stride: int
    key_head_stride: int
    value: torch.Tensor
    value_stride: int
    value_head_stride: int
    new: New | None


def particle_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: AttentionContext,
    *,
    max_prefix: int,
    scaling: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
    new: New | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax attention of particles over prefix and tails, causal except in blocks.

    Reference: `sglang_smc.models.softmax.shared_prefix_attention`. It never waits for the device.

    Args:
        query: ``[G, N, C, q_heads, head_dim]``; heads that share a key head are adjacent. Read in
            place if its tokens have one stride, as in a slice of a wider matrix.
        keys, values: ``[slots, kv_heads, head_dim]`` of one layer, the new tokens' included unless
            ``new`` has them; of the queries' dtype, or 8-bit.
        context: the keys that are attended to.
        max_prefix: upper bound of the prefix length.
        scaling, cap, sinks, value_scale: as in `Softmax`.
        new: what the layer has not rotated and written yet, except in blocks. The result is that of
            doing so first. In a request either all first tokens of particles are written already,
            or none that is read.
        arrivals: as in `attend`, of `new_arrivals`; without them a second launch joins.

    Returns:
        The output, contiguous, in the shape of ``query``.

    Raises ValueError for heads of more than 256 dimensions: their blocks do not fit on the chip.
    """
    head_dim = query.shape[4]
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}; the Triton kernel takes at most {MAX_HEAD_DIM}")
    window = context.window
    sees_block = context.sees_block
    assert not sees_block or new is None, "`ParticleAttention` leaves none to them"
    kv_heads = keys.shape[1]
    if window is not None:
        max_prefix = min(max_prefix, window + 1 + context.sink)
    chip = work.chip_of(query.device)
    max_tail = context.locations.max_tail
    item = query.element_size()
    split = cut_work(query.shape, kv_heads, item, max_prefix, max_tail, chip, new is not None)
    if split.walks and arrivals is None:
        split = split._replace(prefix_spans=1)
    flags = {"has_window": window is not None, "has_cap": cap > 0, "sees_block": sees_block}
    flags["overlaps"] = chip.overlaps and new is not None  # in a draft's layers
    return attend(
        _attend_spans,
        query,
        _Cache(
            key=keys,
            key_stride=keys.stride(0),
            key_head_stride=keys.stride(1),
            value=values,
            value_stride=values.stride(0),
            value_head_stride=values.stride(1),
            new=new,
        ),
        KeySlots.of(context),
        (
            scaling / cap if cap else scaling * LOG2_E,
            cap * LOG2_E,
            window or 0,
            context.first_key,
            context.sink,
        ),
        split,
        Layer.of(query, kv_heads, head_dim, split, **flags),
        sinks,
        value_scale,
        arrivals if split.walks or new is not None else None,
    )


# Arguments that differ from batch to batch are not specialized, as fields of records always are.
@triton.jit(
    do_not_specialize=[
        *("window", "first_key", "sink", "num_particles", "all_tokens", "num_prefix"),
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
    sink,
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
    if layer.overlaps:
        gdc_launch_dependents()
        gdc_wait()
    grid = Grid(
        num_particles=num_particles,
        all_tokens=all_tokens,
        num_prefix=num_prefix,
        prefix_blocks=prefix_blocks,
        prefix_spans=prefix_spans,
        tail_blocks=tail_blocks,
        tail_spans=tail_spans,
        tail_span=tail_span,
    )
    span = own_span(slots, layer, window, first_key, sink, grid)
    places, in_rows = own_rows(span, layer)
    owner = places.particle
    column = places.column
    own_start = tl.load(slots.starts + owner, mask=in_rows, other=0).to(tl.int32)
    first_seen = own_start + column - window
    if layer.sees_block:  # all up to the end
        column = tl.full([layer.block_rows], num_columns(layer), tl.int32)
    some = span.begin < span.end
    if cache.new is not None:
        is_new = _is_new(cache.new, owner, in_rows, layer)
        some |= span.is_first_of_tail
    # A program without keys loads nothing, runs no iteration, and stores log-sums of -inf alone.
    asked = in_rows if layer.walks else in_rows & some
    rows = queries.tensor + places.token.to(tl.int64) * queries.stride
    rows += places.head * queries.head_stride
    query = _rows(rows, places.token, asked, cache.new, layer)

    scores = scaling, cap
    softmax = no_softmax(layer)
    before_first, num_parts = _own_parts(span, owner, in_rows, layer)
    for nth in range(0, num_parts):
        part = span
        is_own = in_rows
        if layer.walks:
            part = part_of(span, slots, before_first + nth, nth > 0, first_key, layer)
            is_own = (owner == before_first + nth) | (nth == 0)
        last_seen = part.start + column
        last = last_seen
        end = part.end
        if cache.new is not None:
            last = own_start - is_new.to(tl.int32)
            end = _cached_end(part, last, in_rows & is_own & (is_new | part.is_tail))
        if layer.walks:
            last = tl.where(is_own, last, -1)
        softmax = _attend_part(
            query, cache, part, end, (first_seen, last, first_key + sink), scores, softmax, layer
        )
        if cache.new is not None:
            last_seen = tl.where(is_own, last_seen, -1)
            if part.is_first_of_tail:
                seen = first_seen, last, last_seen, first_key, first_key + sink
                softmax = _attend_new(query, cache, span, part, seen, scores, softmax, layer)
    if layer.walks:  # anew, or they would hold registers all along: the offset is 0
        places, in_rows = own_rows(span, layer, tl.minimum(num_parts, 0))
    store(partial, span, places.token, places.head, softmax, in_rows, layer)
    if partial.arrivals is not None:
        join_last(partial, span, grid, layer)


@triton.jit
def _own_parts(span, owner, in_rows, layer):
    """Return the particle before the first whose tail a program walks, and its number of parts.

    These are a prefix's span, then the tails of the particles that have a row here.
    """
    before_first = 0
    num_parts = 1
    if layer.walks:
        before_first = tl.min(owner, 0) - 1
        last = tl.max(tl.where(in_rows, owner, 0), 0)
        num_parts = tl.where(span.is_last_of_prefix, last - before_first + 1, 1)
    return before_first, num_parts


@triton.jit
def _attend_part(query, cache, part, end, seen, scores, softmax, layer):
    """Return the softmax of a block of rows, with the keys of one span.

    Args:
        seen: of each row the first position it attends to, and the last one; and the end of those
            that all attend to.
    """
    first_seen, last_seen, sink_end = seen
    dim = tl.arange(0, layer.block_dim)[None, :]
    keys = cache.key + part.head * cache.key_head_stride + dim
    values = cache.value + part.head * cache.value_head_stride + dim
    for first in range(part.begin, end, layer.block_keys):
        position = first + tl.arange(0, layer.block_keys)
        if layer.has_window:
            position -= tl.where(position < part.jump, part.jumped, 0)
        slot = slots_of(part, position)
        loaded = ((slot > 0) & (position < end))[:, None] & (dim < layer.head_dim)
        key = tl.load(keys + slot[:, None] * cache.key_stride, mask=loaded, other=0.0)
        value = tl.load(values + slot[:, None] * cache.value_stride, mask=loaded, other=0.0)
        is_seen = (position < end)[None, :] & (position[None, :] <= last_seen[:, None])
        if layer.has_window:
            in_window = position[None, :] >= first_seen[:, None]
            is_seen &= in_window | (position < sink_end)[None, :]
        softmax = _attend(query, (key, value), is_seen, scores, softmax, layer)
    return softmax


@triton.jit
def _attend_new(query, cache, span, part, seen, scores, softmax, layer):
    """Return the softmax of a block of rows, with the new keys of a particle.

    They are written by the block that has the particle's first row.

    Args:
        span: of the program.
        part: the particle's tail.
        seen: of each row the first position it attends to, the last one before the new keys, and
            its own; the first position with a key; and the end of those that all attend to.
    """
    first_seen, last_cached, last_seen, first_key, sink_end = seen
    dim = tl.arange(0, layer.block_dim)[None, :]
    keys = cache.key + part.head * cache.key_head_stride + dim
    values = cache.value + part.head * cache.value_head_stride + dim
    position, slot, key, value = _new_keys(cache.new, part, layer)
    first_row = (part.first_token - span.first_token) * layer.group
    is_first = first_row >= span.block * layer.block_rows
    written = ((slot > 0) & is_first)[:, None] & (dim < layer.head_dim)
    tl.store(keys + slot[:, None] * cache.key_stride, key, mask=written)
    tl.store(values + slot[:, None] * cache.value_stride, value, mask=written)
    value = tl.where((position >= first_key)[:, None], value, 0.0)  # there may be NaN
    is_seen = (position >= first_key)[None, :] & (position[None, :] > last_cached[:, None])
    is_seen &= position[None, :] <= last_seen[:, None]
    if layer.has_window:
        in_window = position[None, :] >= first_seen[:, None]
        is_seen &= in_window | (position < sink_end)[None, :]
    return _attend(query, (key, value), is_seen, scores, softmax, layer)


@triton.jit
def _attend(query, keys, seen, scores, softmax, layer):
    """Return the softmax of a block of rows, with one more block of keys and values."""
    key, value = keys
    scaling, cap = scores
    highest, total, output = softmax
    products = tl.dot(query, tl.trans(key).to(query.dtype), input_precision="tf32x3") * scaling
    if layer.has_cap:  # cap * tanh(score), in a form that does not overflow
        products = cap - 2 * cap / (1 + tl.exp(2 * products))
    products = tl.where(seen, products, float("-inf"))
    weights, decay, highest, total = add_scores(products, highest, total)
    output = output * decay[:, None] + tl.dot(
        weights.to(query.dtype), value.to(query.dtype), input_precision="tf32x3"
    )
    return highest, total, output


@triton.jit
def _is_new(new, owner, in_rows, layer):
    """Return of each row whether its particle's first token is to be written."""
    return tl.load(new.slots + owner * num_columns(layer), mask=in_rows, other=0) != 0


@triton.jit
def _cached_end(part, last, rows):
    """Return where the cached keys of a part end, for some rows.

    A key that is written now is not to be loaded: it may be NaN yet, and NaN times a weight of 0 is
    NaN. So a prefix ends where the particles' new keys begin, idle ones aside.

    Args:
        last: of each row, the last position before its new keys.
        rows: those to go by.
    """
    end = tl.max(tl.where(rows, last, -2), 0) + 1
    return tl.where(end >= 0, tl.minimum(end, part.end), part.end)


@triton.jit
def _new_keys(new, span, layer):
    """Return the positions, slots, rotated keys and values of a particle's new tokens."""
    column = tl.arange(0, layer.block_columns)
    dim = tl.arange(0, layer.block_dim)[None, :]
    token = span.first_token + column
    slot = tl.load(new.slots + token, mask=column < num_columns(layer), other=0)
    place = token.to(tl.int64) * new.key_stride + span.head * layer.head_dim
    key = _rows(new.key + place, token, slot > 0, new, layer)
    place = token.to(tl.int64) * new.value_stride + span.head * layer.head_dim
    loaded = (slot > 0)[:, None] & (dim < layer.head_dim)
    value = tl.load(new.value + place[:, None] + dim, mask=loaded, other=0.0)
    return span.start + column, slot, key, value


@triton.jit
def _rows(rows, token, asked, new, layer):
    """Return the heads that begin at addresses ``rows``, rotated if ``new`` has the rotation."""
    dim = tl.arange(0, layer.block_dim)[None, :]
    mask = asked[:, None] & (dim < layer.head_dim)
    own = tl.load(rows[:, None] + dim, mask=mask, other=0.0)
    if new is not None:
        half: tl.constexpr = layer.head_dim // 2
        other = tl.load(rows[:, None] + (dim + half) % layer.head_dim, mask=mask, other=0.0)
        position = tl.load(new.positions + token, mask=asked, other=0)
        angle = new.cos_sin + position[:, None] * layer.head_dim + dim % half
        cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(angle + half, mask=mask, other=0.0).to(tl.float32)
        own = (own * cos + other * tl.where(dim < half, -sin, sin)).to(own.dtype)
    return own
