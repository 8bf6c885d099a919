"""How attention over particles is cut into programs."""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton


class Blocks(NamedTuple):
    """What one program looks at together, and what runs it."""

    keys: int
    most_rows: int  # of queries
    num_warps: int
    # Keys are found by slots that are loaded first. With fewer stages the pipeline asks for a
    # block's keys only after the block before it is done; with five they are under way by then.
    num_stages: int


class Chip(NamedTuple):
    """What a device gives to programs."""

    multiprocessors: int
    shared: int  # bytes of shared memory that one program may take

    @property
    def is_small(self) -> bool:
        """Whether a program gets less than on an A100: 99 KiB on sm_86, 89, 120 and 121."""
        return self.shared < A100.shared

    def resident_programs(self, most_each: int) -> int:
        """How many programs run at a time, ``most_each`` on a multiprocessor of 228 KiB.

        Where there is less, on the A100 also, a multiprocessor runs one. Ranks of unlike GPUs may
        cut unlike spans: each has heads of its own, and an all-reduce gives all of them one sum.
        """
        return self.multiprocessors * (most_each if self.shared >= H100.shared else 1)


A100, H100 = Chip(108, 163 << 10), Chip(132, 227 << 10)


@cache
def chip_of(device: torch.device) -> Chip:
    """What a GPU gives; where there is none, and Triton interprets, what an H100 gives."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.shared_memory_per_block_optin)


# By the bytes of an element.
BLOCKS = {2: Blocks(64, 64, 4, 5), 4: Blocks(32, 32, 8, 5)}
# The same for heads of more than 128 dimensions: what fits on the chip of an A100.
WIDE_BLOCKS = {2: Blocks(32, 32, 8, 3), 4: Blocks(16, 16, 8, 3)}
# The same for more than 64 dimensions where a chip is small: one program has a multiprocessor to
# itself, and eight warps leave a thread registers enough.
SMALL_BLOCKS = {2: Blocks(64, 64, 8, 5), 4: Blocks(32, 32, 8, 3)}
SMALL_WIDE_BLOCKS = {2: Blocks(32, 32, 4, 3), 4: Blocks(16, 16, 8, 3)}
NARROW = 128
MAX_HEAD_DIM = 256
# What one program joins is a single tile, spans * head_dim: 32 numbers a thread at the most.
MAX_SPANS = 32
MAX_TAIL_SPANS = 8
TAIL_SPAN = 512  # keys of a tail that one program reads, or a multiple where a tail may be longer


class WorkSplit(NamedTuple):
    """How the work is cut into programs; follows from shapes and bounds alone."""

    block_rows: int  # query rows of a program
    block_keys: int  # keys that it looks at together
    num_warps: int
    num_stages: int
    prefix_blocks: int  # blocks of query rows that share a prefix
    prefix_spans: int
    tail_blocks: int  # those of one particle
    tail_spans: int
    tail_span: int  # keys of each


@lru_cache
def cut_work(
    shape: torch.Size, kv_heads: int, element_size: int, max_prefix: int, max_tail: int, chip: Chip
) -> WorkSplit:
    """Cut up the work for queries ``[G, N, C, q_heads, head_dim]`` of so many bytes a number."""
    blocks = _blocks(shape[4], chip)[element_size]
    return cut(shape, kv_heads, blocks, max_prefix, max_tail, chip.resident_programs(2))


def _blocks(head_dim: int, chip: Chip) -> dict[int, Blocks]:
    if head_dim > NARROW:
        return SMALL_WIDE_BLOCKS if chip.is_small else WIDE_BLOCKS
    return SMALL_BLOCKS if chip.is_small and head_dim > NARROW // 2 else BLOCKS


def cut(
    shape: torch.Size,
    kv_heads: int,
    blocks: Blocks,
    max_prefix: int,
    max_tail: int,
    resident: int,
) -> WorkSplit:
    """Cut up the work for queries ``[G, N, C, q_heads, ...]`` into programs of such blocks.

    A prefix is cut into as few spans as keep the device busy, no shorter than a block of keys, and
    never into more than can be joined at once: `MAX_SPANS`, those of a tail among them.

    Args:
        resident: programs that run at a time.
    """
    size, num_particles, num_columns, q_heads, _ = shape
    own_rows = num_columns * q_heads // kv_heads
    block_rows = min(blocks.most_rows, max(16, triton.next_power_of_2(num_particles * own_rows)))
    prefix_blocks = triton.cdiv(num_particles * own_rows, block_rows)
    tail_span = TAIL_SPAN * triton.cdiv(max_tail, TAIL_SPAN * MAX_TAIL_SPANS)
    tail_spans = triton.cdiv(max_tail, tail_span)
    most = min(MAX_SPANS - tail_spans, triton.cdiv(max_prefix, blocks.keys))
    return WorkSplit(
        block_rows=block_rows,
        block_keys=blocks.keys,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        prefix_blocks=prefix_blocks,
        prefix_spans=_fewest_spans(size * kv_heads * prefix_blocks, most, resident),
        tail_blocks=triton.cdiv(own_rows, block_rows),
        tail_spans=tail_spans,
        tail_span=tail_span,
    )


def _fewest_spans(programs: int, most: int, resident: int) -> int:
    """The smallest number of spans that is nearly as good as any, ``most`` at most.

    Of each span there are so many ``programs``, all with equal work. They run in waves, and one
    that is not full takes as long as one that is: good are full waves. Nearly as good is 85 % as
    full as can be; FlashAttention chooses its splits by the same rule.
    """
    waves = [spans * programs / resident for spans in range(1, most + 1)]
    shares = [wave / math.ceil(wave) for wave in waves]
    return 1 + next(i for i, share in enumerate(shares) if share >= 0.85 * max(shares))
