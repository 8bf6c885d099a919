"""Attend over latents (MLA) of particles, as `sglang_smc.models.latent_attention` does, in Triton.

`particle_attention` with one key head that all query heads share, and values that are the first
``rank`` numbers of its keys. A block of latents is loaded once and serves as keys and as values.
Spans of keys, their joining and the grid are those of
`sglang_smc.kernels.attention.particle_attention`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.join import join_spans
from sglang_smc.kernels.attention.particle_attention import LOG2_E
from sglang_smc.kernels.attention.work import Blocks, Chip, WorkSplit, cut

BLOCK_KEYS = 32
MAX_ROWS, FEW_ROWS = 64, 32  # of a block of queries; the latter on a small chip
VALUES_PER_WARP = 64  # numbers of a value per warp of a program; at least 4 warps
MAX_RANK, MAX_ROPE = 512, 64
NUM_STAGES = 2


def latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    *,
    rank: int,
    req_to_token: torch.Tensor,
    tails: torch.Tensor,
    rows: torch.Tensor,
    committed: torch.Tensor,
    particle_rows: torch.Tensor,
    starts: torch.Tensor,
    max_prefix: int,
    max_tail: int,
    scaling: float,
) -> torch.Tensor:
    """Compute causal softmax attention of particles over latents; never waits for the device.

    Args:
        query: ``[G, N, C, heads, rank + rope]``. Read in place if its tokens have one stride.
        latents: ``[slots, 1, rank + rope]`` of one layer, the new tokens' included.
        rank: width of the value in a latent.
        req_to_token, tails, rows, committed, particle_rows, starts, max_prefix, max_tail, scaling:
            as in `particle_attention`.

    Returns:
        ``[G, N, C, heads, rank]``, contiguous.

    Raises:
        ValueError: for float32, or wider latents than 512 + 64: their blocks do not fit on the
            chip.
    """
    size, num_particles, num_columns, heads, width = query.shape
    rope = width - rank
    check_sizes(query.dtype, rank, rope)
    split = cut_work(query.shape, rank, max_prefix, max_tail, work.chip_of(query.device))
    num_prefix = size * split.prefix_blocks * split.prefix_spans
    num_tail = size * num_particles * split.tail_blocks * split.tail_spans

    # Every query has a partial result from each span: [spans, G * N * C, heads, ...].
    spans = split.prefix_spans + split.tail_spans
    tokens = size * num_particles * num_columns
    partial = query.new_empty(spans, tokens, heads, rank, dtype=torch.float32)
    log_sums = query.new_empty(spans, tokens, heads, dtype=torch.float32)
    output = query.new_empty(*query.shape[:-1], rank)
    queries = query.flatten(0, 2)  # [G * N * C, heads, rank + rope]
    _attend_latents[(num_prefix + num_tail,)](
        queries,
        latents,
        *(req_to_token, tails),
        *(places.contiguous() for places in (rows, committed, particle_rows, starts)),
        partial,
        log_sums,
        scaling * LOG2_E,
        num_particles,
        tokens,
        num_prefix,
        *split[4:],  # blocks and spans
        *(*queries.stride()[:2], latents.stride(0), req_to_token.stride(0), tails.shape[1]),
        num_columns=num_columns,
        heads=heads,
        rank=rank,
        rope=rope,
        block_rank=max(16, triton.next_power_of_2(rank)),
        block_rope=max(16, triton.next_power_of_2(rope)),
        block_rows=split.block_rows,
        block_keys=split.block_keys,
        num_warps=split.num_warps,
        num_stages=split.num_stages,
    )
    join_spans(partial, log_sums, output)
    return output


def check_sizes(dtype: torch.dtype, rank: int, rope: int) -> None:
    """Raise ValueError if blocks of latents do not fit on the chip; an interpreter has room."""
    if rank > MAX_RANK or rope > MAX_ROPE:
        raise ValueError(
            f"latents of {rank} + {rope} numbers; the Triton kernel takes at most {MAX_RANK} + "
            f"{MAX_ROPE}. Pass --speculative-smc-kernels torch, which takes any and is slower."
        )
    if dtype == torch.float32 and isinstance(_attend_latents, triton.JITFunction):
        raise ValueError(
            "latent attention (MLA) in float32; the Triton kernel takes float16 and bfloat16. Pass "
            "--dtype bfloat16, or --speculative-smc-kernels torch, which is slower."
        )


@lru_cache
def cut_work(shape: torch.Size, rank: int, max_prefix: int, max_tail: int, chip: Chip) -> WorkSplit:
    """Split the work for queries ``[G, N, C, heads, rank + rope]``, as for `particle_attention`.

    A program has a multiprocessor to itself.
    """
    # Eight on a small chip: with four, latents of 256 numbers spill registers on sm_120.
    num_warps = max(8 if chip.is_small else 4, triton.next_power_of_2(rank) // VALUES_PER_WARP)
    rows = FEW_ROWS if chip.is_small else MAX_ROWS
    blocks = Blocks(BLOCK_KEYS, rows, num_warps, NUM_STAGES)
    return cut(shape, 1, blocks, max_prefix, max_tail, chip.resident_programs(1))


# Arguments that differ from batch to batch are not specialized.
@triton.jit(
    do_not_specialize=[
        *("num_particles", "all_tokens", "num_prefix"),
        *("prefix_blocks", "prefix_spans", "tail_blocks", "tail_spans", "tail_span"),
    ]
)
def _attend_latents(
    query_ptr,
    latent_ptr,
    table_ptr,
    tails_ptr,
    rows_ptr,
    committed_ptr,
    particle_rows_ptr,
    starts_ptr,
    partial_ptr,
    log_sum_ptr,
    scaling,
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
    latent_stride,
    table_stride,
    tails_width,
    num_columns: tl.constexpr,
    heads: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    block_rank: tl.constexpr,
    block_rope: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Attend with a block of query rows (token, head) over one span of a prefix or a tail."""
    program = tl.program_id(0)
    is_tail = program >= num_prefix
    # The innermost index runs fastest: blocks of rows that read the same keys run concurrently.
    rest = program - tl.where(is_tail, num_prefix, 0)
    blocks = tl.where(is_tail, tail_blocks, prefix_blocks)
    block, rest = rest % blocks, rest // blocks
    spans = tl.where(is_tail, tail_spans, prefix_spans)
    span, owner = rest % spans, rest // spans  # the owner of a tail is a particle, else a request

    committed = tl.load(committed_ptr + owner // tl.where(is_tail, num_particles, 1)).to(tl.int32)
    # Every query attends to all of a prefix.
    start = tl.load(starts_ptr + owner, mask=is_tail, other=1 << 30).to(tl.int32)
    own_row = tl.load(particle_rows_ptr + owner, mask=is_tail, other=0)
    shared_row = tl.load(rows_ptr + owner, mask=program < num_prefix, other=0)
    # The spans of a prefix have equal numbers of whole blocks of keys.
    even = tl.cdiv(committed, block_keys * prefix_spans) * block_keys
    length = tl.where(is_tail, tail_span, even)
    begin = tl.where(is_tail, committed, 0) + span * length
    end = tl.minimum(begin + length, tl.where(is_tail, start + num_columns, committed))
    num_tokens = tl.where(is_tail, 1, num_particles) * num_columns
    slot_ptr = tl.where(
        is_tail, tails_ptr + own_row * tails_width, table_ptr + shared_row * table_stride
    )
    in_row = tl.where(is_tail, tails_width - 1, 0x7FFFFFFF)  # a tail's row is a ring buffer
    partial_span = span + tl.where(is_tail, prefix_spans, 0)
    _attend_span(
        query_ptr,
        latent_ptr,
        slot_ptr,
        in_row,
        partial_ptr,
        log_sum_ptr,
        scaling,
        start,
        begin,
        end,
        block,
        owner * num_tokens,
        num_tokens,
        partial_span.to(tl.int64) * all_tokens * heads,
        query_stride,
        query_head_stride,
        latent_stride,
        num_columns,
        heads,
        rank,
        rope,
        block_rank,
        block_rope,
        block_rows,
        block_keys,
    )


@triton.jit
def _attend_span(
    query_ptr,
    latent_ptr,
    slot_ptr,
    in_row,
    partial_ptr,
    log_sum_ptr,
    scaling,
    start,
    begin,
    end,
    block,
    first_token,
    num_tokens,
    first_partial,
    query_stride,
    query_head_stride,
    latent_stride,
    num_columns: tl.constexpr,
    heads: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    block_rank: tl.constexpr,
    block_rope: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Compute flash attention of query rows (token, head) over the positions [begin, end)."""
    # Unsigned, since division by other numbers than powers of two takes fewer registers.
    row = (block * block_rows + tl.arange(0, block_rows)).to(tl.uint32)
    nth_token, head = (row // heads).to(tl.int32), (row % heads).to(tl.int32)
    token = first_token + nth_token
    last_seen = start + nth_token % num_columns
    in_rows = row < num_tokens * heads
    dim, turned = tl.arange(0, block_rank), tl.arange(0, block_rope)
    # An empty span loads nothing, runs no iteration, and stores log-sums of -inf alone.
    asked = (in_rows & (begin < end))[:, None]
    query_row = query_ptr + token.to(tl.int64) * query_stride + head * query_head_stride
    query = tl.load(
        query_row[:, None] + dim[None, :], mask=asked & (dim < rank)[None, :], other=0.0
    )
    rotated = tl.load(
        query_row[:, None] + rank + turned[None, :],
        mask=asked & (turned < rope)[None, :],
        other=0.0,
    )

    highest = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    output = tl.zeros([block_rows, block_rank], tl.float32)
    for at in range(begin, end, block_keys):
        position = at + tl.arange(0, block_keys)
        inside = position < end
        slot = tl.load(slot_ptr + (position & in_row), mask=inside, other=0).to(tl.int64)
        # All requests write to slot 0, which may hold NaN, and NaN times a weight of 0 is NaN.
        latent_row = latent_ptr + slot * latent_stride
        loaded = (slot > 0)[:, None]
        latent = tl.load(
            latent_row[:, None] + dim[None, :], mask=loaded & (dim < rank)[None, :], other=0.0
        ).to(query.dtype)
        key = tl.load(
            latent_row[:, None] + rank + turned[None, :],
            mask=loaded & (turned < rope)[None, :],
            other=0.0,
        ).to(query.dtype)
        scores = tl.dot(query, tl.trans(latent))
        scores = tl.dot(rotated, tl.trans(key), scores) * scaling
        seen = inside[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # For a row without keys so far: -inf - 0, not -inf - -inf.
        reference = tl.where(new_highest > float("-inf"), new_highest, 0.0)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(highest - reference)
        total = total * decay + tl.sum(weights, 1)
        output = tl.dot(weights.to(query.dtype), latent, output * decay[:, None])
        highest = new_highest

    some = total != 0  # true for NaN, so that NaN propagates
    log_sum = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    place = first_partial + token * heads + head
    tl.store(log_sum_ptr + place, log_sum, mask=in_rows)
    tl.store(
        partial_ptr + place[:, None] * rank + dim[None, :],
        output / tl.where(some, total, 1.0)[:, None],
        mask=(in_rows & some)[:, None] & (dim < rank)[None, :],
    )
