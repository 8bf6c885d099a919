"""How many recordings a server makes, and of which batch sizes. Arithmetic alone.

Each takes some tenth of a second as the server starts, and a batch between two sizes plays at the
larger one: many sizes waste little work, few start quickly.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from sglang_smc.memory.rounds import MOST_LAUNCHED, Room

UNBOUNDED = Room(MOST_LAUNCHED, 1 << 60, 1 << 60)
"""Memory that is never short."""

MOST = 64
"""Recordings that a server makes at most, where N and K are no more than 8 each."""

FEWEST = 3
"""Batch sizes of each kind of round: one request, the most, and one between them, if not more."""

_PASSES = (
    3  # recordings of models alone at each size: the draft's first pass and others, the target's
)


class Sizes(NamedTuple):
    """Numbers of requests to record at, ascending."""

    of_rounds: tuple[int, ...]  # of the kinds that most requests play
    of_edited: tuple[int, ...]  # of kinds with edited logits and log-probabilities
    of_any: tuple[int, ...]  # of the kind that does all that a device can
    of_passes: tuple[int, ...]  # of models alone, for rounds that the host looks into

    def count(self, num_kinds: int, num_edited: int) -> int:
        """Return how many recordings these are of so many kinds."""
        of_kinds = num_kinds * len(self.of_rounds) + num_edited * len(self.of_edited)
        return of_kinds + len(self.of_any) + _PASSES * len(self.of_passes)


def plan_sizes(
    wanted: Sequence[int], num_kinds: int, num_edited: int, room: Room = UNBOUNDED
) -> Sizes:
    """Return the sizes to record at, of those ``wanted``; none where memory holds not the smallest.

    Args:
        wanted: ascending.
        num_kinds: kinds of rounds that are recorded at `Sizes.of_rounds`: variants, or where N and
            K adapt, budgets.
        num_edited: kinds that are recorded at `Sizes.of_edited`.
        room: requests that memory holds.
    """
    of_rounds, of_any = ([s for s in wanted if s <= most] for most in room[1:])
    if not of_rounds or not of_any:
        return Sizes((), (), (), ())
    is_few = num_kinds <= FEWEST
    powers = [s for s in of_any if s in (of_any[0], of_any[-1]) or s & (s - 1) == 0]
    few = thinned(powers, FEWEST if is_few else 2)
    alone = [size for size in powers if size <= room.launched] or powers[:1]
    of_passes = thinned(alone, FEWEST if is_few else 2)
    beside = Sizes((), tuple(powers) if is_few else few, few, of_passes)
    rest = MOST - beside.count(num_kinds, num_edited)
    return beside._replace(of_rounds=thinned(of_rounds, max(FEWEST, rest // num_kinds)))


def thinned(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """At most ``count`` of ascending sizes: both ends, and between them those that waste least.

    Args:
        count: at least 2.
    """
    wastes = sorted({0.0, *(b / (a + 1) for a in sizes for b in sizes if a < b)})
    least = bisect_left(wastes, True, key=lambda waste: len(_chain(sizes, waste)) <= count)
    return _chain(sizes, wastes[least])


def _chain(sizes: Sequence[int], waste: float) -> tuple[int, ...]:
    """As few of the sizes as may be, if no batch is to play at more than ``waste`` times its own.

    A batch of one more than a size is what plays at the next; a next one there is in any case.
    """
    chain = [sizes[0]]
    while chain[-1] < sizes[-1]:
        above = [size for size in sizes if size > chain[-1]]
        chain.append(max([s for s in above if s <= waste * (chain[-1] + 1)] or above[:1]))
    return tuple(chain)
