"""Capture rounds as CUDA graphs when the server starts: one launch instead of about a thousand.

No tensor shape of a round depends on values, and a round does not synchronise with the host. So
all of `ServedRound.play`, from the first pass of the draft to the commit, can be captured once for
each of a few batch sizes, and replayed for any batch that is no larger. The rest of the batch size
is filled with SGLang's padding row, which has only ended particles.

A server captures several kinds of rounds, and replays the first that supports a batch:

    greedy   the server's own settings with a tree per request: temperature 0
    plain    the server's own settings with all particles
    chat     plain with top-k, top-p and min-p, which most models set by default
    edited   plain or chat, with logit edits and log-probabilities
    off      chat of requests that all draft nothing
    powers   chat, with powers of p, verified proposals, and all particles
    any      all options that need no host but verified proposals: other modes, methods and powers

Where N and K adapt, there are graphs of chat for each budget, and of the others except plain and
off for the largest budget. Rounds that need the host are launched operation by operation, with the
models' passes replayed.

The largest captured batch size is set by the free memory. Larger batches are played in slices, by
replays or by launches.

Each capture takes some tenth of a second at start, and a batch between two sizes is padded to the
larger one: many sizes waste little work, few sizes start quickly (`plan_sizes`).
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from sglang_smc.kv.rounds import MOST_LAUNCHED, SHARE, Room, round_bytes
from sglang_smc.kv.transfer import joined
from sglang_smc.models.recorder import Captured, Ranks, Record
from sglang_smc.options.request import OFF, Budget, budgets, verified_as_tree, without_drafts
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import (
    RoundInputs,
    RoundShape,
    Tables,
    shape_of_any,
    shape_of_server,
)
from sglang_smc.round.result import Outcome
from sglang_smc.smc.settings import Need
from sglang_smc.state.logprobs import (
    NO_LOGPROBS,
    LogprobTable,
    LogprobWidths,
    recorded_logprobs,
)

logger = logging.getLogger(__name__)

Play = Callable[[RoundInputs, RoundShape], Outcome]

UNBOUNDED = Room(MOST_LAUNCHED, 1 << 60, 1 << 60)
"""Unlimited memory."""

MOST = 72
"""Maximum number of graphs of a server, where N and K are at most 8 each."""

FEWEST = 3
"""Minimum number of batch sizes per kind of round: one request, the most, and one between."""

# Graphs of models alone per size: the draft's first pass, its later ones, and the target's.
_PASSES = 3

# Kinds that are captured at `CapturedSizes.of_any`: powers and any.
_OF_ANY = 2


class CapturedSizes(NamedTuple):
    """Batch sizes to capture, ascending."""

    of_rounds: tuple[int, ...]  # of the kinds that most requests use
    of_edited: tuple[int, ...]  # of kinds with edited logits and log-probabilities
    of_any: tuple[int, ...]  # of powers, and of the kind with nearly all options
    of_passes: tuple[int, ...]  # of models alone, for rounds that need the host

    def count(self, num_kinds: int, num_edited: int) -> int:
        """Return the number of graphs for ``num_kinds`` and ``num_edited`` kinds."""
        of_kinds = num_kinds * len(self.of_rounds) + num_edited * len(self.of_edited)
        return of_kinds + _OF_ANY * len(self.of_any) + _PASSES * len(self.of_passes)


def plan_sizes(
    wanted: Sequence[int], num_kinds: int, num_edited: int, room: Room = UNBOUNDED
) -> CapturedSizes:
    """Return the sizes to capture, of those ``wanted``; none if not even the smallest fits.

    Args:
        wanted: ascending.
        num_kinds: kinds of rounds that are captured at `CapturedSizes.of_rounds`: variants, or
            where N and K adapt, budgets.
        num_edited: kinds that are captured at `CapturedSizes.of_edited`.
        room: numbers of requests that fit in memory.
    """
    of_rounds, of_any = ([s for s in wanted if s <= most] for most in room[1:])
    if not of_rounds or not of_any:
        return CapturedSizes((), (), (), ())
    is_few = num_kinds <= FEWEST
    powers = [s for s in of_any if s in (of_any[0], of_any[-1]) or s & (s - 1) == 0]
    few = thinned(powers, FEWEST if is_few else 2)
    alone = [size for size in powers if size <= room.launched] or powers[:1]
    of_passes = thinned(alone, FEWEST if is_few else 2)
    beside = CapturedSizes((), tuple(powers) if is_few else few, few, of_passes)
    rest = MOST - beside.count(num_kinds, num_edited)
    return beside._replace(of_rounds=thinned(of_rounds, max(FEWEST, rest // num_kinds)))


def thinned(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return at most ``count`` of ascending sizes: both ends, and those between that waste least.

    Args:
        count: at least 2.
    """
    wastes = sorted({0.0, *(b / (a + 1) for a in sizes for b in sizes if a < b)})
    least = bisect_left(wastes, True, key=lambda waste: len(_chain(sizes, waste)) <= count)
    return _chain(sizes, wastes[least])


def _chain(sizes: Sequence[int], waste: float) -> tuple[int, ...]:
    """Return the fewest sizes such that no batch is padded to more than ``waste`` times its size.

    The worst batch is one larger than a size; the next size is always included if none is within
    the bound.
    """
    chain = [sizes[0]]
    while chain[-1] < sizes[-1]:
        above = [size for size in sizes if size > chain[-1]]
        chain.append(max([s for s in above if s <= waste * (chain[-1] + 1)] or above[:1]))
    return tuple(chain)


@dataclass(eq=False)
class RoundGraphs:
    """Captured graphs of one kind of round."""

    _play: Play  # the round, for any number of groups
    shape: RoundShape  # sizes and kinds of the graphs
    _padding: Callable[[int], RoundInputs]  # of a number of groups on the padding row
    sizes: Sequence[int]  # numbers of groups to capture, ascending
    _recorded: dict[int, Captured] = field(default_factory=dict, init=False)

    def warm_up(self, size: int) -> None:
        """Play a round of ``size`` groups, so that its capture compiles nothing."""
        self._play(self._padding(size), self.shape)

    def record(self, size: int, record: Record) -> None:
        inputs = self._padding(size)
        padding = self._padding(size)
        outcome, replay = record(lambda: self._play(inputs, self.shape))
        self._recorded[size] = Captured(inputs, padding, outcome, replay)

    def replay(self, inputs: RoundInputs) -> Outcome:
        """Return the round's outcome for inputs ``[G]``, in tensors that no later replay changes.

        Batches larger than any graph are played in slices.
        """
        return joined([self._replay(part) for part in inputs.split(self.sizes[-1])])

    def _replay(self, inputs: RoundInputs) -> Outcome:
        size = len(inputs.rows)
        recorded = self._recorded[self.sizes[bisect_left(self.sizes, size)]]
        return recorded.of(inputs).first(size)


@dataclass(eq=False)
class Recordings:
    """All captured rounds of a server."""

    # By the budget that bounds the rounds, None where nothing adapts; the fewest options first.
    of_budget: dict[Budget | None, list[RoundGraphs]]
    _greedy: list[RoundGraphs]  # of trees by N, the fewest first; for any budget
    sizes: CapturedSizes  # captured batch sizes
    _logprobs: LogprobTable  # which graphs write
    launched: int = MOST_LAUNCHED  # the most requests of a round that is launched without a graph

    def __post_init__(self) -> None:
        self._recorded_logprobs = self._logprobs.widths
        self._written = self._logprobs.columns  # graphs write there after the table has grown, too
        self._said: set[str] = set()

    def find(self, shape: RoundShape) -> RoundGraphs | None:
        """Return the first graphs that support a batch; else None, and log each reason once."""
        found = self.of_budget.get(OFF if shape.skips_draft else shape.budget, [])
        if found and Need.TREES in shape.needs:
            found = [*self._greedy, *found]
        reason = ""
        for graphs in found:  # those with the fewest options first
            reason = self._why_not(graphs, shape)
            if not reason:
                return graphs
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.info(
                "A batch does not replay a round's CUDA graph, since a request asks for %s. Such "
                "rounds take the host longer to launch, and run at most %d requests at a time. "
                "This is logged once.",
                reason,
                self.launched,
            )
        return None

    def describe(self, wanted: Sequence[int]) -> str:
        """Describe in words the captured rounds, and how they differ from the sizes ``wanted``."""
        every = {id(one): one for found in self.of_budget.values() for one in found}
        kinds = [*self._greedy, *every.values()]
        most, of_any = (pick(graphs.sizes[-1] for graphs in kinds) for pick in (max, min))
        count = sum(len(graphs.sizes) for graphs in kinds)
        told = (
            f"{count} rounds of up to {most} requests are recorded, of up to {of_any} where one "
            f"asks for what most do not; others are launched for {self.launched} requests at a "
            "time."
        )
        if min(most, of_any) == wanted[-1]:
            return told
        return (
            f"{told} Memory does not hold rounds of {wanted[-1]} requests: larger batches play in "
            "slices. To record more, leave more memory free (a smaller --mem-fraction-static) or "
            "run fewer requests (--max-running-requests); --cuda-graph-bs-decode chooses sizes."
        )

    def _why_not(self, graphs: RoundGraphs, shape: RoundShape) -> str:
        """Return why the graphs do not support a batch; empty if they do."""
        if shape.logprobs.own and self._logprobs.widths != self._recorded_logprobs:
            return f"more log-probabilities than {self._recorded_logprobs}"
        return ", ".join(graphs.shape.lacks(shape))


# Beside what the server's own settings need, so that others of a batch replay it, too.
_OF_POWERS = frozenset({Need.EXTENDS, Need.POWER, Need.OPEN_TOKEN, Need.FILTERS})


class Kinds(NamedTuple):
    """Shapes of rounds that a server captures, each on its own budget."""

    most_used: list[RoundShape]  # the largest first
    edited: list[RoundShape]  # also used on smaller budgets
    powers: RoundShape  # likewise
    any: RoundShape  # likewise
    greedy: list[RoundShape]  # by N, the fewest first; any K
    off: list[RoundShape]  # where no request drafts: none where N and K adapt, which have one

    @classmethod
    def of(cls, config: SMCConfig, logprobs: LogprobWidths) -> "Kinds":
        """Return the kinds that a server with these settings captures."""
        bounds = budgets(Budget(config.num_particles, config.num_steps))
        rungs = bounds if config.adapts else (None,)
        shapes = [shape_of_server(config, rung) for rung in rungs]
        chats = [shape.needing({*shape.needs, Need.FILTERS}) for shape in shapes]
        most_used = chats if config.adapts else [*shapes, *chats]
        largest = [shape for shape in most_used if shape.budget == rungs[0]]
        edited = [shape.needing({*shape.needs, Need.EDITS}).scoring(logprobs) for shape in largest]
        # Trees of the most steps, at temperature 0.
        of_n = [one for one in rungs[::-1] if not one or (one[0] > 1 and one[1] == bounds[0][1])]
        trees = [shape_of_server(verified_as_tree(config), rung) for rung in of_n]
        greedy = [one.needing(one.needs - {Need.VERIFIES} | {Need.TREES}) for one in trees]
        alone = shape_of_server(without_drafts(config), OFF)
        off = [] if config.adapts else [alone.needing({*alone.needs, Need.FILTERS})]
        of_any = shape_of_any(config, rungs[0], logprobs)
        powers = of_any._replace(logprobs=NO_LOGPROBS, extras=frozenset({"return_particles"}))
        powers = powers.needing(shapes[0].needs | _OF_POWERS)
        return cls(most_used, edited, powers, of_any, greedy, off)

    @property
    def num_most_used(self) -> int:
        """Return the number of kinds that are captured at all batch sizes."""
        return len(self.most_used) + len(self.greedy)


def room_of(config: SMCConfig, vocab_size: int, free: int, *, records: bool) -> Room:
    """Return the numbers of requests for which rounds fit into ``free`` bytes.

    Args:
        records: whether rounds are captured.
    """
    kinds = Kinds.of(config, recorded_logprobs(vocab_size))

    def of(shape: RoundShape, mixes: bool = False) -> int:
        verifies = Need.VERIFIES in shape.needs
        num_steps = shape.num_steps
        return round_bytes(
            shape.num_particles, num_steps, vocab_size, verifies=verifies, mixes=mixes
        )

    of_any = of(kinds.any, mixes=True)
    if not records:
        return Room(max(int(SHARE * free // of_any), 1), 0, 0)
    return Room.beside_recordings(free, max(map(of, kinds.most_used)), of_any)


def record_rounds(
    play: Play,
    config: SMCConfig,
    wanted: Sequence[int],
    tables: Tables,
    device: str,
    record: Record,
    ranks: Ranks,
) -> Recordings:
    """Capture all rounds of a server, those that take most memory first.

    Args:
        play: as for `RoundGraphs`.
        wanted: batch sizes, ascending, of which some may be left out.
        tables: tables that rounds read and write; their addresses must not change any more.

    Raises torch.OutOfMemoryError if not even the smallest size fits.
    """
    vocab_size = tables.requests.vocab_size
    room = room_of(config, vocab_size, ranks.free_bytes, records=True)
    logprobs = recorded_logprobs(vocab_size)
    kinds = Kinds.of(config, logprobs)
    sizes = plan_sizes(wanted, kinds.num_most_used, len(kinds.edited + kinds.off), room)
    if not sizes.of_rounds:
        raise torch.OutOfMemoryError(
            f"{ranks.free_bytes / 2**30:.2f} GB are free, which hold no round of {wanted[0]} "
            "requests beside one that is launched call by call"
        )
    tables.particles.logprobs.make_room(logprobs)
    tables.edits.make_room()

    def graphs_of(shape: RoundShape, of: Sequence[int], config: SMCConfig = config) -> RoundGraphs:
        padding = partial(RoundInputs.of_padding, config, shape.budget, device=device)
        return RoundGraphs(play, shape, padding, of)

    edited = [graphs_of(shape, sizes.of_edited) for shape in kinds.edited]
    beside = [graphs_of(shape, sizes.of_any) for shape in (kinds.powers, kinds.any)]
    found: dict[Budget | None, list[RoundGraphs]] = {}
    for shape in kinds.most_used:
        found.setdefault(shape.budget, []).append(graphs_of(shape, sizes.of_rounds))
    at_0 = verified_as_tree(config)
    greedy = [graphs_of(shape, sizes.of_rounds, at_0) for shape in kinds.greedy]
    for shape in kinds.off:
        off = graphs_of(shape, sizes.of_edited, without_drafts(config))
        found.setdefault(shape.budget, []).append(off)
    most_used = [graphs for these in found.values() for graphs in these]
    every = [*reversed(beside), *edited, *most_used, *greedy]
    _record_all(every, record, ranks)
    of_budget = {budget: [*these, *edited, *beside] for budget, these in found.items()}
    launched = min(room.launched, sizes.of_passes[-1])  # so that their passes are replayed
    return Recordings(of_budget, greedy, sizes, tables.particles.logprobs, launched)


def _record_all(of: Sequence[RoundGraphs], record: Record, ranks: Ranks) -> None:
    """Play each round once, then capture all, so that no warm-up needs memory beside the graphs.

    The largest of each kind is captured first, so that smaller ones reuse its memory.
    """
    jobs = [(graphs, size) for graphs in of for size in reversed(graphs.sizes)]
    with tqdm(total=2 * len(jobs), desc="Capturing SMC rounds", disable=ranks.index > 0) as bar:
        for graphs, size in jobs:
            graphs.warm_up(size)
            bar.update()
        for graphs, size in jobs:
            graphs.record(size, record)
            bar.update()


def explain_failure(error: Exception, config: SMCConfig, ranks: Ranks, device: str) -> None:
    """Log why rounds are not captured, and which flags help.

    Raises ValueError with the same text, if graphs were requested explicitly, other ranks may have
    them, or the device no longer works.
    """
    cure = (
        "--speculative-smc-round-graph off serves without recordings, --speculative-smc-kernels "
        "torch without kernels of this package."
    )
    if isinstance(error, torch.OutOfMemoryError):
        cure = (
            "Leave more memory free: a smaller --mem-fraction-static, a smaller "
            f"--max-running-requests, fewer sizes in --cuda-graph-bs-decode. {cure}"
        )
    told = f"SMC cannot record rounds as CUDA graphs: {type(error).__name__}: {error}. {cure}"
    if config.round_graph == "on" or ranks.count > 1 or not works(device):
        raise ValueError(told) from error
    logger.error("%s This server goes on without them: its rounds take longer.", told)


def works(device: str) -> bool:
    """Return whether a device still computes; after an illegal memory access it does not."""
    try:
        torch.get_device_module(device).synchronize()
    except RuntimeError:
        return False
    return True
