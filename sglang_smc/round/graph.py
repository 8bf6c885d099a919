"""Rounds as CUDA graphs: one launch instead of some thousand, captured once per batch size.

A round has no shape that depends on values, and waits for nothing. So all of it, draft passes,
verification, weights, resampling, commit and bonus, can be recorded with its kernels' arguments,
once for each of a few batch sizes, and replayed for any batch that is no larger. What a batch does
not fill plays on SGLang's padding row, whose particles have all ended.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from tqdm import tqdm

from sglang_smc.options.budget import Budget, budgets
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import RoundInputs, RoundShape, shape_of_server
from sglang_smc.round.result import Outcome

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

Play = Callable[[RoundInputs, RoundShape], Outcome]
Replay = Callable[[], None]
Record = Callable[[Callable[[], Outcome]], tuple[Outcome, Replay]]
"""Runs a function and returns what it returned, with a way to compute it anew, in place."""


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
        sizes: numbers of groups to record.
        record: how to record: `cuda_recorder`, or something that runs anywhere.
    """

    def __init__(
        self,
        play: Play,
        shape: RoundShape,
        padding: Callable[[int], RoundInputs],
        sizes: Sequence[int],
        record: Record,
    ) -> None:
        self._play = play
        self._shape = shape
        self._padding = padding
        self._sizes = sorted(set(sizes))
        self._record = record
        self._recorded: dict[int, _Recorded] = {}

    def capture(self) -> None:
        """Record all sizes, the largest first, so that smaller ones reuse its memory."""
        for size in tqdm(self._sizes[::-1], desc="Capturing SMC rounds", unit="graph"):
            inputs, padding = self._padding(size), self._padding(size)
            outcome, replay = self._record(lambda inputs=inputs: self._play(inputs, self._shape))
            self._recorded[size] = _Recorded(inputs, padding, outcome, replay)

    def replay_padding(self, size: int) -> None:
        """A round of ``size`` groups that play on the padding row, as all do until a replay."""
        self._recorded[size].replay()

    @property
    def sizes(self) -> list[int]:
        """Numbers of groups, ascending."""
        return self._sizes

    def fits(self, shape: RoundShape, size: int) -> bool:
        """Whether a batch of ``size`` groups can be replayed."""
        return size <= self._sizes[-1] and self._shape.covers(shape)

    def replay(self, inputs: RoundInputs) -> Outcome:
        """The round's outcome for inputs ``[G]``, in tensors that the next replay leaves alone."""
        size = len(inputs.rows)
        recorded = self._recorded[self._sizes[bisect_left(self._sizes, size)]]
        for column, values, padding in zip(recorded.inputs, inputs, recorded.padding, strict=True):
            column[..., :size] = values
            column[..., size:] = padding[..., size:]
        recorded.replay()
        return recorded.outcome.first(size)


Graphs = dict[Budget | None, RoundGraphs]
"""Recordings by the budget that bounds their rounds; None where nothing adapts."""


def capture_all(
    play: Play, config: SMCConfig, sizes: Sequence[int], device: str, record: Record
) -> Graphs:
    """Capture rounds, and where N and K adapt those of all budgets, the largest first.

    Arguments as for `RoundGraphs`.
    """
    top = Budget(config.num_particles, config.num_steps)
    found: Graphs = {}
    for budget in budgets(top) if config.adaptive else (None,):
        shape = shape_of_server(config, budget)
        padding = partial(RoundInputs.of_padding, config, budget, device=device)
        found[budget] = RoundGraphs(play, shape, padding, sizes, record)
        found[budget].capture()
    return found


def cuda_recorder() -> Record:
    """Records CUDA graphs, which share one pool of memory."""
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Outcome]) -> tuple[Outcome, Replay]:
        graph = torch.cuda.CUDAGraph()
        with graph_capture() as context, model_capture_mode():
            for _ in range(2):  # compile kernels, and let allocations settle
                run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=pool, stream=context.stream):
                outcome = run()
        return outcome, graph.replay

    return record


class Usage(NamedTuple):
    """What a capture cost."""

    gigabytes: float
    seconds: float


@contextmanager
def usage_of(device: str) -> Iterator[list[Usage]]:
    """Yields a list that holds the `Usage` of the block afterwards."""
    usage: list[Usage] = []
    free, start = torch.cuda.mem_get_info(device)[0], time.monotonic()
    yield usage
    used = free - torch.cuda.mem_get_info(device)[0]
    usage.append(Usage(used / 2**30, time.monotonic() - start))
    logger.info("SMC round graphs: %.2f GB, %.1f s", *usage[0])


def graph_sizes(server_args: "ServerArgs") -> list[int]:
    """Batch sizes to capture: those that SGLang would, up to the most that can run."""
    graphs, largest = server_args.cuda_graph_config, server_args.max_running_requests
    assert graphs is not None and largest is not None
    sizes = graphs.decode.bs or [1 << i for i in range(largest.bit_length() + 1)]
    return sorted({min(size, largest) for size in sizes})
