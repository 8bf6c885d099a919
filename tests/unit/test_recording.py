"""What is recorded of which sizes, what memory it may take, and what a failure says."""

import itertools
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_card import Card
from msgspec.structs import replace

from sglang_smc.memory.rounds import SHARE, round_bytes
from sglang_smc.models.attention import KVLocations
from sglang_smc.options.budget import OFF, Budget
from sglang_smc.options.request import at_temperature_0
from sglang_smc.options.server import SMCConfig
from sglang_smc.plan.memory import PREFILL_SHARE, reserved_bytes
from sglang_smc.recording import recorder
from sglang_smc.recording.passes import PassRecording, RecordedPasses
from sglang_smc.recording.recorder import Ranks, Session, cuda_session
from sglang_smc.recording.sizes import MOST, plan_sizes, thinned
from sglang_smc.round import graph
from sglang_smc.round.batch import RoundShape, shape_of_server
from sglang_smc.round.graph import Kinds, Recordings, RoundGraphs, record_rounds
from sglang_smc.state.tail_logprobs import LogprobTable, recorded_logprobs
from sglang_smc.worker import SMCWorker

STOCK = [*range(1, 9), *range(10, 34, 2), 40, 44, 48]  # of SGLang, up to 48 requests
LOGPROBS = recorded_logprobs(1000)


@pytest.mark.parametrize("wanted", [STOCK, [1], [3], [1, 4], [*range(1, 257)], [7, 200]])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_no_server_records_more_than_it_should(wanted: list[int], is_adaptive: bool) -> None:
    """And sizes in between waste little."""
    kinds = Kinds.of(SMCConfig(num_particles=8, num_steps=8, adaptive=is_adaptive), LOGPROBS)
    num_kinds = kinds.num_most_used, len(kinds.edited)
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


def test_where_n_and_k_adapt_each_budget_has_its_round() -> None:
    kinds = Kinds.of(SMCConfig(num_particles=2, num_steps=2, adaptive=True), LOGPROBS)
    rungs = [budget for budget, _ in kinds.most_used]
    assert rungs == [(2, 2), (2, 1), (1, 2), (1, 1), OFF]
    assert all(shape.kinds.filtered for _, shape in kinds.most_used)
    assert kinds.any[0] == Budget(2, 2)
    assert not any(kinds.any[1].lacks(shape) for _, shape in kinds.most_used)


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_at_temperature_0_a_round_of_single_chains_is_replayed(is_adaptive: bool) -> None:
    """Unless the budget's own round is less work."""
    config = SMCConfig(num_particles=4, num_steps=4, adaptive=is_adaptive)
    kinds, play = Kinds.of(config, LOGPROBS), Any
    assert (kinds.greedy.num_particles, kinds.greedy.num_steps) == (1, 4)
    single = RoundGraphs(play, kinds.greedy, play, [1, 2])
    own: dict[Budget | None, list[RoundGraphs]] = {}
    for budget, recorded in kinds.most_used:
        own.setdefault(budget, []).append(RoundGraphs(play, recorded, play, [1, 2]))
    found = Recordings(own, single, plan_sizes([1, 2], 2, 2), LogprobTable(3, 2, 5, "cpu"))
    for budget, graphs in own.items():
        asked = replace(
            at_temperature_0(config), num_steps=min(4, budget.num_steps if budget else 4)
        )
        greedy = shape_of_server(asked)._replace(budget=budget)
        is_less = graphs[0].shape.num_rows < single.shape.num_rows
        fits = not graphs[0].shape.lacks(greedy)
        assert found.find(greedy) is (graphs[0] if is_less and fits else single)
        assert found.find(graphs[0].shape) is graphs[0]


def recordings(caplog: pytest.LogCaptureFixture) -> tuple[Recordings, LogprobTable]:
    caplog.set_level(logging.INFO)
    table = LogprobTable(3, 2, 5, "cpu")
    table.make_room(LOGPROBS)
    kinds = Kinds.of(SMCConfig(num_particles=2, num_steps=2), LOGPROBS)
    play: Any = None
    shapes = [*(shape for _, shape in [*kinds.most_used, *kinds.edited]), kinds.any[1]]
    graphs = [RoundGraphs(play, shape, play, [1, 2]) for shape in shapes]
    return Recordings(
        {None: graphs}, RoundGraphs(play, kinds.greedy, play, [1]), plan_sizes([1, 2], 2, 2), table
    ), table


def shape(**change: Any) -> RoundShape:
    return shape_of_server(SMCConfig(num_particles=2, num_steps=2))._replace(**change)


def test_the_first_recording_that_does_enough_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    """What is not replayed says why, and once."""
    found, _ = recordings(caplog)
    plain, chat, edited, edited_chat, anything = found.of_budget[None]
    filtered = shape().kinds._replace(filtered=True)
    assert found.find(shape()) is plain
    assert found.find(shape(kinds=filtered)) is chat
    for asked in ({"edits": True}, {"logprobs": LOGPROBS}, {"edits": True, "logprobs": LOGPROBS}):
        assert found.find(shape(**asked)) is edited
        assert found.find(shape(**asked, kinds=filtered)) is edited_chat
    assert found.find(shape(verifies=True)) is anything
    assert not caplog.records
    for _ in range(3):
        assert found.find(shape(has_rules=True)) is None
        assert found.find(shape(traces=True)) is None
    assert len(caplog.records) == 2
    assert "structured output, stop texts or a custom logit processor" in caplog.messages[0]
    assert "trace" in caplog.messages[1]


def test_a_wider_table_of_log_probabilities_is_not_written_by_recordings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They write where the table was: requests that need none of it go on replaying."""
    found, table = recordings(caplog)
    asks = shape(logprobs=LOGPROBS._replace(top=1, listed=0))
    assert found.find(asks) is found.of_budget[None][2]
    table.make_room(LOGPROBS._replace(top=50))
    assert found.find(asks) is None
    assert "more log-probabilities" in caplog.text
    assert found.find(shape()) is found.of_budget[None][0]


@pytest.mark.parametrize(("each", "warns"), [(0, False), (1 << 30, True)])
def test_recordings_that_share_no_memory_are_told_of(
    each: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four recordings, of which the first takes 2 GB and each other one ``each`` bytes."""
    caplog.set_level(logging.INFO)
    free = [80 << 30]
    monkeypatch.setattr(recorder, "_free_bytes", lambda device: free[0])

    def record(run: Any) -> Any:
        free[0] -= each if free[0] < 80 << 30 else 2 << 30
        return run(), run

    session = Session(record, "cuda")
    for _ in range(4):
        session.record(lambda: None)
    usage = session.usage("four of them")
    assert usage.gigabytes == 2 + 3 * each / 2**30
    assert "2.00 GB" in caplog.messages[0] and "four of them" in caplog.messages[0]
    assert [one.levelname for one in caplog.records] == ["INFO", *["WARNING"] * warns]


class Adder:
    """A model whose logits tell what it has read, and that writes to slots."""

    attn_backend: Any = None

    def __init__(self) -> None:
        self.kv = torch.zeros(10, dtype=torch.int64)
        self.num_runs = 0

    def chain_logits(
        self, tokens: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, locations: Any
    ) -> torch.Tensor:
        self.num_runs += 1
        self.kv[slots] = tokens
        sums = tokens + starts.unsqueeze(2) + locations.rows.view(-1, 1, 1)
        return (sums + locations.particle_rows.unsqueeze(2)).unsqueeze(3).expand(-1, -1, -1, 4)

    def next_logits(self, *args: Any) -> torch.Tensor:
        return self.chain_logits(*args)[:, :, -1]


def test_a_smaller_pass_is_replayed_with_padding_around_it() -> None:
    model = Adder()
    torch.manual_seed(0)
    passes = RecordedPasses(model)

    def record(run: Any) -> tuple[Any, Any]:
        found = run().clone()
        return found, lambda: found.copy_(run())

    for name, columns in (("chain_logits", 3), ("next_logits", 1)):
        passes.record(record, name, (2, columns), [1, 4], 5, "cpu")
    model.num_runs = 0
    for size, particles, columns in ((4, 2, 3), (3, 1, 2), (1, 2, 1), (1, 1, 3)):
        tokens = torch.randint(1, 99, (size, particles, columns))
        slots = torch.randperm(9).repeat(3)[: tokens.numel()].view_as(tokens) + 1
        rows = torch.arange(size) + 1
        locations = KVLocations(rows, rows, rows.unsqueeze(1) + tokens[:, :, 0], 5)
        given = tokens, tokens[:, :, 0] * 2, slots, locations
        before = model.kv.clone()
        found = passes.chain_logits(*given)
        written, model.kv = model.kv.clone(), before
        assert torch.equal(found, model.chain_logits(*given))
        assert torch.equal(written[1:], model.kv[1:]), "padding writes to slot 0 alone"
        if columns == 1:
            assert torch.equal(passes.next_logits(*given), model.next_logits(*given))
    runs = model.num_runs
    chains, cells, rows = torch.ones(5, 2, 3).long(), torch.ones(5, 2).long(), torch.ones(5).long()
    passes.chain_logits(chains, cells, chains, KVLocations(rows, rows, cells, 5))
    assert model.num_runs == runs + 1, "no recording is so large"


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
