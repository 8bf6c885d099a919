"""What is recorded of which sizes, what it may take, and what is said where nothing is replayed."""

import itertools
import logging
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from sglang_smc.models.attention import KVLocations
from sglang_smc.options.budget import OFF, Budget
from sglang_smc.options.request import at_temperature_0
from sglang_smc.options.server import SMCConfig
from sglang_smc.recording import recorder
from sglang_smc.recording.passes import RecordedPasses
from sglang_smc.recording.recorder import Session
from sglang_smc.recording.sizes import MOST, plan_sizes, thinned
from sglang_smc.round.batch import RoundShape, shape_of_server
from sglang_smc.round.graph import Kinds, Recordings, RoundGraphs
from sglang_smc.state.tail_logprobs import LogprobTable, recorded_logprobs

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
