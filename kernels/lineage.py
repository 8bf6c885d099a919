"""Manage tails of KV slots: reserve slots for drafts, copy tails to descendants, commit."""

import torch
import triton
import triton.language as tl

_TAIL_BLOCK = 64
_ARENA_BLOCK = 1024
_CELL_BLOCK = 128


def reserve(
    table: torch.Tensor,
    tails: torch.Tensor,
    max_particles: int,
    rows: torch.Tensor,
    *,
    allocated: torch.Tensor,
    starts: torch.Tensor,
    idle: torch.Tensor,
    unread: torch.Tensor,
    num_particles: torch.Tensor,
    num_columns: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Assign each particle free slots for its next positions, and return them with the one before.

    Reference: `sglang_smc.kv.ledger.Ledger.reserve`, same arguments after the first three, and the
    same result.

    Args:
        table: ``[num_rows, width]`` int32, the requests' rows.
        tails: ``[num_rows * max_particles, W]`` int32, the particles' rows, written in place; W is
            a power of two.
        max_particles: rows of each request's particles.
    """
    shape = 1 + width, *starts.shape  # columns are contiguous, since each is read by itself
    slots = torch.empty(shape, dtype=torch.int64, device=table.device).permute(1, 2, 0)
    of_groups = rows, allocated, starts, idle, unread, num_particles, num_columns
    _reserve[(triton.cdiv(slots.numel(), _CELL_BLOCK),)](
        table,
        tails,
        *(argument.contiguous() for argument in of_groups),
        slots,
        table.stride(0),
        *tails.shape[1:],
        max_particles,
        *slots.shape,
        block=_CELL_BLOCK,
    )
    return slots


def descend(
    tails: torch.Tensor,
    max_particles: int,
    rows: torch.Tensor,
    *,
    committed: torch.Tensor,
    ancestors: torch.Tensor,
    max_tail: int,
) -> None:
    """Copy tails of slots: particle n takes over the tail of ``ancestors[g, n]``. One launch.

    Reference: `sglang_smc.kv.ledger.Ledger.descend`, same arguments after the first two. No two
    ``rows`` are equal where tails are to move.

    Args:
        tails, max_particles: as in `reserve`.
    """
    num_groups, num_particles = ancestors.shape
    _descend[(num_groups, triton.cdiv(max_tail, _TAIL_BLOCK))](
        tails,
        rows.contiguous(),
        committed.contiguous(),
        ancestors.contiguous(),
        tails.shape[1],
        max_particles,
        num_particles,
        max_tail,
        padded=triton.next_power_of_2(num_particles),
        block=_TAIL_BLOCK,
    )


def commit(
    table: torch.Tensor,
    tails: torch.Tensor,
    rank: torch.Tensor,
    free_rank: int,
    max_particles: int,
    rows: torch.Tensor,
    *,
    committed: torch.Tensor,
    allocated: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    max_tail: int,
    max_arena: int,
) -> None:
    """Sort each arena: slots of the common lineage by position, then those in use, then free ones.

    Reference: `sglang_smc.kv.ledger.Ledger.commit`, same arguments after the first five. No two
    ``rows`` are equal where there is an arena; a group without one is skipped. Three launches,
    since programs of one do not synchronize: mark the slots by their rank, place them in order, and
    write them back, with the marks removed.

    Args:
        table, tails, max_particles: as in `reserve`; both are written in place.
        rank: ``[num_slots]`` int32 of ``free_rank``, restored afterwards.
        free_rank: at least 1 + ``max_tail``.
    """
    num_groups, num_particles = lengths.shape
    bounds = rows.contiguous(), committed.contiguous(), allocated.contiguous()
    counts = counts.contiguous()
    shape = num_groups, max_arena
    in_order = torch.empty(shape, dtype=torch.int32, device=table.device)  # [G, A]
    _mark[(num_groups, triton.cdiv(max_tail, _TAIL_BLOCK))](
        tails,
        *bounds,
        rank,
        counts,
        lengths.contiguous(),
        tails.shape[1],
        max_particles,
        num_particles,
        max_tail,
        free_rank - 1,
        padded=triton.next_power_of_2(num_particles),
        block=_TAIL_BLOCK,
    )
    arenas = table, *bounds, rank, in_order
    sizes = table.stride(0), max_arena, free_rank
    _place[(num_groups,)](*arenas, counts, *sizes, block=_ARENA_BLOCK)
    tiles = triton.cdiv(max_arena, _ARENA_BLOCK)
    _write_back[(num_groups, tiles)](*arenas, *sizes, block=_ARENA_BLOCK)


@triton.jit
def _reserve(
    table,
    tails,
    rows,
    allocated,
    starts,
    idle,
    unread,
    num_particles,
    num_columns,
    slots,
    stride,
    width,
    max_particles,
    num_groups,
    padded_particles,
    padded_columns,
    block: tl.constexpr,
):
    cell = tl.program_id(0) * block + tl.arange(0, block)
    inside = cell < num_groups * padded_particles * padded_columns
    own = cell // padded_columns  # of this particle, in [G, N]
    group, particle = own // padded_particles, own % padded_particles
    column = cell % padded_columns - 1  # -1 is the position before the first
    request = tl.load(rows + group, mask=inside, other=0)
    start = tl.load(starts + own, mask=inside, other=0)
    runs = inside & (tl.load(idle + own, mask=inside, other=1) == 0)
    columns = tl.load(num_columns + group, mask=inside, other=0)
    first = tl.load(allocated + group, mask=inside, other=0)
    first -= tl.load(num_particles + group, mask=inside, other=0) * columns
    in_ring = (start + column) & (width - 1)
    of_particle = tails + (request * max_particles + particle) * width + in_ring

    mine = runs & (column >= 0) & (column < columns)
    place = table + request * stride + first + particle * columns + column
    slot = tl.load(place, mask=mine, other=0)
    owed = runs & (column < 0) & (tl.load(unread + group, mask=inside, other=0) != 0)
    before = tl.load(of_particle, mask=owed & (start > 0), other=0)
    tl.store(of_particle, slot, mask=inside & (column >= 0))
    at = (column + 1) * num_groups * padded_particles + own
    tl.store(slots + at, tl.where(owed, before, slot).to(tl.int64), mask=inside)


@triton.jit
def _descend(
    table,
    rows,
    committed,
    ancestors,
    width,
    max_particles,
    num_particles,
    max_tail,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    group = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    particle = tl.arange(0, padded)
    here = particle < num_particles
    ancestor = tl.load(ancestors + group * num_particles + particle, mask=here, other=0)
    # All rows of these columns, and no others: no other program reads or writes them.
    in_ring = (tl.load(committed + group) + column) & (width - 1)
    tails = table + tl.load(rows + group) * max_particles * width + in_ring[None, :]
    moves = (here & (ancestor != particle))[:, None] & (column < max_tail)[None, :]
    slots = tl.load(tails + (ancestor * width)[:, None], mask=moves, other=0)
    tl.debug_barrier()  # a row may be read by one thread and overwritten by another
    tl.store(tails + (particle.to(tl.int64) * width)[:, None], slots, mask=moves)


@triton.jit
def _mark(
    table,
    rows,
    committed,
    allocated,
    rank,
    counts,
    lengths,
    width,
    max_particles,
    num_particles,
    max_tail,
    held_rank,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    group = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    particle = tl.arange(0, padded)
    here = (particle < num_particles)[:, None]
    begin = tl.load(committed + group)
    inside = (column < max_tail) & (begin < tl.load(allocated + group))
    common = inside & (column < tl.load(counts + group))
    in_ring = (begin + column) & (width - 1)
    tails = table + tl.load(rows + group) * max_particles * width + in_ring

    # Equal tokens after an equal prefix have equal KV: particle 0's copy serves all.
    shared = tl.load(tails, mask=common, other=0)
    tl.store(rank + shared, column, mask=common)
    rows_of_particles = tails[None, :] + (particle.to(tl.int64) * width)[:, None]
    others = here & (particle > 0)[:, None] & common[None, :]
    tl.store(rows_of_particles, shared[None, :], mask=others)

    # No slot is both common and held, since it has one position in every sequence that uses it.
    length = tl.load(lengths + group * num_particles + particle[:, None], mask=here, other=0)
    held = (column[None, :] < length) & (inside & ~common)[None, :]
    slots = tl.load(rows_of_particles, mask=held, other=0)
    tl.store(rank + slots, held_rank, mask=held)


@triton.jit
def _arena(table, rows, committed, allocated, group, stride, max_arena):
    """Return where a group's arena begins, and how many slots it has."""
    begin = tl.load(committed + group)
    size = tl.minimum(tl.load(allocated + group) - begin, max_arena).to(tl.int32)
    return table + tl.load(rows + group) * stride + begin, size


@triton.jit
def _place(
    table,
    rows,
    committed,
    allocated,
    rank,
    in_order,
    counts,
    stride,
    max_arena,
    free_rank,
    block: tl.constexpr,
):
    group = tl.program_id(0)
    arena, size = _arena(table, rows, committed, allocated, group, stride, max_arena)
    held_rank = free_rank - 1
    next_held = tl.load(counts + group).to(tl.int32)
    next_free = next_held
    for start in range(0, size, block):
        place = start + tl.arange(0, block)
        slots = tl.load(arena + place, mask=place < size, other=0)
        ranks = tl.load(rank + slots, mask=place < size, other=free_rank)
        next_free += tl.sum((ranks == held_rank).to(tl.int32), 0)
    for start in range(0, size, block):
        place = start + tl.arange(0, block)
        inside = place < size
        slots = tl.load(arena + place, mask=inside, other=0)
        ranks = tl.load(rank + slots, mask=inside, other=0)
        held = (ranks == held_rank).to(tl.int32)
        free = (ranks == free_rank).to(tl.int32)
        at_held = next_held + tl.cumsum(held, 0) - 1
        at_free = next_free + tl.cumsum(free, 0) - 1
        at = tl.where(held != 0, at_held, tl.where(free != 0, at_free, ranks))
        tl.store(in_order + group * max_arena + at, slots, mask=inside)
        next_held += tl.sum(held, 0)
        next_free += tl.sum(free, 0)


@triton.jit
def _write_back(
    table,
    rows,
    committed,
    allocated,
    rank,
    in_order,
    stride,
    max_arena,
    free_rank,
    block: tl.constexpr,
):
    group = tl.program_id(0)
    arena, size = _arena(table, rows, committed, allocated, group, stride, max_arena)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < size
    slots = tl.load(in_order + group * max_arena + place, mask=inside, other=0)
    tl.store(arena + place, slots, mask=inside)
    tl.store(rank + slots, free_rank, mask=inside)
