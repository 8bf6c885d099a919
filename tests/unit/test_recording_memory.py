"""Memory is asked before it is taken: what is recorded on which card, and what a failure says."""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_card import Card

from sglang_smc.memory.rounds import SHARE, round_bytes
from sglang_smc.options.server import SMCConfig
from sglang_smc.plan.memory import PREFILL_SHARE, reserved_bytes
from sglang_smc.recording.passes import PassRecording
from sglang_smc.recording.recorder import Ranks, cuda_session
from sglang_smc.recording.sizes import MOST
from sglang_smc.round import graph
from sglang_smc.round.graph import Recordings, record_rounds
from sglang_smc.state.tail_logprobs import LogprobTable
from sglang_smc.worker import SMCWorker

STOCK = [*range(1, 9), *range(10, 34, 2), 40, 44, 48]  # of SGLang, up to 48 requests
# MiB of memory
CARDS = {"L4": 23_034, "RTX 5090": 32_607, "L40S": 46_068, "H100": 81_559, "B300": 275_040}


def left_free(memory: int) -> float:
    """Bytes that are free on a card of so many MiB as recording begins."""
    return (1 - PREFILL_SHARE) * reserved_bytes(memory << 20)


def tables(vocab_size: int) -> Any:
    return SimpleNamespace(
        requests=SimpleNamespace(vocab_size=vocab_size),
        logprobs=LogprobTable(3, 2, 5, "cpu"),
        edits=SimpleNamespace(make_room=lambda: None),
    )


def record(card: Card, config: SMCConfig) -> Recordings:
    """Record rounds and passes, as a server starts."""
    known, model = Ranks(card.total), cast("Any", card)
    with card.in_place(), cuda_session("cuda") as session:
        found = record_rounds(
            model.play, config, STOCK, tables(card.vocab_size), "cpu", session.record, known
        )
        recording = PassRecording(
            session.record, config.num_particles, found.sizes.of_passes, 9, "cpu"
        )
        recording.of(model, "chain_logits", [config.num_steps + 1])
        recording.of(model, "next_logits", [1, 2])
    return found


@pytest.mark.parametrize("memory", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize(
    ("mode", "vocab_size"), [("smc", 128_256), ("exact", 151_936), ("auto", 262_144)]
)
def test_recordings_and_launched_rounds_fit_on_every_card(
    memory: int, vocab_size: int, mode: str
) -> None:
    config = SMCConfig(mode=mode)
    card = Card(left_free(memory), vocab_size)
    found = record(card, config)
    assert card.peak <= SHARE * card.total, "while it records"
    assert card.streams == {"stream"}
    of_any = found.of_budget[None][-1].shape
    launched = found.launched * card.bytes_of(of_any)
    assert card.pool + launched <= SHARE * card.total, "a round call by call beside them"
    assert found.launched >= 4
    assert found.of_budget[None][0].sizes[-1] >= 16
    assert found.launched == found.sizes.of_passes[-1], "slices replay their models' passes"


def test_a_card_says_what_it_leaves_out() -> None:
    """A large one nothing."""
    found = record(Card(left_free(CARDS["H100"]), 128_256), SMCConfig())
    assert all(graphs.sizes[-1] == 48 for graphs in found.of_budget[None])
    assert found.launched == 16
    assert "Memory does not hold" not in found.describe(STOCK)
    found = record(Card(left_free(CARDS["L4"]), 128_256), SMCConfig(mode="exact"))
    told = found.describe(STOCK)
    sizes = [graphs.sizes[-1] for graphs in found.of_budget[None]]
    assert f"up to {sizes[0]} requests are recorded, of up to {sizes[-1]}" in told
    for flag in ("--mem-fraction-static", "--max-running-requests", "--cuda-graph-bs-decode"):
        assert flag in told


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_start_plays_each_recorded_round_twice(is_adaptive: bool) -> None:
    """To compile its kernels, and to capture it."""
    card = Card(1e12, 128_256)
    found = record(card, SMCConfig(adaptive=is_adaptive))
    num_rounds = card.num_captured - 3 * len(found.sizes.of_passes)
    assert card.num_played == 2 * num_rounds
    assert card.num_captured <= MOST


def test_no_size_fits() -> None:
    card = Card(1e8, 262_144)
    with pytest.raises(torch.OutOfMemoryError, match="hold no round of 1 requests"):
        record(card, SMCConfig())
    assert not card.num_played


@pytest.mark.parametrize("count", [1, 2])
def test_all_ranks_go_by_the_least_memory(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(value: torch.Tensor, op: Any, group: str) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MIN, "over the host")
        value.clamp_(max=5 << 30)  # what another rank has

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    group = SimpleNamespace(world_size=count, rank_in_group=count - 1, cpu_group="over the host")
    with Card(8 << 30, 1000).in_place():
        found = Ranks.of(group, "cuda")
    assert found == ((5 if count == 2 else 8) << 30, count, count - 1)


class Server(SMCWorker):
    """A worker whose recording is all that there is of it, on a card."""

    def __init__(self, card: Card, config: SMCConfig, tp_size: int = 1) -> None:
        drafts = SimpleNamespace(has_stock_passes=False, state_bytes=0)
        self._steps: Any = SimpleNamespace(draft=drafts, record_passes=lambda *_: None)
        self.config, self.device, self.card, self.tp_size = config, "cuda", card, tp_size
        self._tables = tables(card.vocab_size)
        self._tables.begin_padding = lambda *_: None
        self._states: Any = SimpleNamespace(padding=lambda: None)
        self._round: Any = SimpleNamespace(play=card.play)
        self._graph_sizes, self._recordings = STOCK, None
        self._target_worker = self._draft_worker = self._corpus = None  # type: ignore[assignment]
        self._round_graph_gigabytes = 0.0
        self._additional_graph_memory_usage: dict[str, float] = {}
        self._additional_graph_time_usage: dict[str, float] = {}

    def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = SimpleNamespace(world_size=self.tp_size, rank_in_group=0, cpu_group=None)
        parallel = SimpleNamespace(tp_group=group)
        monkeypatch.setattr("sglang_smc.worker.get_parallel", lambda: parallel)
        monkeypatch.setattr("sglang_smc.process.measure_memory_by", lambda _: None)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        # Padding would be copied to a device that is not there.
        padding = graph.RoundInputs.of_padding
        monkeypatch.setattr(
            graph.RoundInputs, "of_padding", lambda *a, device: padding(*a, device="cpu")
        )
        with self.card.in_place():
            self.init_cuda_graphs()


def test_a_server_records_and_says_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = Server(Card(left_free(CARDS["L40S"]), 128_256), SMCConfig())
    server.start(monkeypatch)
    assert server._recordings is not None and server._most_launched == server._recordings.launched
    [line] = [one for one in caplog.messages if "round graphs" in one]
    gigabytes = server.card.pool / 2**30
    assert f"{gigabytes:.2f} GB of {server.card.total / 2**30:.2f} GB that were free" in line
    assert "up to 48 requests are recorded, of up to 32" in line
    assert server._additional_graph_memory_usage == {"smc_round": gigabytes}
    assert server._additional_graph_time_usage["smc_round"] >= 0


def short(card: Card) -> Card:
    """A card of which something takes the larger part, after it was asked what is free."""
    card.short_of = card.total * 3 // 5
    return card


def test_where_memory_runs_short_less_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(short(Card(left_free(CARDS["H100"]), 128_256)), SMCConfig())
    server.start(monkeypatch)
    assert server._recordings is not None
    assert server._recordings.of_budget[None][-1].sizes[-1] in (16, 32)
    launched = (server._most_launched or 0) * round_bytes(8, 8, 128_256, mixes=True)
    assert server.card.pool + launched <= server.card.total - server.card.short_of


def test_one_rank_of_several_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it in the round that it has left."""
    server = Server(short(Card(left_free(CARDS["H100"]), 128_256)), SMCConfig(), tp_size=2)
    with pytest.raises(ValueError, match="--mem-fraction-static"):
        server.start(monkeypatch)
    assert server.card.num_played == 1


FAILURES = {
    "compiler": RuntimeError("Triton Error [CUDA]: invalid device function"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_server_goes_on_without_recordings(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(Card(left_free(CARDS["L40S"]), 128_256), SMCConfig())
    monkeypatch.setattr(server.card, "play", partial(failing, FAILURES[name]))
    server._round.play = server.card.play
    server.start(monkeypatch)
    assert server._recordings is None
    most = SHARE * server.card.total // round_bytes(8, 8, 128_256, mixes=True)
    assert server._most_launched == most
    [line] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert str(FAILURES[name]) in line.getMessage()
    assert "--speculative-smc-round-graph off" in line.getMessage()
    assert ("--max-running-requests" in line.getMessage()) == (name == "memory")


@pytest.mark.parametrize(
    ("asked", "tp_size", "breaks"), [("on", 1, 0), ("auto", 2, 0), ("auto", 1, 1)]
)
@pytest.mark.parametrize("name", FAILURES)
def test_a_server_that_cannot_go_on_without_them_names_flags(
    name: str, asked: str, tp_size: int, breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording was asked for by hand, other ranks may have recorded, or the device is lost."""
    server = Server(Card(1e12, 1000), SMCConfig(round_graph=asked), tp_size)
    server._round.play = partial(failing, FAILURES[name])
    if breaks:
        lost = RuntimeError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(graph.torch, "get_device_module", lambda _: Lost(lost))
    with pytest.raises(ValueError, match="--speculative-smc-round-graph off") as told:
        server.start(monkeypatch)
    assert told.value.__cause__ is FAILURES[name]


def failing(error: Exception, *_: Any) -> None:
    raise error


class Lost:
    """A device that answers nothing any more."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def empty_cache(self) -> None: ...

    def mem_get_info(self, _: str) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def synchronize(self) -> None:
        raise self._error
