"""Split attention into programs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton


class Blocks(NamedTuple):
    """The tile sizes of one program, and its launch parameters."""

    keys: int
    most_rows: int  # of queries
    num_warps: int
    # Slots are loaded before their keys. With fewer stages the pipeline loads a block's keys only
    # after the block before it is done; with five they are in flight by then.
    num_stages: int


class Chip(NamedTuple):
    """The resources of a device."""

    multiprocessors: int
    shared: int  # bytes of shared memory available to one program
    overlaps: bool = False  # whether a launch may begin before the one ahead of it ends

    @property
    def is_small(self) -> bool:
        """Return whether shared memory is less than an A100's: 99 KiB on sm_86, 89, 120 and 121."""
        return self.shared < A100.shared

    def resident_programs(self, most_each: int) -> int:
        """Return how many programs run at a time, ``most_each`` per multiprocessor of 228 KiB.

        With less shared memory, on the A100 also, a multiprocessor runs one. Ranks with different
        GPUs may split spans differently: each has its own heads, and an all-reduce gives all the
        same sum.
        """
        return self.multiprocessors * (most_each if self.shared >= H100.shared else 1)


A100 = Chip(108, 163 << 10)
H100 = Chip(132, 227 << 10, overlaps=True)


@cache
def chip_of(device: torch.device) -> Chip:
    """Return the resources of a GPU; those of an H100 where Triton is interpreted, in order."""
    if device.type != "cuda":
        return H100._replace(overlaps=False)
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_block_optin
    return Chip(found.multi_processor_count, shared, overlaps=found.major >= 9)


@contextmanager
def in_order() -> Iterator[None]:
    """Have each launch begin when the one before it has ended, as kernels are compiled from now."""
    given = chip_of
    with _chips(lambda device: given(device)._replace(overlaps=False)):
        yield


@contextmanager
def on_chip(chip: Chip) -> Iterator[None]:
    """Split attention, as kernels are compiled from now, for a GPU that need not be there."""
    with _chips(lambda _: chip):
        yield


@contextmanager
def _chips(of: Callable[[torch.device], Chip]) -> Iterator[None]:
    """Have `chip_of` be another function."""
    global chip_of
    given = chip_of
    chip_of = of  # type: ignore[assignment]
    try:
        yield
    finally:
        chip_of = given


# By the bytes of an element.
BLOCKS = {2: Blocks(64, 64, 4, 5), 4: Blocks(32, 32, 8, 5)}
# The same for heads of more than 128 dimensions, to fit on the chip of an A100.
WIDE_BLOCKS = {2: Blocks(32, 32, 8, 3), 4: Blocks(16, 16, 8, 3)}
# The same for more than 64 dimensions on a small chip: one program has a multiprocessor to itself,
# and with eight warps a thread has enough registers.
SMALL_BLOCKS = {2: Blocks(64, 64, 8, 5), 4: Blocks(32, 32, 8, 3)}
SMALL_WIDE_BLOCKS = {2: Blocks(32, 32, 4, 3), 4: Blocks(16, 16, 8, 3)}
NARROW = 128
# Numbers of a block of queries that a program rotates, 32 a thread; any on an H100 and later, whose
# tensor cores read queries from shared memory.
MAX_ROTATED = 4096
MAX_HEAD_DIM = 256
# A program joins a single tile, spans * head_dim: at most 32 numbers a thread.
MAX_SPANS = 32
MAX_TAIL_SPANS = 8
TAIL_SPAN = 512  # keys of a tail that one program reads, or a multiple where a tail may be longer
# Where programs walk tails, too: the share of waves below which prefixes are split. Then there are
# less than 4 / 3 times as many blocks of rows as programs run at a time; each has a counter.
FULL = 2 / 3
MOST_WALKING = 512
# Tails that a program walks which rotates new keys, in turn: a draft's token has few rows, and few
# partial results.
MOST_WALKED = 2
# Keys of a span of theirs at least. Its partial results take the time of about as many.
LEAST_SPAN = 512


class WorkSplit(NamedTuple):
    """The split of the work into programs; it follows from shapes and bounds alone."""

    block_rows: int  # query rows of a program
    block_keys: int  # keys of one iteration
    num_warps: int
    num_stages: int
    prefix_blocks: int  # blocks of query rows that share a prefix
    prefix_spans: int
    tail_blocks: int  # blocks of query rows of one particle
    tail_spans: int
    tail_span: int  # keys of each

    @property
    def walks(self) -> bool:
        """Return whether programs of prefixes walk the tails of their rows, too."""
        return self.tail_spans == 0


@lru_cache
def cut_work(
    shape: torch.Size,
    kv_heads: int,
    element_size: int,
    max_prefix: int,
    max_tail: int,
    chip: Chip,
    rotates: bool = False,
) -> WorkSplit:
    """Split the work for queries ``[G, N, C, q_heads, head_dim]`` of ``element_size`` bytes.

    Where each multiprocessor has a block of rows, its program walks tails, too. Partial results of
    four spans would take as many bytes as a prefix of 2,300 tokens: 8 particles of 9 columns.
    Unless they nearly fill their last wave, prefixes are split: a long one has several spans then.

    Args:
        rotates: whether programs rotate them and write new keys.
    """
    blocks = _blocks(shape[4], chip)[element_size]
    if rotates and chip.shared < H100.shared:
        most = MAX_ROTATED // triton.next_power_of_2(shape[4])
        blocks = blocks._replace(most_rows=min(blocks.most_rows, most))
    resident = chip.resident_programs(2)
    split = cut(shape, kv_heads, blocks, max_prefix, max_tail, resident)
    programs = shape[0] * kv_heads * split.prefix_blocks
    spills = shape[4] > NARROW and element_size > 2
    rows = shape[2] * shape[3] // kv_heads  # of a particle
    walks_many = rotates and min(shape[1], split.block_rows // rows) > MOST_WALKED
    if walks_many or spills or split.tail_spans > 1 or programs < chip.multiprocessors:
        return split
    # Where a program has a multiprocessor to itself: with four warps the A100 spills registers.
    num_warps = split.num_warps if chip.shared >= H100.shared else 8
    prefix_spans = 1
    if _filled(programs / resident) < FULL:
        prefix_spans = min(split.prefix_spans, triton.cdiv(max_prefix, LEAST_SPAN))
    return split._replace(num_warps=num_warps, prefix_spans=prefix_spans, tail_spans=0)


def can_rotate(num_rows: int, head_dim: int, chip: Chip) -> bool:
    """Return whether programs can rotate a particle's query rows in blocks as large as otherwise.

    Smaller ones read a prefix more often, which costs more than two launches.
    """
    block = num_rows * triton.next_power_of_2(head_dim)
    return chip.shared >= H100.shared or block <= MAX_ROTATED


def _blocks(head_dim: int, chip: Chip) -> dict[int, Blocks]:
    if head_dim > NARROW:
        return SMALL_WIDE_BLOCKS if chip.is_small else WIDE_BLOCKS
    return SMALL_BLOCKS if chip.is_small and head_dim > NARROW // 2 else BLOCKS


def cut(
    shape: torch.Size, kv_heads: int, blocks: Blocks, max_prefix: int, max_tail: int, resident: int
) -> WorkSplit:
    """Split the work for queries ``[G, N, C, q_heads, ...]`` into programs of given blocks.

    A prefix is split into as few spans as keep the device busy, no shorter than a block of keys,
    and never into more than can be joined at once: `MAX_SPANS`, those of a tail included.

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
    """Return the smallest number of spans, at most ``most``, with nearly full waves.

    Each span has ``programs`` programs of equal work. They run in waves, and a partial wave takes
    as long as a full one. Nearly full is 85 % of the best fill; FlashAttention chooses its splits
    by the same rule.
    """
    shares = [_filled(spans * programs / resident) for spans in range(1, most + 1)]
    return 1 + next(i for i, share in enumerate(shares) if share >= 0.85 * max(shares))


def _filled(waves: float) -> float:
    """Return the share of waves of programs that is filled."""
    return waves / math.ceil(waves)
