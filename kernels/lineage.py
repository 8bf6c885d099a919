"""Manage tails of KV slots: reserve slots for drafts, copy tails to descendants, commit."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.reweight import _members
from sglang_smc.kernels.tensors import as_float, contiguous, padded_particles
from sglang_smc.smc.ledger import Arenas, Ledger, Wanted

_TAIL_BLOCK = 64
_ARENA_BLOCK = 1024
_CELL_BLOCK = 128
_NUMBERS = ["num_particles", "max_tail"]  # for which no kernel is compiled again


class _Rows(NamedTuple):
    """A ledger's tables: rows of requests, and a ring buffer of slots for each particle."""

    table: torch.Tensor
    stride: int
    tails: torch.Tensor
    width: int
    max_particles: int

    @classmethod
    def of(cls, ledger: Ledger) -> "_Rows":
        table = ledger.table
        tails = ledger.tails
        return cls(table, table.stride(0), tails, tails.shape[1], ledger.num_particles)


class _Moves(NamedTuple):
    rows: torch.Tensor
    committed: torch.Tensor
    ancestors: torch.Tensor


class _Commit(NamedTuple):
    """The arenas of a batch, in the requests' rows, and what is committed."""

    rows: torch.Tensor
    committed: torch.Tensor
    allocated: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor
    rank: torch.Tensor
    free_rank: int
    in_order: torch.Tensor  # [G, A]: the slots of each, sorted
    max_arena: int


def reserve(
    ledger: Ledger, wanted: Wanted, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assign each particle free slots for its next positions, and return them with the one before.

    Reference: `sglang_smc.smc.ledger.Ledger.reserve`; rows of particles have powers of two slots.
    """
    shape = 1 + width, *wanted.lengths.shape
    slots = torch.empty(shape, dtype=torch.int64, device=wanted.rows.device)
    positions = torch.empty_like(slots)
    targets = torch.empty_like(slots[0])
    given = Wanted._make(contiguous(wanted))
    _reserve[(triton.cdiv(slots.numel(), _CELL_BLOCK),)](
        _Rows.of(ledger),
        given,
        slots,
        positions,
        targets,
        tuple(map(as_float, shape)),
        block=_CELL_BLOCK,
    )
    return slots, positions, targets


def descend(
    ledger: Ledger,
    rows: torch.Tensor,
    committed: torch.Tensor,
    ancestors: torch.Tensor,
    max_tail: int,
) -> None:
    """Copy tails of slots: particle n takes over the tail of ``ancestors[g, n]``. One launch.

    Reference: `sglang_smc.smc.ledger.Ledger.descend`. No two ``rows`` are equal where tails are to
    move.
    """
    num_groups, num_particles = ancestors.shape
    _descend[(num_groups, triton.cdiv(max_tail, _TAIL_BLOCK))](
        _Rows.of(ledger),
        _Moves._make(contiguous((rows, committed, ancestors))),
        num_particles,
        max_tail,
        padded=padded_particles(num_particles),
        block=_TAIL_BLOCK,
    )


def commit(
    ledger: Ledger,
    arenas: Arenas,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    *,
    max_tail: int,
    max_arena: int,
) -> None:
    """Sort each arena: slots of the common lineage by position, then those in use, then free ones.

    Reference: `sglang_smc.smc.ledger.Ledger.commit`. No two rows are equal where there is an arena;
    a group without one is skipped. Three launches, since programs of one do not synchronize: mark
    the slots by their rank, place them in order, and write them back, with the marks removed.
    """
    num_groups, num_particles = lengths.shape
    rows = _Rows.of(ledger)
    of_batch = contiguous((*arenas, lengths, counts))
    shape = (num_groups, max_arena)
    device = lengths.device
    in_order = torch.empty(shape, dtype=torch.int32, device=device)
    arena = _Commit(*of_batch, ledger.rank, ledger.free_rank, in_order, max_arena)
    _mark[(num_groups, triton.cdiv(max_tail, _TAIL_BLOCK))](
        rows,
        arena,
        num_particles,
        max_tail,
        padded=padded_particles(num_particles),
        block=_TAIL_BLOCK,
    )
    _place[(num_groups,)](rows, arena, block=_ARENA_BLOCK)
    _write_back[(num_groups, triton.cdiv(max_arena, _ARENA_BLOCK))](rows, arena, block=_ARENA_BLOCK)


@triton.jit
def _reserve(ledger, wanted, slots, positions, targets, shape, block: tl.constexpr):
    padded_columns = tl.cast(shape[0], tl.int32)
    num_groups = tl.cast(shape[1], tl.int32)
    padded_particles = tl.cast(shape[2], tl.int32)
    cell = tl.program_id(0) * block + tl.arange(0, block)
    inside = cell < num_groups * padded_particles * padded_columns
    own = cell // padded_columns  # of this particle, in [G, N]
    group = own // padded_particles
    particle = own % padded_particles
    column = cell % padded_columns - 1  # -1 is the position before the first
    request = tl.load(wanted.rows + group, mask=inside, other=0)
    runs = inside & (tl.load(wanted.idle + own, mask=inside, other=1) == 0)
    columns = tl.load(wanted.num_steps + group, mask=inside, other=0) + 1
    first = tl.load(wanted.allocated + group, mask=inside, other=0)
    first -= tl.load(wanted.num_particles + group, mask=inside, other=0) * columns
    position = tl.load(wanted.committed + group, mask=inside, other=0) + column
    position += tl.load(wanted.lengths + own, mask=inside, other=0)
    tail = request * ledger.max_particles + particle
    of_particle = ledger.tails + tail * ledger.width + (position & (ledger.width - 1))

    mine = runs & (column >= 0) & (column < columns)
    place = ledger.table + request * ledger.stride + first + particle * columns + column
    slot = tl.load(place, mask=mine, other=0)
    owed = runs & (column < 0) & (tl.load(wanted.unread + group, mask=inside, other=0) != 0)
    before = tl.load(of_particle, mask=owed & (position >= 0), other=0)
    tl.store(of_particle, slot, mask=inside & (column >= 0))
    at = (column + 1) * num_groups * padded_particles + own
    tl.store(slots + at, tl.where(owed, before, slot).to(tl.int64), mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(targets + own, tail, mask=inside & (column < 0))


@triton.jit(do_not_specialize=_NUMBERS)
def _descend(ledger, moves, num_particles, max_tail, padded: tl.constexpr, block: tl.constexpr):
    group, particle, own, here = _members(num_particles, padded)
    column = tl.program_id(1) * block + tl.arange(0, block)
    ancestor = tl.load(moves.ancestors + own, mask=here, other=0)
    # All rows of these columns, and no others: no other program reads or writes them.
    in_ring = (tl.load(moves.committed + group) + column) & (ledger.width - 1)
    first = tl.load(moves.rows + group) * ledger.max_particles
    columns = ledger.tails + first * ledger.width + in_ring[None, :]
    copied = (here & (ancestor != particle))[:, None] & (column < max_tail)[None, :]
    slots = tl.load(columns + (ancestor * ledger.width)[:, None], mask=copied, other=0)
    tl.debug_barrier()  # a row may be read by one thread and overwritten by another
    tl.store(columns + (particle.to(tl.int64) * ledger.width)[:, None], slots, mask=copied)


@triton.jit(do_not_specialize=_NUMBERS)
def _mark(ledger, arenas, num_particles, max_tail, padded: tl.constexpr, block: tl.constexpr):
    group, particle, own, here = _members(num_particles, padded)
    column = tl.program_id(1) * block + tl.arange(0, block)
    begin = tl.load(arenas.committed + group)
    inside = (column < max_tail) & (begin < tl.load(arenas.allocated + group))
    common = inside & (column < tl.load(arenas.counts + group))
    in_ring = (begin + column) & (ledger.width - 1)
    first = tl.load(arenas.rows + group) * ledger.max_particles
    columns = ledger.tails + first * ledger.width + in_ring

    # Equal tokens after an equal prefix have equal KV: particle 0's copy serves all.
    shared = tl.load(columns, mask=common, other=0)
    tl.store(arenas.rank + shared, column, mask=common)
    rows_of_particles = columns[None, :] + (particle.to(tl.int64) * ledger.width)[:, None]
    others = here[:, None] & (particle > 0)[:, None] & common[None, :]
    tl.store(rows_of_particles, shared[None, :], mask=others)

    # No slot is both common and held, since it has one position in every sequence that uses it.
    length = tl.load(arenas.lengths + own, mask=here, other=0)[:, None]
    held = (column[None, :] < length) & (inside & ~common)[None, :]
    slots = tl.load(rows_of_particles, mask=held, other=0)
    tl.store(arenas.rank + slots, arenas.free_rank - 1, mask=held)


@triton.jit
def _arena(ledger, arenas, group):
    """Return where a group's arena begins, and how many slots it has."""
    begin = tl.load(arenas.committed + group)
    size = tl.minimum(tl.load(arenas.allocated + group) - begin, arenas.max_arena).to(tl.int32)
    return ledger.table + tl.load(arenas.rows + group) * ledger.stride + begin, size


@triton.jit
def _place(ledger, arenas, block: tl.constexpr):
    group = tl.program_id(0)
    arena, size = _arena(ledger, arenas, group)
    held_rank = arenas.free_rank - 1
    next_held = tl.load(arenas.counts + group).to(tl.int32)
    next_free = next_held
    for start in range(0, size, block):
        place = start + tl.arange(0, block)
        slots = tl.load(arena + place, mask=place < size, other=0)
        ranks = tl.load(arenas.rank + slots, mask=place < size, other=arenas.free_rank)
        next_free += tl.sum((ranks == held_rank).to(tl.int32), 0)
    for start in range(0, size, block):
        place = start + tl.arange(0, block)
        inside = place < size
        slots = tl.load(arena + place, mask=inside, other=0)
        ranks = tl.load(arenas.rank + slots, mask=inside, other=0)
        held = (ranks == held_rank).to(tl.int32)
        free = (ranks == arenas.free_rank).to(tl.int32)
        at_held = next_held + tl.cumsum(held, 0) - 1
        at_free = next_free + tl.cumsum(free, 0) - 1
        at = tl.where(held != 0, at_held, tl.where(free != 0, at_free, ranks))
        tl.store(arenas.in_order + group * arenas.max_arena + at, slots, mask=inside)
        next_held += tl.sum(held, 0)
        next_free += tl.sum(free, 0)


@triton.jit
def _write_back(ledger, arenas, block: tl.constexpr):
    group = tl.program_id(0)
    arena, size = _arena(ledger, arenas, group)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < size
    slots = tl.load(arenas.in_order + group * arenas.max_arena + place, mask=inside, other=0)
    tl.store(arena + place, slots, mask=inside)
    tl.store(arenas.rank + slots, arenas.free_rank, mask=inside)
