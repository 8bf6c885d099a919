"""Tensor-parallel ranks as threads of one process, each with a clock of its own.

They stand where SGLang's process group is asked for; what they exchange is real. A rank that asks
for one exchange more or less than the others fails the test instead of waiting for ever.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.distributed import parallel_state

CLOCKS = ("monotonic", "perf_counter", "thread_time")


class FakeRanks:
    """So many ranks, in place of SGLang's groups and of the clocks.

    Args:
        rank_seconds: by rank, the seconds that pass from each look at a clock to the next.
    """

    def __init__(self, patch: pytest.MonkeyPatch, rank_seconds: tuple[float, ...]) -> None:
        self.world_size = len(rank_seconds)
        self.cpu_group = self
        self.rank_seconds = rank_seconds
        self._own = threading.local()
        self._lock = threading.Condition()
        self._box: dict[int, Any] = {}
        self._exchanges: list[list[Any]] = []
        self._num_done = 0
        patch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
        patch.setattr(parallel_state, "get_tp_group", lambda: self)
        patch.setattr(torch.distributed, "all_reduce", self._all_reduce)
        patch.setattr(torch.distributed, "all_gather", self._all_gather)
        for name in CLOCKS:
            patch.setattr(time, name, self._now)

    @property
    def rank_in_group(self) -> int:
        return self._own.rank

    def run(self, of_rank: Callable[[int], Any]) -> list[Any]:
        """What each rank returns, or raises."""
        found: list[Any] = [None] * self.world_size
        self._num_done = 0

        def play(rank: int) -> None:
            self._own.rank = rank
            try:
                found[rank] = of_rank(rank)
            except Exception as error:
                found[rank] = error
            with self._lock:
                self._num_done += 1
                self._lock.notify_all()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        return self._exchange(value)[src]

    def _exchange(self, value: Any) -> list[Any]:
        with self._lock:
            index = len(self._exchanges)
            self._box[self.rank_in_group] = value
            if len(self._box) == self.world_size:
                self._exchanges.append([self._box.pop(rank) for rank in range(self.world_size)])
                self._lock.notify_all()
            self._lock.wait_for(lambda: len(self._exchanges) > index or self._num_done)
            assert len(self._exchanges) > index, "another rank has ended without this exchange"
            return self._exchanges[index]

    def _all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX and group is self
        tensor.copy_(torch.stack(self._exchange(tensor.clone())).amax(0))

    def _all_gather(self, into: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
        assert group is self
        for place, value in zip(into, self._exchange(tensor), strict=True):
            place.copy_(value)

    def _now(self) -> float:
        own = self._own.__dict__
        own["now"] = own.get("now", 0.0) + self.rank_seconds[own.get("rank", 0)]
        return own["now"]
