"""Capture device work as CUDA graphs that share their memory, and replay model passes.

A round that needs the host cannot be captured as a whole. Its model passes can, and they account
for most of its kernel launches.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import le
from typing import Any, NamedTuple, TypeVar

import torch

from sglang_smc import upstream
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward

logger = logging.getLogger(__name__)

T = TypeVar("T")

Replay = Callable[[], None]

MOST_OF_LARGEST = 1.3
"""Memory of all graphs over that of the largest, above which they do not share it."""

_UNSHARED = 1 << 29  # bytes that graphs may keep for themselves: inputs, results, workspaces


Record = Callable[[Callable[[], T]], tuple[T, Replay]]
"""Runs a function, and returns its result with a replay that recomputes it in place.

The function has run before: its kernels are compiled, and libraries have their workspaces."""


class Captured(NamedTuple):
    """A function whose result a graph recomputes in place, from inputs in place."""

    inputs: Iterable[torch.Tensor]
    padding: Iterable[torch.Tensor]  # inputs on SGLang's padding row
    result: Any
    replay: Replay

    def of(self, values: Iterable[torch.Tensor]) -> Any:
        """Return the result for ``values``; where they are smaller, padding fills the rest."""
        for column, rest, value in zip(self.inputs, self.padding, values, strict=True):
            if value.shape != column.shape:
                column.copy_(rest)
            column[tuple(map(slice, value.shape))].copy_(value)
        self.replay()
        return self.result


class Ranks(NamedTuple):
    """The ranks that capture the same graphs, each on its own device."""

    free_bytes: int = 1 << 60  # on the device with the least free memory
    count: int = 1
    index: int = 0  # of this rank

    @classmethod
    def of(cls, group: Any, device: str) -> "Ranks":
        """Measure free memory; every rank of SGLang's ``group`` must call it."""
        torch.get_device_module(device).empty_cache()
        free = torch.tensor(_free_bytes(device))
        if group.world_size > 1:
            torch.distributed.all_reduce(
                free, torch.distributed.ReduceOp.MIN, group=group.cpu_group
            )
        return cls(int(free), group.world_size, group.rank_in_group)


class Session:
    """A sequence of captures by ``record``, and the memory that they take on a device."""

    def __init__(self, record: Record, device: str) -> None:
        self._record = record
        self._device = device
        self._start = time.monotonic()
        self._free = _free_bytes(device)
        self._largest: int | None = None

    def record(self, run: Callable[[], T]) -> tuple[T, Replay]:
        """Capture a function; the first must be the largest."""
        recorded = self._record(run)
        if self._largest is None:
            self._largest = self._taken()
        return recorded

    def usage(self, recorded: str) -> tuple[float, float]:
        """Return and log the gigabytes and seconds of graphs; warn if they share no memory."""
        taken = self._taken()
        largest = self._largest or 0
        gigabytes = taken / 2**30
        seconds = time.monotonic() - self._start
        logger.info(
            "SMC round graphs: %.2f GB of %.2f GB that were free, %.1f s; the largest alone: "
            "%.2f GB. %s",
            gigabytes,
            self._free / 2**30,
            seconds,
            largest / 2**30,
            recorded,
        )
        if taken > MOST_OF_LARGEST * largest + _UNSHARED:
            logger.warning(
                "SMC's captured rounds take %.2f GB, and the largest alone %.2f GB: they should "
                "share their memory. If it runs short, pass fewer sizes to --cuda-graph-bs-decode, "
                "or --speculative-smc-round-graph off.",
                gigabytes,
                largest / 2**30,
            )
        return gigabytes, seconds

    def _taken(self) -> int:
        return self._free - _free_bytes(self._device)


@contextmanager
def cuda_session(device: str) -> Iterator[Session]:
    """Capture CUDA graphs, all on one stream and from one memory pool.

    The stream matters: the allocator keeps blocks by stream, in a pool too, so that graphs captured
    on two streams share nothing. The largest is captured first, and smaller ones fit into the
    blocks that it has freed.
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
            # It empties the allocator's cache first: blocks of warm-ups are not in the pool.
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = run()
            return result, graph.replay

        yield Session(record, device)


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cpu":
        return 0
    return torch.get_device_module(device).mem_get_info(device)[0]


class PassRecording(NamedTuple):
    """The parameters with which a server captures the passes of its models."""

    record: Record
    num_particles: int  # of a request
    sizes: Sequence[int]  # of batches, in requests
    max_tail: int  # of `KVLocations`
    device: str

    def of(self, forward: ParticleForward, name: str, columns: Sequence[int]) -> ParticleForward:
        """Return a copy of a model whose passes ``name`` are replayed, or run where no graph fits.

        Replays of "chain_logits" are overwritten by the next one, those of "next_logits" are not.

        Args:
            columns: lengths of chains for which it is captured.
        """
        sizes = sorted(self.sizes, reverse=True)
        captures = {
            (size, self.num_particles, num_columns): self._capture(forward, name, size, num_columns)
            for num_columns in columns
            for size in sizes
        }
        of_chains = name == "chain_logits"
        run = getattr(forward, name)

        def replayed(chains: Chains) -> torch.Tensor:
            size, num_particles, num_columns = shape = chains.tokens.shape
            is_chain = of_chains and num_particles * num_columns > 1  # a head keeps single tokens
            for room, captured in reversed(captures.items()):  # the smallest of a length first
                # The logits of a chain's last token are at another place of a longer chain.
                as_long = is_chain or num_columns == room[2]
                if as_long and all(map(le, shape, room)):
                    logits = captured.of(chains.tensors)[:size, :num_particles]
                    return logits[:, :, :num_columns] if of_chains else logits.clone()
            return run(chains)

        recorded = copy(forward)
        setattr(recorded, name, replayed)
        return recorded

    def _capture(
        self, forward: ParticleForward, name: str, size: int, num_columns: int
    ) -> Captured:
        shape = size, self.num_particles, num_columns
        inputs, padding = (Chains.of_padding(shape, self.max_tail, self.device) for _ in range(2))
        run = partial(getattr(forward, name), inputs)
        run()  # warm-up, see `Record`
        result, replay = self.record(run)
        return Captured(inputs.tensors, padding.tensors, result, replay)
