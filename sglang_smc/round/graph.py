"""Rounds as CUDA graphs: one launch instead of some thousand, recorded as the server starts.

A round has no shape that depends on values, and waits for nothing. So all of it, draft passes,
verification, weights, resampling, commit and bonus, can be recorded with its kernels' arguments,
once for each of a few batch sizes, and replayed for any batch that is no larger. What a batch does
not fill plays on SGLang's padding row, whose particles have all ended.

A server records its rounds in up to four variants, and replays the first that does all that a
batch needs:

    greedy   what the server's own settings ask for, with one chain for each request: temperature 0
    plain    the same with all of its particles
    chat     and top-k, top-p, min-p, which the models people run ask for by default
    any      and all else that a device can decide: other modes, methods and powers, edited logits,
             log-probabilities, all particles

Where N and K adapt, each budget has recordings of the third, and the largest one of the others.
What only the host can decide is played as it is, with the models' passes replayed.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tqdm import tqdm

from sglang_smc.options.budget import Budget, budgets
from sglang_smc.options.request import at_temperature_0
from sglang_smc.options.server import SMCConfig
from sglang_smc.recording.recorder import Record, Replay, hold
from sglang_smc.recording.sizes import Sizes, plan_sizes
from sglang_smc.round.batch import RoundInputs, RoundShape, shape_of_any, shape_of_server
from sglang_smc.round.result import Outcome
from sglang_smc.round.tables import Tables
from sglang_smc.state.tail_logprobs import LogprobTable, LogprobWidths, recorded_logprobs
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

    def record(self, size: int, record: Record) -> None:
        """Record rounds of ``size`` groups."""
        inputs, padding = self._padding(size), self._padding(size)
        outcome, replay = record(lambda: self._play(inputs, self.shape))
        self._recorded[size] = _Recorded(inputs, padding, outcome, replay)

    def replay_padding(self, size: int) -> None:
        """A round of ``size`` groups that play on the padding row, as all do until a replay."""
        self._recorded[size].replay()

    def replay(self, inputs: RoundInputs) -> Outcome:
        """The round's outcome for inputs ``[G]``, in tensors that the next replay leaves alone."""
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
    """

    def __init__(
        self,
        of_budget: dict[Budget | None, list[RoundGraphs]],
        greedy: RoundGraphs,
        sizes: Sizes,
        logprobs: LogprobTable,
    ) -> None:
        self.of_budget = of_budget
        self._greedy = greedy
        self.sizes = sizes
        self._logprobs = logprobs
        self._recorded_logprobs = logprobs.widths
        self._said: set[str] = set()

    def find(self, shape: RoundShape, size: int) -> RoundGraphs | None:
        """The first that does what a batch of ``size`` groups needs; else it is said once why."""
        reason = ""
        for graphs in self._candidates(shape):
            reason = self._why_not(graphs, shape, size)
            if not reason:
                return graphs
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.info(
                "A batch of %d requests is not replayed from a recorded round: %s. Such rounds "
                "take longer, by what the host needs to launch them. This is said once.",
                *(size, reason),
            )
        return None

    def _candidates(self, shape: RoundShape) -> list[RoundGraphs]:
        """The recordings to look through, those that do least first."""
        found = self.of_budget.get(shape.budget, [])
        if shape.num_particles > 1 or not found:
            return found
        return sorted([self._greedy, *found], key=lambda graphs: graphs.shape.num_rows)

    def _why_not(self, graphs: RoundGraphs, shape: RoundShape, size: int) -> str:
        """What hinders a batch; nothing, if all is well."""
        if size > graphs.sizes[-1]:
            return f"the largest that is recorded has {graphs.sizes[-1]} requests"
        if shape.logprobs.own and self._logprobs.widths != self._recorded_logprobs:
            return f"some request asked for more log-probabilities than {self._recorded_logprobs}"
        return ", ".join(graphs.shape.lacks(shape))


class Kinds(NamedTuple):
    """What a server records: shapes with the budgets that bound their rounds."""

    most_used: list[tuple[Budget | None, RoundShape]]  # the largest first
    any: tuple[Budget | None, RoundShape]  # also played on smaller budgets
    greedy: RoundShape  # likewise

    @classmethod
    def of(cls, config: SMCConfig, logprobs: LogprobWidths) -> "Kinds":
        """What a server of these settings records."""
        bounds = budgets(Budget(config.num_particles, config.num_steps))
        rungs = bounds if config.adaptive else (None,)
        shapes = [(rung, shape_of_server(config, rung)) for rung in rungs]
        chats = [(rung, _filtered(shape)) for rung, shape in shapes]
        most_used = chats if config.adaptive else [*shapes, *chats]
        of_any = rungs[0], shape_of_any(config, rungs[0], logprobs)
        return cls(most_used, of_any, _greedy(config))

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


def record_rounds(
    play: Play,
    config: SMCConfig,
    wanted: Sequence[int],
    tables: Tables,
    device: str,
    record: Record,
) -> Recordings:
    """Record all rounds of a server, what takes most memory first.

    Args:
        play: as for `RoundGraphs`.
        wanted: batch sizes, ascending, of which some may be left out.
        tables: that rounds read and write, where they are from now on.
        record: how to.
    """
    logprobs = recorded_logprobs(tables.requests.vocab_size)
    tables.logprobs.make_room(logprobs)
    tables.edits.make_room()
    kinds = Kinds.of(config, logprobs)
    sizes = plan_sizes(wanted, kinds.num_most_used)

    def graphs_of(
        budget: Budget | None, shape: RoundShape, of: Sequence[int], config: SMCConfig = config
    ) -> RoundGraphs:
        padding = partial(RoundInputs.of_padding, config, budget, device=device)
        return RoundGraphs(play, shape, padding, of)

    of_any = graphs_of(*kinds.any, sizes.of_any)
    found: dict[Budget | None, list[RoundGraphs]] = {}
    for budget, shape in kinds.most_used:
        found.setdefault(budget, []).append(graphs_of(budget, shape, sizes.of_rounds))
    greedy = graphs_of(None, kinds.greedy, sizes.of_rounds, at_temperature_0(config))
    _record_all([of_any, *(graphs for these in found.values() for graphs in these), greedy], record)
    of_budget = {budget: [*these, of_any] for budget, these in found.items()}
    return Recordings(of_budget, greedy, sizes, tables.logprobs)


def _record_all(of: Sequence[RoundGraphs], record: Record) -> None:
    """The largest of each first, so that smaller ones find room in what it has left."""
    jobs = [(graphs, size) for graphs in of for size in reversed(graphs.sizes)]
    for graphs, size in tqdm(jobs, desc="Capturing SMC rounds", unit="graph"):
        graphs.record(size, record)


def graph_sizes(server_args: Arguments) -> list[int]:
    """Batch sizes to capture: those that SGLang would, up to the most that can run."""
    graphs, largest = server_args.cuda_graph_config, server_args.max_running_requests
    assert graphs is not None and largest is not None
    sizes = graphs.decode.bs or [1 << i for i in range(largest.bit_length() + 1)]
    return sorted({min(size, largest) for size in sizes})
