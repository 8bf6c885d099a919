"""Assign KV slots to particles, within the request's own row of `req_to_token`.

SGLang keeps one row per request, position -> KV slot. All slots of the particles stay in it:

row[0 : committed]            the prompt and the emitted output but its last token, in order
row[committed : allocated]    the arena: the slots of all tails, then the free ones

so that finish, abort, retraction, the radix cache and the leak checks of SGLang's scheduler stay
correct without support for particles. A particle has a row of its own in another table, for its
tail's slots only: the prefix is in the request's row. It is a ring buffer, in which position p has
entry p modulo the width, so that no entry moves when tokens are committed. Resampling copies tails
between these rows; several particles may share a slot, and a slot of no particle is free. No round
copies KV.

SGLang frees and caches a row page by page: position p is in slot p modulo the page size of a page.
A request owns whole pages, but rounds leave their slots in any order. So KV is moved once, before
SGLang takes over a row.
"""

from typing import NamedTuple

import torch


class Wanted(NamedTuple):
    """The slots that a round needs. Places without a particle or column get the padding slot 0."""

    rows: torch.Tensor  # [G] int64 requests
    committed: torch.Tensor  # [G] int64: where each arena begins
    allocated: torch.Tensor  # [G] int64 arena ends; the last N * (K + 1) slots are free
    lengths: torch.Tensor  # [G, N] int64 of the tails
    idle: torch.Tensor  # [G, N] bool: particles that get the padding slot
    unread: torch.Tensor  # [G] bool: the draft has yet to write the position before
    num_particles: torch.Tensor  # [G] int64 N of each
    num_steps: torch.Tensor  # [G] int64 K of each


class Arenas(NamedTuple):
    """The arenas of a batch."""

    rows: torch.Tensor  # [G] int64 requests
    committed: torch.Tensor  # [G] int64: where each begins
    allocated: torch.Tensor  # [G] int64: where it ends


class KVLocations(NamedTuple):
    """KV cache locations of the particles of a batch.

    Positions before ``committed`` are in the request's own row, the others in the particle's.
    """

    rows: torch.Tensor  # [G] int64 rows of `req_to_token`: the shared prefixes
    committed: torch.Tensor  # [G] int64 lengths of the shared prefixes, at least 1
    particle_rows: torch.Tensor  # [G, N] int64 rows of `Ledger.tails`
    # Upper bound, on the host, of a particle's keys after `committed`, the new ones included.
    max_tail: int


class AttentionContext(NamedTuple):
    """The keys that C new tokens of each of N particles of each of G requests attend to."""

    req_to_token: torch.Tensor  # [rows, width] slots by row and position
    tails: torch.Tensor  # [rows, W] slots by row and position modulo W, a power of two
    locations: KVLocations  # of the prefixes, and of the tails after them
    starts: torch.Tensor  # [G, N] position of each first new token, at least `committed` - 1
    window: int | None = None  # keys before its own that a query attends to; None for all
    # Whether a query attends to all new tokens of its particle that have slots of their own, also
    # those ahead of it. A window begins before the query all the same.
    sees_block: bool = False
    first_key: int = 0  # first position with a key; the output of queries before it is undefined
    sink: int = 0  # keys from `first_key` on that a query attends to beside its window


class Ledger:
    """Assigns KV slots to particles.

    Args:
        req_to_token: ``[num_rows, width]``, SGLang's; rows hold a sequence and its arena.
        tails: ``[num_rows * N, W]`` int32, the particles' rows, of `kv.arena.tail_width`.
        num_particles: N.
        max_tail: the longest tail, in tokens; a tail of L tokens holds L slots.
        num_slots: size of the KV pool, the padding page included.

    Where a method takes ``max_tail``, no tail of its batch is longer.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        tails: torch.Tensor,
        *,
        num_particles: int,
        max_tail: int,
        num_slots: int,
    ) -> None:
        device = req_to_token.device
        self.table = req_to_token
        self.tails = tails
        self.num_particles = num_particles
        self._tail = torch.arange(max_tail, device=device)
        self._first_rows = torch.arange(num_particles, device=device)  # of request 0
        self._held_rank = max_tail
        self.free_rank = max_tail + 1
        self.rank = torch.full((num_slots,), self.free_rank, dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def particle_rows(self, rows: torch.Tensor, num_particles: int) -> torch.Tensor:
        """Return the rows of `tails` of requests' particles: ``[G]`` to ``[G, num_particles]``."""
        first = self._first_rows[:num_particles]
        return torch.add(first, rows.unsqueeze(1), alpha=self.num_particles)

    def reserve(
        self, wanted: Wanted, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Assign each particle free slots for its next K + 1 positions.

        Args:
            width: the most of them of any group.

        Returns:
            Slots and positions ``[1 + width, G, N]`` int64, and the particles' rows ``[G, N]``. The
            first slot is that of the position before where it is ``unread``, else the padding slot;
            the others are also written to the particles' rows.
        """
        rows, committed, allocated, lengths, idle, unread, num_particles, num_steps = wanted
        particle = torch.arange(lengths.shape[1], device=rows.device).view(1, -1, 1)
        column = torch.arange(-1, width, device=rows.device)
        per_particle = num_steps.view(-1, 1, 1) + 1
        first = allocated.view(-1, 1, 1) - num_particles.view(-1, 1, 1) * per_particle
        mine = (column[1:] < per_particle) & ~idle.unsqueeze(2)
        place = (first + particle * per_particle + column[1:]).where(mine, 0)  # [G, N, width]
        slots = self.table[rows.view(-1, 1, 1), place].where(mine, 0)
        targets = self.particle_rows(rows, lengths.shape[1])
        positions = (committed.unsqueeze(1) + lengths).unsqueeze(2) + column  # [G, N, 1 + width]
        in_ring = self.in_ring(positions)
        self.tails[targets.unsqueeze(2), in_ring[:, :, 1:]] = slots
        owed = unread.view(-1, 1, 1) & ~idle.unsqueeze(2)  # [G, N, 1]
        before = self.tails[targets.unsqueeze(2), in_ring[:, :, :1]].where(owed, 0)
        found = torch.cat([before, slots], dim=2).long().permute(2, 0, 1).contiguous()
        return found, positions.permute(2, 0, 1), targets

    def descend(
        self, rows: torch.Tensor, committed: torch.Tensor, ancestors: torch.Tensor, max_tail: int
    ) -> None:
        """Copy the slots of the tail of ``ancestors[g, n]`` to the row of particle n.

        Args:
            rows: ``[G]`` int64 requests.
            committed: ``[G]`` int64 first position of the tails.
            ancestors: ``[G, N]`` int64.
        """
        if ancestors.shape[1] == 1:
            return
        where = self._tail_index(rows, committed, ancestors.shape[1], max_tail)
        tails = self.tails[where]
        self.tails[where] = tails.gather(1, ancestors.unsqueeze(2).expand_as(tails))

    def commit(
        self,
        arenas: Arenas,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        *,
        max_tail: int,
        max_arena: int,
    ) -> None:
        """Sort each arena stably: committed slots by position, then slots in use, then free ones.

        Args:
            arenas: before the commit.
            lengths: ``[G, N]`` int64 tail lengths before the commit.
            counts: ``[G]`` int64 leading tail tokens to commit, which must be common to all tails.
            max_arena: the largest arena of the batch, in slots.
        """
        rows, committed, allocated = arenas
        where = self._tail_index(rows, committed, lengths.shape[1], max_tail)
        tails = self.tails[where].long()  # [G, N, T]; stale past a tail's length
        column = self._tail[:max_tail]
        common = column < counts.view(-1, 1, 1)  # [G, 1, T]
        # Equal tokens after an equal prefix have equal KV: all particles use particle 0's slots.
        tails = torch.where(common, tails[:, :1], tails)
        self.tails[where] = tails.int()
        held = (column < lengths.unsqueeze(2)) & ~common
        # Places outside an arena point to SGLang's padding row, and are written back unchanged.
        place = committed.unsqueeze(1) + torch.arange(max_arena, device=rows.device)
        inside = place < allocated.unsqueeze(1)  # [G, A]
        entries = torch.where(inside, rows.unsqueeze(1), 0), torch.where(inside, place, 0)
        arena = self.table[entries].long()  # [G, A]
        # Padding slot 0 belongs to no arena: it receives the ranks of masked entries.
        # `index_fill_`: a GPU waits for a number of the host's that is assigned by index.
        self.rank.index_fill_(0, torch.where(held, tails, 0).flatten(), self._held_rank)
        self.rank[torch.where(common.squeeze(1), tails[:, 0], 0)] = column.int()
        rank = torch.where(inside, self.rank[arena], self.free_rank + 1)
        sorted_arena = torch.where(inside, arena.gather(1, rank.argsort(stable=True)), arena)
        self.table[entries] = sorted_arena.int()
        self.rank.index_fill_(0, arena.flatten(), self.free_rank)

    def _tail_index(
        self, rows: torch.Tensor, committed: torch.Tensor, num_particles: int, max_tail: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of the tails in their table, for ``[G, N, T]``."""
        positions = committed.view(-1, 1, 1) + self._tail[:max_tail]
        return self.particle_rows(rows, num_particles).unsqueeze(2), self.in_ring(positions)

    def in_ring(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the entries of positions in particles' rows."""
        return positions & (self.tails.shape[1] - 1)


class Slots(NamedTuple):
    """KV slots of a round's tokens: of the last two, in columns 0 and 1, and of K draft tokens."""

    slots: torch.Tensor  # [K + 2, G, N]
    positions: torch.Tensor  # [K + 2, G, N]
    locations: KVLocations
    ledger: Ledger

    def descend(self, ancestors: torch.Tensor) -> None:
        """Copy the slots of each particle's tail from its ancestor's, ``[G, N]``."""
        rows, committed, _, max_tail = self.locations
        self.ledger.descend(rows, committed, ancestors, max_tail - 1)  # without the new token
