"""A recorded round is the round: batches of any size, padded to a recording's, change no answer.

Without a GPU the recorder keeps the function and runs it again over the same tensors: what a graph
adds to a round, its fixed places for figures and results, its padding and its choice of recording,
is all here but the replay itself.
"""

from typing import Any

import pytest
import torch
from toy_laws import EOS, LENGTH, languages
from toy_worker import Outcome as Texts
from toy_worker import ToyWorker

from sglang_smc.options.budget import OFF, Budget
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import RoundInputs, shape_of_server
from sglang_smc.round.costs import costs_of_graphs
from sglang_smc.round.graph import Record, RoundGraphs
from sglang_smc.round.result import Outcome
from sglang_smc.state.tail_logprobs import LogprobWidths

SIZES = [2, 3, 8]
CHOSEN: tuple[dict[str, Any], ...] = ({}, {"num_particles": 2}, {"num_steps": 1})


def in_place(played: list[int]) -> Record:
    """Records by running anew, and writes where the first run did, as a graph would."""

    def record(run: Any) -> tuple[Outcome, Any]:
        outcome = run()

        def replay() -> None:
            played.append(len(outcome.counts))
            for column, new in zip(outcome, run(), strict=True):
                if column is not None:
                    column.copy_(new)

        return outcome, replay

    return record


def serve(
    config: SMCConfig,
    *,
    rows: list[int],
    recorded: list[int] | None,
    budgets: tuple[Budget | None, ...] = (None,),
) -> Texts:
    """Texts of requests, by recordings of `SIZES` if there is a list to note them in."""
    sizes = {"num_requests": 9, "max_new_tokens": LENGTH, "eos": EOS}
    toy = ToyWorker(config, *languages(), **sizes, chosen=CHOSEN, budgets=budgets)
    if recorded is not None:
        worker = toy.worker
        worker._graph_sizes = SIZES
        worker._capture(in_place(recorded))
        costs = costs_of_graphs(worker._graphs, toy.device).rounds
        assert list(costs) == [budget for budget in worker._graphs if budget is not None]
        recorded.clear()
    noise = torch.rand(9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    texts = toy.run(rows, noise)
    toy.check_owned()
    return texts


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed"])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_recorded_rounds_give_the_same_texts(mode: str, size: int) -> None:
    config = SMCConfig(num_particles=3, num_steps=2, mode=mode)
    rows, recorded = list(range(1, size + 1)), []
    by_graph = serve(config, rows=rows, recorded=recorded)
    eager = serve(config, rows=rows, recorded=None)
    assert torch.equal(by_graph.outputs, eager.outputs)
    assert torch.equal(by_graph.log_evidence, eager.log_evidence)
    assert by_graph.num_rounds == eager.num_rounds
    assert recorded
    assert recorded[0] == min(s for s in SIZES if s >= size), "the smallest that holds the batch"


@pytest.mark.parametrize("mode", ["smc", "exact"])
def test_recorded_rounds_of_changing_size_give_the_same_texts(mode: str) -> None:
    """Each budget has recordings of its own; populations are resized before one is replayed."""
    config = SMCConfig(num_particles=3, num_steps=2, mode=mode, adaptive=True)
    rows, recorded = list(range(1, 6)), []
    budgets = (Budget(3, 2), OFF, Budget(3, 1), Budget(1, 2))
    by_graph = serve(config, rows=rows, recorded=recorded, budgets=budgets)
    eager = serve(config, rows=rows, recorded=None, budgets=budgets)
    assert torch.equal(by_graph.outputs, eager.outputs)
    assert torch.equal(by_graph.log_evidence, eager.log_evidence)
    assert len(recorded) > 1


def test_what_no_recording_holds_plays_as_it_is() -> None:
    config = SMCConfig(num_particles=3, num_steps=2)
    recorded: list[int] = []
    found = serve(config, rows=list(range(1, 10)), recorded=recorded)
    assert torch.equal(found.outputs, serve(config, rows=list(range(1, 10)), recorded=None).outputs)
    assert all(size <= 8 for size in recorded)


EDITS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {"1": 0.8}},
    {},
    {"min_new_tokens": 4},
)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_a_round_that_edits_is_recorded_once_for_all_requests(size: int) -> None:
    """Rates, counts and biases stand where the recording reads them, whenever a request comes."""
    config, recorded = SMCConfig(num_particles=3, num_steps=2), list[int]()
    sizes = {"num_requests": 9, "max_new_tokens": LENGTH, "eos": EOS}
    noise = torch.rand(9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    by_graph, eager = (ToyWorker(config, *languages(), **sizes, asked=EDITS) for _ in range(2))
    worker = by_graph.worker
    worker._tables.edits.make_room()
    worker._tables.begin_padding(worker._states.padding(), 3, by_graph.device)
    shape = shape_of_server(config)._replace(edits=True)

    def padding(size: int) -> RoundInputs:
        return RoundInputs.of_padding(config, None, size, by_graph.device)

    graphs = RoundGraphs(worker._round.play, shape, padding, SIZES, in_place(recorded))
    graphs.capture()
    worker._graphs = {None: graphs}
    rows = list(range(1, size + 1))
    found, wanted = by_graph.run(rows, noise), eager.run(rows, noise)
    assert torch.equal(found.outputs, wanted.outputs)
    assert torch.equal(found.log_evidence, wanted.log_evidence)
    assert recorded


def test_a_recording_covers_less_and_nothing_else() -> None:
    shape = shape_of_server(SMCConfig(num_particles=4, num_steps=3))
    assert shape.covers(shape)
    assert shape._replace(edits=True).covers(shape)
    assert shape.covers(shape._replace(num_particles=2, num_steps=1, max_tail=5, max_arena=9))
    for change in (
        {"num_particles": 5},
        {"num_steps": 4},
        {"max_tail": shape.max_tail + 1},
        {"max_arena": shape.max_arena + 1},
        {"kinds": shape.kinds._replace(filtered=True)},
        {"edits": True},
        {"powered": True},
        {"verifies": True},
        {"shows_particles": True},
        {"has_rules": True},
        {"logprobs": LogprobWidths(1, 0, 0)},
        {"methods": ("ssp",)},
    ):
        assert not shape.covers(shape._replace(**change)), change
