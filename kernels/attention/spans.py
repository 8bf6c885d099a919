"""Attend over spans of keys, and join their softmaxes: the parts that all attention shares.

Flash decoding in one launch over *spans* of keys, and a second one that joins their softmaxes,
unless the last program of a request and key head does (`join_last`):

- A prefix is split into a number of spans that depends on shapes alone. Its queries are all of a
  request's: N particles * C columns * the query heads of one key head, in blocks of rows.
- A particle's tail is split into spans of one length, as many as the longest tail may have. Its
  queries are its own C * group.

Or else (`WorkSplit.walks`) the program of a prefix's end also walks the tails of its rows. A prefix
of few keys is one span then, without partial results.

A layer with a sliding window reads the end of a prefix alone, as far as its earliest query attends,
and a head no keys before its first: spans are split from the rest. Programs without keys or queries
return at once. The grid follows from shapes and bounds on the host, so that a CUDA graph can
capture it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.attention.work import LEAST_SPAN, MAX_SPANS, WorkSplit
from sglang_smc.kernels.tensors import as_float
from sglang_smc.smc.ledger import AttentionContext

MOST_FIXED = 1  # columns for which a kernel is compiled: nearly all drafts have one
LOG2_E = 1.4426950408889634
NUMBERS_PER_WARP = 1024  # of the tile that a program joins: 32 a thread
_LEAST_SPAN = tl.constexpr(LEAST_SPAN)


class KeySlots(NamedTuple):
    """The slots of prefixes and tails, and the positions of queries."""

    table: torch.Tensor
    table_stride: int
    tails: torch.Tensor
    tails_width: int
    rows: torch.Tensor
    committed: torch.Tensor
    particle_rows: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, context: AttentionContext) -> "KeySlots":
        """Return the slots of a context, with the tensors of G requests made contiguous."""
        table = context.req_to_token
        tails = context.tails
        locations = context.locations
        return cls(
            table=table,
            table_stride=table.stride(0),
            tails=tails,
            tails_width=tails.shape[1],
            rows=locations.rows.contiguous(),
            committed=locations.committed.contiguous(),
            particle_rows=locations.particle_rows.contiguous(),
            starts=context.starts.contiguous(),
        )


class Queries(NamedTuple):
    """Queries ``[G * N * C, q_heads, width]``, in place."""

    tensor: torch.Tensor
    stride: int
    head_stride: int


class Partial(NamedTuple):
    """The results of each span, of all tokens, in this order; and what joins them, see `attend`.

    No tuple in here may be None, nor hold None: Triton 3.6 compares none such with None.
    """

    # [spans, tokens, q_heads, head_dim] float32; None: there is one span
    output: torch.Tensor | None
    log_sums: torch.Tensor | None  # [spans, tokens, q_heads] float32 log-sum-exp to base 2
    joined: torch.Tensor  # [tokens, q_heads, head_dim]
    value_scale: float
    sinks: torch.Tensor | None
    arrivals: torch.Tensor | None = None  # None: `join_spans` joins


class Layer(NamedTuple):
    """Constants that an attention kernel is compiled for."""

    fixed_columns: Any  # tokens of a particle; 0: `columns`
    kv_heads: Any
    group: Any  # query heads of a key head
    head_dim: Any  # of values
    block_dim: Any
    block_rows: Any
    block_keys: Any
    block_columns: Any
    most_spans: Any
    rope: Any = 0  # numbers of a latent behind its value
    block_rope: Any = 0
    has_window: Any = False
    has_cap: Any = False
    sees_block: Any = False
    walks: Any = False  # as in `WorkSplit`
    overlaps: Any = False  # launches, as in `kernels/skinny.py`
    columns: Any = 0  # not constant; see `as_float`

    @classmethod
    def of(
        cls, query: torch.Tensor, kv_heads: int, head_dim: int, split: WorkSplit, **more: Any
    ) -> "Layer":
        """Return the constants for queries ``[G, N, C, q_heads, ...]``."""
        num_columns, q_heads = query.shape[2:4]
        found = cls(
            fixed_columns=num_columns if num_columns <= MOST_FIXED else 0,
            kv_heads=kv_heads,
            group=q_heads // kv_heads,
            head_dim=head_dim,
            block_dim=max(16, triton.next_power_of_2(head_dim)),
            block_rows=split.block_rows,
            block_keys=split.block_keys,
            block_columns=max(16, triton.next_power_of_2(num_columns)),
            most_spans=MAX_SPANS,
            walks=split.walks,
            **more,
        )
        return cls(*map(tl.constexpr, found))._replace(columns=as_float(num_columns))


class Grid(NamedTuple):
    """The programs of a launch, and of what each is one, as in `WorkSplit`."""

    num_particles: int
    all_tokens: int
    num_prefix: int  # programs of prefixes; those of tails follow
    prefix_blocks: int
    prefix_spans: int
    tail_blocks: int
    tail_spans: int
    tail_span: int


class _Program(NamedTuple):
    """The place of a program in the grid."""

    is_tail: bool
    block: int
    owner: int  # of the span: a particle's tail, or a request's prefix
    head: int  # of keys
    span: int


class _Span(NamedTuple):
    """The work of one program: a block of query rows (token, head) over one span of keys."""

    is_tail: bool
    is_first_of_tail: bool
    is_last_of_prefix: bool  # whose program walks tails, if any walks
    is_whole_prefix: bool  # one span has all keys, or there is none
    block: int
    head: int  # of keys
    slots: torch.Tensor  # of the span's positions, modulo `mask` + 1
    mask: int
    start: int  # the position of the first query
    begin: int  # the first key
    end: int
    jump: int  # keys before this one are as many as `jumped` earlier: the first of the text
    jumped: int
    first_particle: int
    first_token: int
    num_tokens: int
    place: int  # of the first partial result


class _Places(NamedTuple):
    """Where query rows of a program are, each ``[block_rows]``."""

    particle: torch.Tensor  # of all G * N
    token: torch.Tensor  # of all G * N * C
    column: torch.Tensor  # of its particle
    head: torch.Tensor  # of queries


def attend(
    kernel: Any,
    query: torch.Tensor,
    keys: Any,
    slots: KeySlots,
    scores: tuple[float, ...],
    split: WorkSplit,
    layer: Layer,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch a kernel over all spans, and join them.

    Args:
        kernel: of one program.
        query: ``[G, N, C, q_heads, width]``.
        keys: the kernel's own.
        slots: of the keys.
        scores: the kernel's numbers for scores.
        split: of the work.
        layer: the kernel's constants.
        sinks: ``[q_heads]`` scores of a key without a value.
        value_scale: factor of the output.
        arrivals: int32 zeros, kept from launch to launch, at least one for each request, key head
            and block of a prefix: with it one launch does both, where programs walk, or one block
            has all rows of a request and key head.

    Returns:
        ``[G, N, C, q_heads, head_dim]``, contiguous.
    """
    size, num_particles, num_columns, q_heads, _ = query.shape
    kv_heads = layer.kv_heads.value
    head_dim = layer.head_dim.value
    num_prefix = size * kv_heads * split.prefix_blocks * split.prefix_spans
    num_tail = size * num_particles * kv_heads * split.tail_blocks * split.tail_spans
    # Every query has a partial result from each span.
    tokens = size * num_particles * num_columns
    num_spans = split.prefix_spans + split.tail_spans
    shape = num_spans, tokens, q_heads
    has_parts = num_spans > 1
    partial = Partial(
        query.new_empty(*shape, head_dim, dtype=torch.float32) if has_parts else None,
        query.new_empty(*shape, dtype=torch.float32) if has_parts else None,
        query.new_empty(*query.shape[:-1], head_dim),
        value_scale,
        sinks,
    )
    if has_parts and (split.walks or split.prefix_blocks == 1) and arrivals is not None:
        assert len(arrivals) >= size * kv_heads * split.prefix_blocks, "one for each that is joined"
        partial = partial._replace(arrivals=arrivals)
    queries = query.flatten(0, 2)
    kernel[(num_prefix + num_tail,)](
        Queries(queries, queries.stride(0), queries.stride(1)),
        keys,
        slots,
        partial,
        layer,
        *scores,
        num_particles=num_particles,
        all_tokens=tokens,
        num_prefix=num_prefix,
        prefix_blocks=split.prefix_blocks,
        prefix_spans=split.prefix_spans,
        tail_blocks=split.tail_blocks,
        tail_spans=split.tail_spans,
        tail_span=split.tail_span,
        num_warps=split.num_warps,
        num_stages=split.num_stages,
        **({"launch_pdl": True} if layer.overlaps.value else {}),
    )
    if partial.output is not None and partial.arrivals is None:
        join_spans(partial)
    return partial.joined


@triton.jit
def num_columns(layer):
    """Return the tokens of a particle: a constant where each has one."""
    if layer.fixed_columns == 0:
        return tl.cast(layer.columns, tl.int32)
    return layer.fixed_columns


@triton.jit
def own_span(slots, layer, window, first_key, sink, grid):
    """Return this program's work, a `_Span`.

    The first span of a prefix begins with the ``sink`` keys from ``first_key`` on, where its window
    leaves them out.
    """
    program = _own_program(layer, grid)
    is_tail = program.is_tail
    owner = program.owner
    request = owner // tl.where(is_tail, grid.num_particles, 1)
    committed = tl.load(slots.committed + request).to(tl.int32)
    own_tail, start, tail_end = _tail_of(slots, owner, committed, is_tail, layer)
    shared_row = tl.load(slots.rows + owner, mask=is_tail == 0, other=0)
    prefix = slots.table + shared_row * slots.table_stride
    first = first_key
    if layer.has_window:  # the first key of the earliest possible query, at the prefix's end
        first = tl.maximum(committed - 1 - window, first_key)
    # The spans of a prefix have equal numbers of whole blocks of keys.
    left = tl.maximum(committed - first, 0)
    even = tl.cdiv(left, layer.block_keys * grid.prefix_spans) * layer.block_keys
    last_span = 0
    if layer.walks:
        even = tl.maximum(even, _LEAST_SPAN)
        last_span = tl.maximum(tl.cdiv(left, even) - 1, 0)
    length = tl.where(is_tail, grid.tail_span, even)
    begin = tl.where(is_tail, tl.maximum(committed, first_key), first) + program.span * length
    end = tl.where(is_tail, tail_end, committed)
    last = tl.minimum(begin + length, end)
    jump = begin
    if layer.has_window:
        is_first = (is_tail == 0) & (program.span == 0)
        begin -= tl.where(is_first, tl.minimum(first - first_key, sink), 0)
    num_tokens = tl.where(is_tail, 1, grid.num_particles) * num_columns(layer)
    first_particle = owner * tl.where(is_tail, 1, grid.num_particles)
    first_token = first_particle * num_columns(layer)
    if layer.walks:  # beside a span that is the whole prefix there is nothing to do
        num_tokens = tl.where((last_span == 0) & (program.span > 0), 0, num_tokens)
    partial_span = program.span + tl.where(is_tail, grid.prefix_spans, 0)
    return _Span(
        is_tail=is_tail,
        is_first_of_tail=is_tail & (program.span == 0),
        is_last_of_prefix=program.span == last_span,
        is_whole_prefix=last_span == 0,
        block=program.block,
        head=program.head,
        slots=tl.where(is_tail, own_tail, prefix),
        # A tail's row is a ring buffer.
        mask=tl.where(is_tail, slots.tails_width - 1, 0x7FFFFFFF),
        start=start,
        begin=begin,
        end=last,
        jump=jump,
        jumped=begin - first_key,
        first_particle=first_particle,
        first_token=first_token,
        num_tokens=num_tokens,
        place=partial_span.to(tl.int64) * grid.all_tokens * (layer.kv_heads * layer.group),
    )


@triton.jit
def _own_program(layer, grid):
    """Return this program's place, a `_Program`.

    The innermost index runs fastest: blocks of rows that read the same keys run concurrently, and
    so do requests with one prefix, whose keys then leave memory once for all.
    """
    program = tl.program_id(0)
    is_tail = program >= grid.num_prefix
    rest = program - tl.where(is_tail, grid.num_prefix, 0)
    blocks = tl.where(is_tail, grid.tail_blocks, grid.prefix_blocks)
    block = rest % blocks
    rest = rest // blocks
    owners = grid.all_tokens // (num_columns(layer) * tl.where(is_tail, 1, grid.num_particles))
    owner = rest % owners
    rest = rest // owners
    return _Program(
        is_tail=is_tail,
        block=block,
        owner=owner,
        head=rest % layer.kv_heads,
        span=rest // layer.kv_heads,
    )


@triton.jit
def part_of(span, slots, particle, is_tail, first_key, layer):
    """Return the span of a whole prefix, or one of all of a particle's tail for the same rows."""
    tail, start, end = _tail_of(slots, particle, span.end, is_tail, layer)
    return _Span(
        is_tail=is_tail,
        is_first_of_tail=is_tail,
        is_last_of_prefix=span.is_last_of_prefix,
        is_whole_prefix=span.is_whole_prefix,
        block=span.block,
        head=span.head,
        slots=tl.where(is_tail, tail, span.slots),
        mask=tl.where(is_tail, slots.tails_width - 1, span.mask),
        start=start,
        begin=tl.where(is_tail, tl.maximum(span.end, first_key), span.begin),
        end=tl.where(is_tail, end, span.end),
        jump=tl.where(is_tail, 0, span.jump),
        jumped=span.jumped,
        first_particle=tl.where(is_tail, particle, span.first_particle),
        first_token=tl.where(is_tail, particle * num_columns(layer), span.first_token),
        num_tokens=span.num_tokens,
        place=span.place,
    )


@triton.jit
def _tail_of(slots, particle, committed, is_one, layer):
    """Return the row of a tail, its first query's position, and its end; else one behind all."""
    # Every query attends to all of a prefix.
    start = tl.load(slots.starts + particle, mask=is_one, other=1 << 30).to(tl.int32)
    row = tl.load(slots.particle_rows + particle, mask=is_one, other=0)
    tail = slots.tails + row * slots.tails_width
    end = start + num_columns(layer)
    if layer.sees_block:  # without the padding of a request with fewer columns than others
        columns = tl.where(is_one, num_columns(layer), 0)
        end -= _padding(tail, slots.tails_width - 1, start, committed, columns, layer)
    return tail, start, end


@triton.jit
def _padding(tail, mask, start, committed, columns, layer):
    """Return how many columns of a tail have no slot; those before a tail are in the prefix."""
    column = tl.arange(0, layer.block_columns)
    own = (column < columns) & (start + column >= committed)
    slot = tl.load(tail + ((start + column) & mask), mask=own, other=1)
    return tl.sum((slot == 0).to(tl.int32), 0)


@triton.jit
def own_rows(span, layer, offset=0):
    """Return where a program's rows are, a `_Places`, and which rows there are."""
    # Unsigned, since division takes fewer instructions and registers then.
    row = (span.block * layer.block_rows + offset + tl.arange(0, layer.block_rows)).to(tl.uint32)
    nth_token = row // layer.group
    nth_particle = nth_token // tl.cast(num_columns(layer), tl.uint32)
    column = nth_token.to(tl.int32) - nth_particle.to(tl.int32) * num_columns(layer)
    places = _Places(
        particle=span.first_particle + nth_particle.to(tl.int32),
        token=span.first_token + nth_token.to(tl.int32),
        column=column,
        head=span.head * layer.group + (row % layer.group).to(tl.int32),
    )
    return places, row < span.num_tokens * layer.group


@triton.jit
def slots_of(span, position):
    """Return the slots of some positions, 0 behind the end.

    All requests write to slot 0, which may hold NaN, and NaN times a weight of 0 is NaN: it is not
    to be loaded.
    """
    at = span.slots + (position & span.mask)
    return tl.load(at, mask=position < span.end, other=0).to(tl.int64)


@triton.jit
def no_softmax(layer):
    """Return the softmax of a block of rows without keys: highest score, sum of weights, output."""
    highest = tl.full([layer.block_rows], float("-inf"), tl.float32)
    total = tl.zeros([layer.block_rows], tl.float32)
    output = tl.zeros([layer.block_rows, layer.block_dim], tl.float32)
    return highest, total, output


@triton.jit
def add_scores(scores, highest, total):
    """Return weights of a block of scores, the factor of earlier ones, and the new softmax."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # For a row without keys so far: -inf - 0, not -inf - -inf.
    reference = tl.where(new_highest > float("-inf"), new_highest, 0.0)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(highest - reference)
    return weights, decay, new_highest, total * decay + tl.sum(weights, 1)


@triton.jit
def store(partial, span, token, head, softmax, in_rows, layer):
    """Store a program's softmax, of `add_scores`; of rows without keys log-sums of -inf alone."""
    place = token * (layer.kv_heads * layer.group) + head
    if partial.output is None:
        _store_joined(partial, place, softmax, in_rows, layer)
    else:
        is_part = in_rows
        if layer.walks:
            is_part = in_rows & (span.is_whole_prefix == 0)
            _store_joined(partial, place, softmax, in_rows & span.is_whole_prefix, layer)
        own = span.place + token * (layer.kv_heads * layer.group) + head
        _store_part(partial, own, softmax, is_part, layer)


@triton.jit
def _store_part(partial, place, softmax, in_rows, layer):
    """Store the softmax of a block of query rows over some of their keys."""
    highest, total, output = softmax
    dim = tl.arange(0, layer.block_dim)
    some = total != 0  # true for NaN, so that NaN propagates
    log_sum = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(partial.log_sums + place, log_sum, mask=in_rows)
    tl.store(
        partial.output + place[:, None] * layer.head_dim + dim[None, :],
        output / tl.where(some, total, 1.0)[:, None],
        mask=(in_rows & some)[:, None] & (dim < layer.head_dim)[None, :],
    )


@triton.jit
def _store_joined(partial, place, softmax, in_rows, layer):
    """Store the output of a block of query rows, whose softmax has all keys but the sink."""
    highest, total, output = softmax
    dim = tl.arange(0, layer.block_dim)[None, :]
    if partial.sinks is not None:
        sink_of = place % (layer.kv_heads * layer.group)
        sink = tl.load(partial.sinks + sink_of, mask=in_rows, other=0.0).to(tl.float32)
        reference = tl.where(highest > float("-inf"), highest, 0.0)
        total += tl.exp2(sink * 1.4426950408889634 - reference)  # log2 e
    output *= partial.value_scale / tl.where(total != 0, total, 1.0)[:, None]
    own = partial.joined + place[:, None] * layer.head_dim + dim
    tl.store(own, output, mask=in_rows[:, None] & (dim < layer.head_dim))


@triton.jit
def join_last(partial, span, grid, layer):
    """Join the spans of a request and key head, if all other programs of them have stored theirs.

    Where programs walk, those of a block of rows. In order of the spans, whichever program is the
    last. The barrier and the counter order their stores before its loads. The counter is left at 0
    for the next launch.
    """
    num_tokens = grid.num_particles * num_columns(layer)
    request = span.first_token // num_tokens
    block = span.block if layer.walks else 0  # of tails there are several, of all rows one
    counter = (request * layer.kv_heads + span.head) * grid.prefix_blocks + block
    counter = partial.arrivals + counter
    num_tails = grid.num_particles * grid.tail_blocks * grid.tail_spans
    last = grid.prefix_spans + num_tails - 1
    is_part = (span.is_whole_prefix == 0) | (num_tails > 0)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, mask=is_part, sem="acq_rel")
    if is_part & (arrived == last):
        tl.store(counter, 0)
        row = block * layer.block_rows + tl.arange(0, layer.block_rows)
        token = request * num_tokens + row // layer.group
        head = row % layer.group
        in_rows = row < num_tokens * layer.group
        place = token * (layer.kv_heads * layer.group) + span.head * layer.group + head
        step = grid.all_tokens.to(tl.int64) * (layer.kv_heads * layer.group)
        _join_rows(partial, place, step, grid, in_rows, layer)


@triton.jit
def _join_rows(partial, place, step, grid, in_rows, layer):
    """Join the spans of a block of query rows; see `_join_spans`.

    Args:
        place: of the rows in a span's results.
        step: from span to span.
    """
    nth = tl.arange(0, layer.most_spans)
    dim = tl.arange(0, layer.block_dim)[None, :]
    known = (nth < grid.prefix_spans + grid.tail_spans)[:, None] & in_rows[None, :]
    log_sums = place[None, :] + nth[:, None] * step
    log_sums = tl.load(partial.log_sums + log_sums, mask=known, other=float("-inf"))
    highest = tl.max(log_sums, 0)
    highest = tl.where(highest > float("-inf"), highest, 0.0)
    total = tl.sum(tl.exp2(log_sums - highest[None, :]), 0)
    output = tl.zeros([layer.block_rows, layer.block_dim], tl.float32)
    # The first spans of a prefix have keys. Several loads are to be on their way at once; where
    # programs walk, one takes a thread 64 registers.
    at_once: tl.constexpr = 1 if layer.walks else 4
    some = (tl.max(log_sums, 1) > float("-inf")) & (nth < grid.prefix_spans)
    used = tl.max(tl.where(some, nth + 1, 0), 0)
    for one in tl.range(0, used + grid.tail_spans, loop_unroll_factor=at_once):
        at = place + tl.where(one < used, one, one - used + grid.prefix_spans) * step
        log_sum = tl.load(partial.log_sums + at, mask=in_rows, other=float("-inf"))
        weight = tl.exp2(log_sum - highest)[:, None]
        part = partial.output + at[:, None] * layer.head_dim + dim
        output += weight * tl.load(part, mask=(weight != 0) & (dim < layer.head_dim), other=0.0)
    _store_joined(partial, place, (highest, total, output), in_rows, layer)


def join_spans(partial: Partial) -> None:
    """Write the joined attention of all spans, in one launch; see `attend`."""
    assert partial.output is not None, "there are spans"
    spans, tokens, q_heads, head_dim = partial.output.shape
    assert spans <= MAX_SPANS, "one program joins all"
    block_dim = triton.next_power_of_2(head_dim)
    block_spans = triton.next_power_of_2(spans)
    _join_spans[(tokens * q_heads,)](
        partial,
        tokens * q_heads,
        spans,
        q_heads=q_heads,
        head_dim=head_dim,
        block_dim=block_dim,
        block_spans=block_spans,
        num_warps=triton.cdiv(block_spans * block_dim, NUMBERS_PER_WARP),
    )


@triton.jit(do_not_specialize=["num_rows", "spans"])
def _join_spans(
    partial,
    num_rows,
    spans,
    q_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_spans: tl.constexpr,
):
    """Join the spans of one query row per program: [spans, rows, head_dim] to [rows, head_dim].

    It waits for memory twice, for any number of spans: for the log-sums, then for all results of
    nonzero weight. The others need not have been written.
    """
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, block_spans)
    dim = tl.arange(0, block_dim)
    place = span.to(tl.int64) * num_rows + row
    log_sum = tl.load(partial.log_sums + place, mask=span < spans, other=float("-inf"))
    highest = tl.max(log_sum, 0)
    if partial.sinks is not None:
        sink = tl.load(partial.sinks + row % q_heads).to(tl.float32) * 1.4426950408889634  # log2 e
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(log_sum - tl.where(highest > float("-inf"), highest, 0.0))
    part = tl.load(
        partial.output + place[:, None] * head_dim + dim[None, :],
        mask=(weight != 0)[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)  # 0 for a padding request without keys
    if partial.sinks is not None:
        total += tl.exp2(sink - highest)
    joined = tl.sum(part * weight[:, None], 0) / tl.where(total != 0, total, 1.0)
    joined *= partial.value_scale
    tl.store(partial.joined + row * head_dim + dim, joined, mask=dim < head_dim)
