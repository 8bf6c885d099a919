"""What is recorded of which sizes, what memory it may take, and what a failure says."""

import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from sglang_smc.kv.rounds import LOGIT_BYTES, PRODUCT_BYTES, SHARE, round_bytes
from sglang_smc.models import recorder
from sglang_smc.models.chains import Chains
from sglang_smc.models.recorder import PassRecording, Ranks, Session, cuda_session
from sglang_smc.options.request import OFF, Budget, budgets
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.layer_choice import LayerChoice
from sglang_smc.round import capture, graph
from sglang_smc.round.batch import RoundInputs, RoundShape, shape_of_server
from sglang_smc.round.graph import MOST, Kinds, Recordings, RoundGraphs, plan_sizes, thinned
from sglang_smc.smc.settings import Need
from sglang_smc.state.logprobs import LogprobTable, recorded_logprobs
from sglang_smc.worker import SMCWorker
from sglang_smc_tools.plan.memory import PREFILL_SHARE, reserved_bytes

STOCK = [*range(1, 9), *range(10, 34, 2), 40, 44, 48]  # of SGLang, up to 48 requests
LOGPROBS = recorded_logprobs(1000)
ADAPTIVE = ("off", "on")


@pytest.mark.parametrize("wanted", [STOCK, [1], [3], [1, 4], [*range(1, 257)], [7, 200]])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_no_server_records_more_than_it_should(wanted: list[int], is_adaptive: bool) -> None:
    """And sizes in between waste little."""
    config = SMCConfig(num_particles=8, num_steps=8, adaptive=ADAPTIVE[is_adaptive])
    kinds = Kinds.of(config, LOGPROBS)
    num_kinds = kinds.num_most_used, len(kinds.edited + kinds.off)
    sizes = plan_sizes(wanted, *num_kinds)
    assert sizes.count(*num_kinds) <= MOST
    for of_kind in sizes[:3]:
        assert of_kind[0] == wanted[0] and of_kind[-1] == wanted[-1], "one request, and the most"
        assert set(of_kind) <= set(wanted)
    assert thinned(STOCK, 3) == (1, 10, 48)
    assert thinned([1, 2], 3) == (1, 2)
    plain = plan_sizes(STOCK, 2, 2).of_rounds
    ratios = [larger / (size + 1) for size, larger in itertools.pairwise(plain)]
    assert max(ratios) <= 1.25, "the padding that a batch may play, over itself"


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_at_temperature_0_a_round_of_trees_is_replayed(is_adaptive: bool) -> None:
    """On any budget of several particles; each budget has rounds of its own where N and K adapt."""
    config = SMCConfig(num_particles=4, num_steps=4, adaptive=ADAPTIVE[is_adaptive])
    kinds = Kinds.of(config, LOGPROBS)
    play = Any
    trees = [RoundGraphs(play, shape, play, [1, 2]) for shape in kinds.greedy]
    assert [one.shape.num_particles for one in trees] == ([2, 4] if is_adaptive else [4])
    own: dict[Budget | None, list[RoundGraphs]] = {}
    for recorded in kinds.most_used:
        own.setdefault(recorded.budget, []).append(RoundGraphs(play, recorded, play, [1, 2]))
    found = Recordings(own, trees, plan_sizes([1, 2], 2, 2), LogprobTable(3, 2, 5, "cpu"))
    assert list(own) == (list(budgets(Budget(4, 4))) if is_adaptive else [None])
    for budget, graphs in own.items():
        n, k = budget or Budget(4, 4)
        if n > 1 and k:  # a single particle is replayed with other requests
            asked = trees[-1].shape._replace(budget=budget, num_particles=n, num_steps=k)
            assert found.find(asked) is next(one for one in trees if one.shape.num_particles >= n)
        assert found.find(graphs[0].shape) is graphs[0]
        assert Need.GREEDY in graphs[0].shape.needs and Need.TREES not in graphs[0].shape.needs


def shape(*needs: Need, **change: Any) -> RoundShape:
    own = shape_of_server(SMCConfig(num_particles=2, num_steps=2))._replace(**change)
    return own.needing(own.needs.union(needs))


def test_the_first_recording_that_does_enough_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    """What is not replayed says why, and once; a wider table leaves recordings of the old one."""
    caplog.set_level(logging.INFO)
    table = LogprobTable(3, 2, 5, "cpu")
    table.make_room(LOGPROBS)
    kinds = Kinds.of(SMCConfig(num_particles=2, num_steps=2), LOGPROBS)
    play = cast("Any", None)
    shapes = [*kinds.most_used, *kinds.edited, kinds.powers, kinds.any]
    graphs = [RoundGraphs(play, shape, play, [1, 2]) for shape in shapes]
    plain, chat, edited, edited_chat, powers, anything = graphs
    greedy = [RoundGraphs(play, shape, play, [1]) for shape in kinds.greedy]
    (off,) = (RoundGraphs(play, shape, play, [1, 2]) for shape in kinds.off)
    of_budget = {None: graphs, OFF: [off, *graphs[2:]]}
    found = Recordings(of_budget, greedy, plan_sizes([1, 2], 2, 2), table)
    assert found.find(shape()) is plain
    assert found.find(shape(Need.FILTERS)) is chat
    shown: dict[str, Any] = {"logprobs": LOGPROBS}
    for needs, more in (([Need.EDITS], {}), ([], shown), ([Need.EDITS], shown)):
        assert found.find(shape(*needs, **more)) is edited
        assert found.find(shape(*needs, Need.FILTERS, **more)) is edited_chat
    assert found.find(shape(Need.VERIFIES)) is anything
    assert found.find(shape(extras=frozenset({"return_particles"}))) is powers
    powered = shape(extras=frozenset({"return_particles"}), max_tail=9)
    asked = {Need.EXTENDS, Need.POWER, Need.OPEN_TOKEN}
    for more in (set(), {Need.FILTERS}, {Need.GREEDY}, {Need.WEIGHS}):
        assert found.find(powered.needing(asked | more)) is powers
    assert found.find(shape().needing({Need.EXTENDS})) is powers, "verified proposals alone"
    for alone in ([Need.VERIFIES], [Need.FILTERS, Need.GREEDY]):
        sizes = {"num_particles": 1, "num_steps": 0, "max_tail": 1, "max_arena": 2}
        assert found.find(shape(*alone, **sizes)) is off, "no drafts"
    assert found.find(shape(logprobs=LOGPROBS._replace(top=1, listed=0))) is edited
    assert not caplog.records
    for _ in range(3):
        assert found.find(shape(Need.RULES)) is None
        assert found.find(shape(extras=frozenset({"trace"}))) is None
    assert table.columns is not None
    written = weakref.ref(table.columns.own)
    table.make_room(LOGPROBS._replace(top=50))
    assert written() is not None, "a replay would write to freed memory"
    assert found.find(shape(logprobs=LOGPROBS._replace(top=1, listed=0))) is None
    assert found.find(shape()) is plain
    rules, trace, more = caplog.messages
    assert "structured output, stop texts or a custom logit processor" in rules
    assert "trace" in trace and "more log-probabilities" in more


@pytest.mark.parametrize(("each", "warns"), [(0, False), (1 << 30, True)])
def test_recordings_that_share_no_memory_are_told_of(
    each: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four recordings, of which the first takes 2 GB and each other one ``each`` bytes."""
    caplog.set_level(logging.INFO)
    free = iter([80 << 30, 78 << 30, (78 << 30) - 3 * each])
    monkeypatch.setattr(recorder, "_free_bytes", lambda device: next(free))
    session = Session(lambda run: (run(), run), "cuda")
    for _ in range(4):
        session.record(lambda: None)
    gigabytes, _ = session.usage("four of them")
    assert gigabytes == 2 + 3 * each / 2**30
    assert "2.00 GB" in caplog.messages[0] and "four of them" in caplog.messages[0]
    assert [one.levelname for one in caplog.records] == ["INFO", *["WARNING"] * warns]


class Card:
    """Memory of a GPU that is not there, with torch.cuda mocked; it counts bytes and rounds.

    Rounds and passes are played by name alone: each takes the bytes that the arithmetic says, in
    the graphs' pool while a graph is captured, and beside it otherwise.

    Args:
        free: bytes, before anything is recorded.
        vocab_size: V.
        short_of: bytes that are taken by another process, which nobody was told of.
    """

    def __init__(self, free: float, vocab_size: int, short_of: float = 0) -> None:
        self.total = int(free)
        self.vocab_size = vocab_size
        self.short_of = short_of
        self.pool = self.peak = self.num_played = self.num_captured = 0
        self.streams: set[Any] = set()
        self.attn_backend: Any = None
        # bytes of the pool that passes keep
        self._captures = False
        self._kept = 0

    def bytes_of(self, shape: RoundShape) -> int:
        sizes = shape.num_particles, shape.num_steps, self.vocab_size
        return round_bytes(*sizes, verifies=Need.VERIFIES in shape.needs, mixes=shape.logprobs.own)

    def play(self, inputs: RoundInputs, shape: RoundShape, *_: Any) -> SimpleNamespace:
        self.num_played += 1
        self.take(len(inputs.rows) * self.bytes_of(shape))
        return SimpleNamespace(size=len(inputs.rows), shape=shape)

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        """Run a model: its logits, and the product that they are made of."""
        size = chains.tokens.numel() * self.vocab_size
        self.take(self._kept * self._captures + size * (LOGIT_BYTES + PRODUCT_BYTES))
        self._kept += self._captures * size * LOGIT_BYTES
        return chains.tokens

    next_logits = chain_logits

    def take(self, size: int) -> None:
        if self._captures:
            self.pool = max(self.pool, size)
        in_use = self.pool + (0 if self._captures else size)
        if in_use > self.total - self.short_of:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.peak = max(self.peak, in_use)

    def begin(self) -> str:
        """Stand in for `torch.cuda.graph_pool_handle`: what was recorded before is let go."""
        self.pool = self._kept = self.num_captured = 0
        return "pool"

    @contextmanager
    def capture(self, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        assert pool == "pool"
        self.streams.add(stream)
        self.num_captured = self.num_captured + 1
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    @contextmanager
    def in_place(self) -> Iterator["Card"]:
        sglang = "sglang.srt"
        arguments = SimpleNamespace(enable_cudagraph_gc=False)
        stream = SimpleNamespace(stream="stream")
        parallel = f"{sglang}.distributed.parallel_state"
        graphs = mock.patch.multiple(
            torch.cuda,
            graph_pool_handle=self.begin,
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
            CUDAGraph=mock.MagicMock,
            graph=self.capture,
            mem_get_info=lambda *_: (self.total - self.pool, self.total),
        )
        with (
            mock.patch(f"{sglang}.runtime_context.get_server_args", lambda: arguments),
            mock.patch(f"{sglang}.model_executor.runner.freeze_gc", nullcontext),
            mock.patch("sglang_smc.upstream.resolved", lambda args: args),
            mock.patch(f"{parallel}.graph_capture", lambda: nullcontext(stream)),
            graphs,
        ):
            yield self


# MiB of memory
CARDS = {"L4": 23_034, "L40S": 46_068, "H100": 81_559, "B300": 275_040}


def left_free(memory: int) -> float:
    """Bytes that are free on a card of so many MiB as recording begins."""
    return (1 - PREFILL_SHARE) * reserved_bytes(memory << 20)


def tables(vocab_size: int) -> Any:
    particles = SimpleNamespace(logprobs=LogprobTable(3, 2, 5, "cpu"))
    return mock.Mock(requests=SimpleNamespace(vocab_size=vocab_size), particles=particles)


def record(card: Card, config: SMCConfig) -> Recordings:
    known = Ranks(card.total)
    model = cast("Any", card)
    with card.in_place(), cuda_session("cuda") as session:
        found = graph.record_rounds(
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
def test_recorded_and_launched_rounds_fit_any_card(memory: int, vocab_size: int, mode: str) -> None:
    config = SMCConfig(mode=mode)
    card = Card(left_free(memory), vocab_size)
    found = record(card, config)
    assert card.peak <= SHARE * card.total, "while it records"
    assert card.streams == {"stream"}
    of_top, *_ = found.of_budget.values()  # of all N and K
    of_any = of_top[-1].shape
    launched = found.launched * card.bytes_of(of_any)
    assert card.pool + launched <= SHARE * card.total, "a round call by call beside them"
    assert found.launched >= 4
    assert of_top[0].sizes[-1] >= 16
    assert found.launched == found.sizes.of_passes[-1], "slices replay their models' passes"


def test_a_card_says_what_it_leaves_out() -> None:
    found = record(Card(left_free(CARDS["H100"]), 128_256), SMCConfig())
    assert all(graphs.sizes[-1] == 48 for graphs in found.of_budget[None])
    assert found.launched == 16
    assert "Memory does not hold" not in found.describe(STOCK)
    found = record(Card(left_free(CARDS["L4"]), 128_256), SMCConfig(mode="exact"))
    told = found.describe(STOCK)
    of_top, *_ = found.of_budget.values()
    sizes = [graphs.sizes[-1] for graphs in of_top]
    assert f"up to {sizes[0]} requests are recorded, of up to {sizes[-1]}" in told
    for flag in ("--mem-fraction-static", "--max-running-requests", "--cuda-graph-bs-decode"):
        assert flag in told


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_start_plays_each_recorded_round_twice(is_adaptive: bool) -> None:
    """To compile its kernels, and to capture it."""
    card = Card(1e12, 128_256)
    found = record(card, SMCConfig(adaptive=ADAPTIVE[is_adaptive]))
    num_rounds = card.num_captured - 3 * len(found.sizes.of_passes)
    assert card.num_played == 2 * num_rounds
    assert card.num_captured <= MOST


def test_no_size_fits() -> None:
    card = Card(1e8, 262_144)
    with pytest.raises(torch.OutOfMemoryError, match="hold no round of 1 requests"):
        record(card, SMCConfig())
    assert not card.num_played


@pytest.mark.parametrize(("count", "least"), [(1, 8 << 30), (2, 5 << 30)])
def test_ranks_go_by_least_memory(count: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(value: torch.Tensor, op: Any, group: str) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MIN, "over the host")
        value.clamp_(max=5 << 30)  # what another rank has

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    group = SimpleNamespace(world_size=count, rank_in_group=count - 1, cpu_group="over the host")
    with Card(8 << 30, 1000).in_place():
        assert Ranks.of(group, "cuda") == (least, count, count - 1)


class Server(SMCWorker):
    """A worker whose recording is all that there is of it, on a card."""

    def __init__(self, card: Card, config: SMCConfig, tp_size: int = 1) -> None:
        self.config = config
        self.device = "cuda"
        self.card = card
        self.tp_size = tp_size
        self._tables = tables(card.vocab_size)
        self._states: Any = mock.Mock()
        self._prefill: Any = mock.Mock(unread_bytes=0)
        draft = mock.Mock(has_stock_passes=False, state_bytes=0)
        self._round: Any = mock.Mock(play=card.play, draft=draft)
        self._graph_sizes = STOCK
        self._target_worker = self._draft_worker = self._corpus = None  # type: ignore[assignment]
        self._additional_graph_memory_usage: dict[str, float] = {}
        self._additional_graph_time_usage: dict[str, float] = {}

    def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = SimpleNamespace(world_size=self.tp_size, rank_in_group=0, cpu_group=None)
        parallel = SimpleNamespace(tp_group=group)
        monkeypatch.setattr("sglang_smc.worker.get_parallel", lambda: parallel)
        monkeypatch.setattr("sglang_smc.process.active.worker", None)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        padding = partial(graph.RoundInputs.of_padding, device="cpu")  # the device is not there
        monkeypatch.setattr(graph.RoundInputs, "of_padding", lambda *a, device: padding(*a))
        with self.card.in_place():
            self.init_cuda_graphs()


def test_a_server_records_and_says_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = Server(Card(left_free(CARDS["L40S"]), 128_256), SMCConfig())
    server.start(monkeypatch)
    recordings, launched, *_ = server._captures
    assert recordings is not None and launched == recordings.launched
    [line] = [one for one in caplog.messages if "round graphs" in one]
    gigabytes = server.card.pool / 2**30
    assert f"{gigabytes:.2f} GB of {server.card.total / 2**30:.2f} GB that were free" in line
    assert "up to 48 requests are recorded, of up to 32" in line
    assert server._additional_graph_memory_usage == {"smc_round": gigabytes}
    assert server._additional_graph_time_usage["smc_round"] >= 0


def test_where_memory_runs_short_less_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    free = left_free(CARDS["H100"])
    server = Server(Card(free, 128_256, short_of=0.6 * free), SMCConfig())
    server.start(monkeypatch)
    recordings, most, *_ = server._captures
    assert recordings is not None
    assert recordings.of_budget[None][-1].sizes[-1] in (16, 32)
    launched = (most or 0) * round_bytes(8, 8, 128_256, mixes=True)
    assert server.card.pool + launched <= server.card.total - server.card.short_of


FAILURES = {
    "compiler": RuntimeError("Triton Error [CUDA]: invalid device function"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_server_goes_on_without_recordings(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(Card(left_free(CARDS["L40S"]), 128_256), SMCConfig())
    server._round.play = mock.Mock(side_effect=FAILURES[name])
    server.start(monkeypatch)
    assert server._captures.recordings is None
    most = SHARE * server.card.total // round_bytes(8, 8, 128_256, mixes=True)
    assert server._captures.launched == most
    [line] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert str(FAILURES[name]) in line.getMessage()
    assert "--speculative-smc-round-graph off" in line.getMessage()
    assert ("--max-running-requests" in line.getMessage()) == (name == "memory")


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", FAILURES)
def test_a_trial_of_layers_that_fails_ends_no_start(
    name: str, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's layers run, and rounds are captured in the memory that is free after it.

    Where it has stopped the device, nothing can: the error names the flag that leaves it out.
    """
    server = Server(Card(left_free(CARDS["L40S"]), 128_256), SMCConfig(draft_layers="auto"))
    server._round.draft.layer_choice = choice = LayerChoice()
    measured: list[bool] = []
    of = Ranks.of

    def ranks_of(*given: Any) -> Ranks:
        measured.append(choice.is_open)
        return of(*given)

    monkeypatch.setattr(capture, "trials", mock.Mock(side_effect=FAILURES[name]))
    monkeypatch.setattr(Ranks, "of", ranks_of)
    monkeypatch.setattr(graph, "works", lambda _: not breaks)
    if breaks:
        with pytest.raises(ValueError, match=r"draft-layers auto has stopped.* Pass sglang"):
            server.start(monkeypatch)
        return
    server.start(monkeypatch)
    assert str(FAILURES[name]) in choice.as_dict()["reason"] and not choice.fuses(8)
    assert server._captures.recordings is not None
    assert measured == [False], "memory is measured once trials have freed theirs"


@pytest.mark.parametrize(
    ("asked", "tp_size", "breaks"), [("on", 1, 0), ("auto", 2, 0), ("auto", 1, 1)]
)
@pytest.mark.parametrize("name", FAILURES)
def test_a_server_that_cannot_go_on_without_them_names_flags(
    name: str, asked: str, tp_size: int, breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording was asked for by hand, other ranks may have recorded, or the device is lost."""
    server = Server(Card(1e12, 1000), SMCConfig(round_graph=asked), tp_size)
    server._round.play = mock.Mock(side_effect=FAILURES[name])
    if breaks:
        lost = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access"))
        device = mock.Mock(mem_get_info=lambda _: (1 << 40, 1 << 40), synchronize=lost)
        monkeypatch.setattr(graph.torch, "get_device_module", lambda _: device)
    with pytest.raises(ValueError, match="--speculative-smc-round-graph off") as told:
        server.start(monkeypatch)
    assert told.value.__cause__ is FAILURES[name]
    assert ("--mem-fraction-static" in str(told.value)) == (name == "memory")
    count = server._round.play.call_count
    assert tp_size == 1 or count == 1, "the others would wait for it in the round that it has left"
