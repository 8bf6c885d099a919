"""Attend over latents (MLA) of particles that share a prefix, in Triton.

`particle_attention` with one key head that all query heads share, and values that are the first
``rank`` numbers of its keys. A block of latents is loaded once and serves as keys and as values.
Spans of keys, their joining and the grid are those of `sglang_smc.kernels.attention.spans`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.spans import (
    LOG2_E,
    Grid,
    KeySlots,
    Layer,
    add_scores,
    attend,
    no_softmax,
    own_rows,
    own_span,
    slots_of,
    store,
)
from sglang_smc.kernels.attention.work import Blocks, Chip, WorkSplit, cut
from sglang_smc.smc.ledger import AttentionContext

BLOCK_KEYS = 32
MAX_ROWS = 64  # of a block of queries
FEW_ROWS = 32  # on a small chip
VALUES_PER_WARP = 64  # numbers of a value per warp of a program; at least 4 warps
MAX_RANK = 512
MAX_ROPE = 64
NUM_STAGES = 2


def latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    context: AttentionContext,
    *,
    rank: int,
    max_prefix: int,
    scaling: float,
) -> torch.Tensor:
    """Compute causal softmax attention of particles over latents; never waits for the device.

    Reference: `sglang_smc.models.softmax.shared_prefix_attention` without values, up to ``rank``;
    arguments as in `particle_attention`. Queries are read in place if their tokens have one stride.

    Raises ValueError for float32, or wider latents than 512 + 64: their blocks do not fit on the
    chip.
    """
    rope = query.shape[4] - rank
    check_sizes(query.dtype, rank, rope)
    max_tail = context.locations.max_tail
    chip = work.chip_of(query.device)
    split = cut_work(query.shape, rank, max_prefix, max_tail, chip)
    block_rope = max(16, triton.next_power_of_2(rope))
    return attend(
        _attend_latents,
        query,
        (latents, latents.stride(0)),
        KeySlots.of(context),
        (scaling * LOG2_E, context.first_key),
        split,
        Layer.of(query, 1, rank, split, rope=rope, block_rope=block_rope),
    )


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


# Arguments that differ from batch to batch are not specialized, as fields of records always are.
@triton.jit(
    do_not_specialize=[
        *("first_key", "num_particles", "all_tokens", "num_prefix"),
        *("prefix_blocks", "prefix_spans", "tail_blocks", "tail_spans", "tail_span"),
    ]
)
def _attend_latents(
    queries,
    latents,
    slots,
    partial,
    layer,
    scaling,
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
    """Compute flash attention of a block of rows over one span of a prefix or a tail."""
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
    span = own_span(slots, layer, 0, first_key, 0, grid)
    places, in_rows = own_rows(span, layer)
    # An empty span loads nothing, runs no iteration, and stores log-sums of -inf alone.
    asked = in_rows & (span.begin < span.end)
    place = places.token.to(tl.int64) * queries.stride + places.head * queries.head_stride
    query = _latents(queries.tensor + place, asked, layer)
    softmax = no_softmax(layer)
    for first in range(span.begin, span.end, layer.block_keys):
        position = first + tl.arange(0, layer.block_keys)
        slot = slots_of(span, position)
        key = _latents(latents[0] + slot * latents[1], slot > 0, layer)
        seen = (position < span.end)[None, :]
        seen &= position[None, :] <= (span.start + places.column)[:, None]
        softmax = _attend(query, key, seen, scaling, softmax)
    store(partial, span, places.token, places.head, softmax, in_rows, layer)


@triton.jit
def _latents(rows, asked, layer):
    """Load vectors that begin at addresses ``rows``: their values, and the rotated rest."""
    dim = tl.arange(0, layer.block_dim)[None, :]
    turned = tl.arange(0, layer.block_rope)[None, :]
    own = rows[:, None]
    latent = tl.load(own + dim, mask=asked[:, None] & (dim < layer.head_dim), other=0.0)
    in_rope = asked[:, None] & (turned < layer.rope)
    return latent, tl.load(own + layer.head_dim + turned, mask=in_rope, other=0.0)


@triton.jit
def _attend(query, key, seen, scaling, softmax):
    """Return the softmax of a block of rows, with one more block of latents."""
    latent, rotated = query
    key_latent, key_rotated = key
    highest, total, output = softmax
    value = key_latent.to(latent.dtype)
    scores = tl.dot(latent, tl.trans(value))
    scores = tl.dot(rotated, tl.trans(key_rotated.to(latent.dtype)), scores) * scaling
    scores = tl.where(seen, scores, float("-inf"))
    weights, decay, highest, total = add_scores(scores, highest, total)
    output = tl.dot(weights.to(latent.dtype), value, output * decay[:, None])
    return highest, total, output
