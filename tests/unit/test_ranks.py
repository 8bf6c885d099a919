"""Tensor-parallel ranks end the same requests whatever their clocks say, and tell if they part."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from sglang.srt.distributed import parallel_state
from toy_grammar import maker
from toy_request import begun, ended

from sglang_smc.potentials import Potential, Text
from sglang_smc.potentials.runner import PotentialRunner
from sglang_smc.rules.base import BatchTexts
from sglang_smc.rules.grammar import Grammar
from sglang_smc.rules.potentials import Potentials
from sglang_smc.state.ranks import INTERVAL, RankCheck

CLOCKS = ("monotonic", "perf_counter", "thread_time")
ENDED = object()


class FakeRanks:
    """So many ranks as threads of one process, in place of SGLang's groups and of the clocks.

    What they exchange is real. One that asks for an exchange more or less than the others fails the
    test instead of waiting for ever.

    Args:
        rank_seconds: by rank, the seconds that pass from each look at a clock to the next.
    """

    def __init__(self, patch: pytest.MonkeyPatch, rank_seconds: tuple[float, ...]) -> None:
        self.world_size = len(rank_seconds)
        self.cpu_group = self
        self.rank_seconds = rank_seconds
        self._own = threading.local()
        self._boxes: list[list[SimpleQueue[Any]]]  # by sender and receiver
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
        ranks = range(self.world_size)
        self._boxes = [[SimpleQueue() for _ in ranks] for _ in ranks]

        def play(rank: int) -> Any:
            self._own.rank = rank
            try:
                return of_rank(rank)
            except Exception as error:
                return error
            finally:
                self._send(ENDED)

        with ThreadPoolExecutor(self.world_size) as threads:
            return list(threads.map(play, ranks))

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        return self._exchange(value)[src]

    def _send(self, value: Any) -> None:
        for box in self._boxes[self.rank_in_group]:
            box.put(value)

    def _exchange(self, value: Any) -> list[Any]:
        self._send(value)
        found = [boxes[self.rank_in_group].get() for boxes in self._boxes]
        assert all(one is not ENDED for one in found), "another rank ended without this exchange"
        return found

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


VOCAB = 27
# seconds that a look at the clock takes
SLOW_FIRST = (3600.0, 0.0)
SLOW_SECOND = (0.0, 3600.0)


@pytest.fixture(params=[SLOW_FIRST, SLOW_SECOND], ids=["first", "second"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    return FakeRanks(monkeypatch, request.param)


def test_grammars(ranks: FakeRanks) -> None:
    """Both ranks end it, in the round behind the one that was slow on one of them."""
    make = maker("(a|b)*", vocab_size=VOCAB)

    def of_rank(rank: int) -> list[bool]:
        req = begun({}, grammar=make())
        told = []
        for _ in range(3):
            Grammar(BatchTexts([req], None, VOCAB, "cpu"))
            told.append(req.to_finish is not None)
        return told

    assert ranks.run(of_rank) == [[False, True, True]] * 2


class Stuck(Potential):
    def __init__(self) -> None:
        self.go = threading.Event()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        self.go.wait()
        return [1.0] * len(texts)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    potential = Stuck()
    yield potential
    potential.go.set()


def test_potentials(ranks: FakeRanks, stuck: Stuck) -> None:
    """The first rank alone asks: where its time is up, both end the request."""
    is_late = ranks.rank_seconds[0] > 0
    if not is_late:
        stuck.go.set()

    def of_rank(rank: int) -> Any:
        req = begun({"potentials": [{"name": "stuck"}]})
        (spec,) = req.smc_state.config.potentials
        req.smc_state.potentials = (spec.resolve({"stuck": stuck}),)
        req.smc_state.runners = (PotentialRunner("stuck", stuck, 600.0),)
        Potentials.begin(req)
        scores = Potentials(ended([req], [[[1], [1, 1]]])).result()[0]
        return scores.log_values, req.to_finish and req.to_finish.status_code

    expected = ([None, None], 503) if is_late else ([1.0, 1.0], None)
    assert ranks.run(of_rank) == [expected] * 2


def emit(rounds: list[list[list[int]]]) -> RankCheck:
    check = RankCheck()
    for tokens in rounds:
        check.add(tokens)
    return check


def test_ranks_that_part_end_with_the_round_in_which_they_did(ranks: FakeRanks) -> None:
    alike = [[[round_, 1], [2]] for round_ in range(2 * INTERVAL)]
    assert all(isinstance(found, RankCheck) for found in ranks.run(lambda _: emit(alike)))
    at = INTERVAL + 4
    theirs = [alike, [*alike[:at], [[at, 1], [3]], *alike[at + 1 :]]]
    for error in ranks.run(lambda rank: emit(theirs[rank])):
        assert isinstance(error, RuntimeError)
        assert f"in round {at + 1} since its start" in str(error)
        assert "--speculative-smc-round-graph off" in str(error)


def test_one_rank_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRanks(monkeypatch, (0.0,))
    assert not emit([[[1]]] * INTERVAL)._digests
