"""Rounds as CUDA graphs: one launch instead of some thousand, recorded as the server starts.

A round has no shape that depends on values, and waits for nothing. So all of it, draft passes,
verification, weights, resampling, commit and bonus, can be recorded with its kernels' arguments,
once for each of a few batch sizes, and replayed for any batch that is no larger. What a batch does
not fill plays on SGLang's padding row, whose particles have all ended.

A server records its rounds in several kinds, and replays the first that does all that a batch
needs:

    greedy   what the server's own settings ask for, with one chain for each request: temperature 0
    plain    the same with all of its particles
    chat     and top-k, top-p, min-p, which the models people run ask for by default
    edited   plain or chat, and edited logits and log-probabilities
    any      and all else that a device can decide: other modes, methods and powers, all particles

Where N and K adapt, each budget has recordings of chat, and the largest one of the others, but for
plain ones.
What only the host can decide is played as it is, with the models' passes replayed.

How many requests are recorded at most is chosen by the memory that is free. Larger batches play in
slices, by replays or call by call.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from sglang_smc.memory.rounds import MOST_LAUNCHED, Room, round_bytes
from sglang_smc.options.budget import Budget, budgets
from sglang_smc.options.request import at_temperature_0
from sglang_smc.options.server import SMCConfig
from sglang_smc.recording.recorder import Ranks, Record, Replay, hold
from sglang_smc.recording.sizes import Sizes, plan_sizes
from sglang_smc.round.batch import RoundInputs, RoundShape, shape_of_any, shape_of_server
from sglang_smc.round.result import Outcome
from sglang_smc.round.tables import Tables
from sglang_smc.state.tail_logprobs import LogprobTable, LogprobWidths, recorded_logprobs
from sglang_smc.state.transfer import joined
from sglang_smc.upstream import Arguments

logger = logging.getLogger(__name__)

Play = Callable[[RoundInputs, RoundShape], Outcome]


class _Recorded(NamedTuple):
    inputs: RoundInputs  # of B groups: what the recording reads
    padding: RoundInputs  # of as many groups that play on the padding row
    outcome: Outcome  # [B, ...] what it writes
    replay: Replay


class RoundGraphs:
    """Recordings of one kind of round.

    Args:
        play: the round, of as many groups as the inputs have.
        shape: sizes and kinds that the recordings are made for.
        padding: inputs of so many groups that play on the padding row.
        sizes: numbers of groups to record, ascending.
    """

    def __init__(
        self,
        play: Play,
        shape: RoundShape,
        padding: Callable[[int], RoundInputs],
        sizes: Sequence[int],
    ) -> None:
        self.shape = shape
        self.sizes = sizes
        self._play = play
        self._padding = padding
        self._recorded: dict[int, _Recorded] = {}

    def warm_up(self, size: int) -> None:
        """Play a round of ``size`` groups, so that a recording of it compiles nothing."""
        self._play(self._padding(size), self.shape)

    def record(self, size: int, record: Record) -> None:
        """Record rounds of ``size`` groups."""
        inputs, padding = self._padding(size), self._padding(size)
        outcome, replay = record(lambda: self._play(inputs, self.shape))
        self._recorded[size] = _Recorded(inputs, padding, outcome, replay)

    def replay_padding(self, size: int) -> None:
        """A round of ``size`` groups that play on the padding row, as all do until a replay."""
        self._recorded[size].replay()

    def replay(self, inputs: RoundInputs) -> Outcome:
        """The round's outcome for inputs ``[G]``, in tensors that the next replay leaves alone.

        Batches larger than any recording play in slices.
        """
        return joined([self._replay(part) for part in inputs.split(self.sizes[-1])])

    def _replay(self, inputs: RoundInputs) -> Outcome:
        size = len(inputs.rows)
        recorded = self._recorded[self.sizes[bisect_left(self.sizes, size)]]
        hold(recorded.inputs, recorded.padding, inputs)
        recorded.replay()
        return recorded.outcome.first(size)


class Recordings:
    """All recorded rounds of a server.

    Args:
        of_budget: the recordings, by the budget that bounds their rounds, None where nothing
            adapts; those that do least first.
        greedy: of single chains, on any budget.
        sizes: that were chosen.
        logprobs: where rounds keep log-probabilities.
        launched: requests of a round that is launched call by call, at most.
    """

    def __init__(
        self,
        of_budget: dict[Budget | None, list[RoundGraphs]],
        greedy: RoundGraphs,
        sizes: Sizes,
        logprobs: LogprobTable,
        launched: int = MOST_LAUNCHED,
    ) -> None:
        self.of_budget = of_budget
        self._greedy = greedy
        self.sizes = sizes
        self.launched = launched
        self._logprobs = logprobs
        self._recorded_logprobs = logprobs.widths
        self._said: set[str] = set()

    def find(self, shape: RoundShape) -> RoundGraphs | None:
        """The first that does what a batch needs; else it is said once why."""
        reason = ""
        for graphs in self._candidates(shape):
            reason = self._why_not(graphs, shape)
            if not reason:
                return graphs
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.info(
                "A batch is not replayed from a recorded round: some request asks for %s. Such "
                "rounds take longer, by what the host needs to launch them, and at most %d "
                "requests play at a time. This is said once.",
                *(reason, self.launched),
            )
        return None

    def describe(self, wanted: Sequence[int]) -> str:
        """Say in words what is recorded, and where that is less than what was ``wanted``."""
        every = {id(one): one for found in self.of_budget.values() for one in found}
        kinds = [self._greedy, *every.values()]
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

    def _candidates(self, shape: RoundShape) -> list[RoundGraphs]:
        """The recordings to look through, those that do least first."""
        found = self.of_budget.get(shape.budget, [])
        if shape.num_particles > 1 or not found:
            return found
        return sorted([self._greedy, *found], key=lambda graphs: graphs.shape.num_rows)

    def _why_not(self, graphs: RoundGraphs, shape: RoundShape) -> str:
        """What hinders a batch; nothing, if all is well."""
        if shape.logprobs.own and self._logprobs.widths != self._recorded_logprobs:
            return f"more log-probabilities than {self._recorded_logprobs}"
        return ", ".join(graphs.shape.lacks(shape))


class Kinds(NamedTuple):
    """What a server records: shapes with the budgets that bound their rounds."""

    most_used: list[tuple[Budget | None, RoundShape]]  # the largest first
    edited: list[tuple[Budget | None, RoundShape]]  # also played on smaller budgets
    any: tuple[Budget | None, RoundShape]  # likewise
    greedy: RoundShape  # likewise

    @classmethod
    def of(cls, config: SMCConfig, logprobs: LogprobWidths) -> "Kinds":
        """What a server of these settings records."""
        bounds = budgets(Budget(config.num_particles, config.num_steps))
        rungs = bounds if config.adaptive else (None,)
        shapes = [(rung, shape_of_server(config, rung)) for rung in rungs]
        chats = [(rung, _filtered(shape)) for rung, shape in shapes]
        most_used = chats if config.adaptive else [*shapes, *chats]
        largest = [one for one in most_used if one[0] == rungs[0]]
        edited = [(rung, shape._replace(edits=True, logprobs=logprobs)) for rung, shape in largest]
        of_any = rungs[0], shape_of_any(config, rungs[0], logprobs)
        return cls(most_used, edited, of_any, _greedy(config))

    @property
    def num_most_used(self) -> int:
        """How many kinds are recorded for all batch sizes."""
        return len(self.most_used) + 1


def _greedy(config: SMCConfig) -> RoundShape:
    """One particle, in a round that bounds its requests to one: the padding row has more."""
    alone = at_temperature_0(config)
    return shape_of_server(alone)._replace(budget=Budget(1, alone.num_steps))


def _filtered(shape: RoundShape) -> RoundShape:
    return shape._replace(kinds=shape.kinds._replace(filtered=True))


def room_of(config: SMCConfig, vocab_size: int, free: int, *, records: bool) -> Room:
    """Return how many requests' rounds fit into ``free`` bytes.

    Args:
        records: rounds are recorded.
    """
    kinds = Kinds.of(config, recorded_logprobs(vocab_size))

    def of(shape: RoundShape, mixes: bool = False) -> int:
        sizes = shape.num_particles, shape.num_steps, vocab_size
        return round_bytes(*sizes, verifies=shape.verifies, mixes=mixes)

    of_any = of(kinds.any[1], mixes=True)
    if not records:
        return Room.without_recordings(free, of_any)
    return Room.beside_recordings(free, max(of(shape) for _, shape in kinds.most_used), of_any)


def record_rounds(
    play: Play,
    config: SMCConfig,
    wanted: Sequence[int],
    tables: Tables,
    device: str,
    record: Record,
    ranks: Ranks,
) -> Recordings:
    """Record all rounds of a server, what takes most memory first.

    Args:
        play: as for `RoundGraphs`.
        wanted: batch sizes, ascending, of which some may be left out.
        tables: that rounds read and write, where they are from now on.
        record: how to.
        ranks: that record the same.

    Raises:
        torch.OutOfMemoryError: where not even the smallest size fits.
    """
    vocab_size = tables.requests.vocab_size
    room = room_of(config, vocab_size, ranks.free_bytes, records=True)
    logprobs = recorded_logprobs(vocab_size)
    kinds = Kinds.of(config, logprobs)
    sizes = plan_sizes(wanted, kinds.num_most_used, len(kinds.edited), room)
    if not sizes.of_rounds:
        raise torch.OutOfMemoryError(
            f"{ranks.free_bytes / 2**30:.2f} GB are free, which hold no round of {wanted[0]} "
            "requests beside one that is launched call by call"
        )
    tables.logprobs.make_room(logprobs)
    tables.edits.make_room()

    def graphs_of(
        budget: Budget | None, shape: RoundShape, of: Sequence[int], config: SMCConfig = config
    ) -> RoundGraphs:
        padding = partial(RoundInputs.of_padding, config, budget, device=device)
        return RoundGraphs(play, shape, padding, of)

    edited = [graphs_of(budget, shape, sizes.of_edited) for budget, shape in kinds.edited]
    of_any = graphs_of(*kinds.any, sizes.of_any)
    found: dict[Budget | None, list[RoundGraphs]] = {}
    for budget, shape in kinds.most_used:
        found.setdefault(budget, []).append(graphs_of(budget, shape, sizes.of_rounds))
    greedy = graphs_of(None, kinds.greedy, sizes.of_rounds, at_temperature_0(config))
    most_used = [graphs for these in found.values() for graphs in these]
    every = [of_any, *edited, *most_used, greedy]
    _record_all(every, record, ranks)
    of_budget = {budget: [*these, *edited, of_any] for budget, these in found.items()}
    launched = min(room.launched, sizes.of_passes[-1])  # so that their passes are replayed
    return Recordings(of_budget, greedy, sizes, tables.logprobs, launched)


def _record_all(of: Sequence[RoundGraphs], record: Record, ranks: Ranks) -> None:
    """Play each round once, then record all: so no warm-up stands beside the recordings' pool.

    The largest of each comes first, so that smaller ones find room in what it has left.
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
    """Log why rounds are not recorded, and which flags help.

    Raises:
        ValueError: with the same, where recordings were asked for by hand, other ranks may have
            them, or the device works no more.
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
    try:
        torch.get_device_module(device).synchronize()
        works = True
    except RuntimeError:
        works = False
    if config.round_graph == "on" or ranks.count > 1 or not works:
        raise ValueError(told) from error
    logger.error("%s This server goes on without them: its rounds take longer.", told)


def graph_sizes(server_args: Arguments) -> list[int]:
    """Batch sizes to capture: those that SGLang would, up to the most that can run."""
    graphs, largest = server_args.cuda_graph_config, server_args.max_running_requests
    assert graphs is not None and largest is not None
    sizes = graphs.decode.bs or [1 << i for i in range(largest.bit_length() + 1)]
    return sorted({min(size, largest) for size in sizes})
