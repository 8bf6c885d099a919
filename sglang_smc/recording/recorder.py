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
    """Runs a function, and returns what it returned with a way to compute that anew, in place."""

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

    def usage(self) -> Usage:
        """What all recordings cost; logged, with a warning where they share no memory."""
        taken, largest = self._taken(), self._largest or 0
        usage = Usage(taken / 2**30, time.monotonic() - self._start)
        logger.info(
            "SMC round graphs: %.2f GB, %.1f s; the largest alone: %.2f GB",
            *(*usage, largest / 2**30),
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
            for _ in range(2):  # compile kernels, and let libraries take their workspaces
                run()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what these runs took is not the pool's
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = run()
            return result, graph.replay

        yield Session(record, device)


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cpu":
        return 0
    return torch.get_device_module(device).mem_get_info(device)[0]
