"""Recording device work as CUDA graphs that share their memory."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from sglang_smc import upstream

logger = logging.getLogger(__name__)

T = TypeVar("T")

Replay = Callable[[], None]

MOST_OF_LARGEST = 1.3
"""Memory of all recordings, over that of the largest: more says that they do not share it."""

_UNSHARED = 1 << 29  # bytes that recordings may keep for themselves: inputs, results, workspaces


class Record(Protocol):
    """Runs a function, and returns what it returned with a way to compute that anew, in place.

    The function has run before: its kernels are compiled, and libraries have their workspaces.
    """

    def __call__(self, run: Callable[[], T]) -> tuple[T, Replay]: ...


def hold(
    inputs: Iterable[torch.Tensor],
    padding: Iterable[torch.Tensor],
    values: Iterable[torch.Tensor],
) -> None:
    """Let a recording's inputs hold ``values``, which may be smaller, and padding around them."""
    for column, rest, value in zip(inputs, padding, values, strict=True):
        if value.shape != column.shape:
            column.copy_(rest)
        column[tuple(map(slice, value.shape))].copy_(value)


class Usage(NamedTuple):
    """What recordings cost."""

    gigabytes: float
    seconds: float


class Ranks(NamedTuple):
    """The ranks that make the same recordings, each on its own device."""

    free_bytes: int = 1 << 60  # on the device that has the least
    count: int = 1
    index: int = 0  # of this rank

    @classmethod
    def of(cls, group: Any, device: str) -> "Ranks":
        """Read the memory that is free; every rank of SGLang's ``group`` must call it."""
        torch.get_device_module(device).empty_cache()
        free = torch.tensor(_free_bytes(device))
        if group.world_size > 1:
            torch.distributed.all_reduce(
                free, torch.distributed.ReduceOp.MIN, group=group.cpu_group
            )
        return cls(int(free), group.world_size, group.rank_in_group)


class Session:
    """Recordings made one after another, and what they take.

    Args:
        record: how to record.
        device: whose memory is watched.
    """

    def __init__(self, record: Record, device: str) -> None:
        self._record = record
        self._device = device
        self._start = time.monotonic()
        self._free = _free_bytes(device)
        self._largest: int | None = None

    def record(self, run: Callable[[], T]) -> tuple[T, Replay]:
        """Record; the first is to be the largest."""
        recorded = self._record(run)
        if self._largest is None:
            self._largest = self._taken()
        return recorded

    def usage(self, recorded: str) -> Usage:
        """Return what all recordings cost, and log it; a warning says that they share no memory.

        Args:
            recorded: what they are, in words.
        """
        taken, largest = self._taken(), self._largest or 0
        usage = Usage(taken / 2**30, time.monotonic() - self._start)
        logger.info(
            "SMC round graphs: %.2f GB of %.2f GB that were free, %.1f s; the largest alone: "
            "%.2f GB. %s",
            *(usage.gigabytes, self._free / 2**30, usage.seconds, largest / 2**30, recorded),
        )
        if taken > MOST_OF_LARGEST * largest + _UNSHARED:
            logger.warning(
                "SMC's recorded rounds take %.2f GB, and the largest alone %.2f GB: they should "
                "share their memory. If it runs short, pass fewer sizes to --cuda-graph-bs-decode, "
                "or --speculative-smc-round-graph off.",
                *(taken / 2**30, largest / 2**30),
            )
        return usage

    def _taken(self) -> int:
        return self._free - _free_bytes(self._device)


@contextmanager
def cuda_session(device: str) -> Iterator[Session]:
    """Record CUDA graphs, all on one stream and from one pool.

    The stream matters: the allocator keeps blocks by stream in a pool, too, so that graphs which
    were recorded on two streams share nothing. The largest comes first, and smaller ones fit into
    what it has left free.
    """
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner import freeze_gc
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang.srt.runtime_context import get_server_args

    pool = torch.cuda.graph_pool_handle()
    keeps_gc = upstream.resolved(get_server_args()).enable_cudagraph_gc
    with torch.no_grad(), freeze_gc(keeps_gc), graph_capture() as context, model_capture_mode():
        stream: Any = context.stream  # CUDA's

        def record(run: Callable[[], T]) -> tuple[T, Replay]:
            graph = torch.cuda.CUDAGraph()
            # It empties the allocator's cache first: what warm-ups took is not the pool's.
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = run()
            return result, graph.replay

        yield Session(record, device)


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cpu":
        return 0
    return torch.get_device_module(device).mem_get_info(device)[0]
