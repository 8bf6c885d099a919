"""Each row of logits is changed as SGLang would for the text that the row follows."""

from array import array
from typing import Any

import pytest
import torch
from edit_cases import EditedRequests, begin_rules, make_req, rules_of
from populations import population_of
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from sglang_smc.rules.processors import Processors
from sglang_smc.rules.registry import has_rules
from sglang_smc.smc.edits import edit_logits
from sglang_smc.state.edits import has_edits

VOCAB, STOPS = 6, frozenset({0, 4})


def test_particles_that_differ_in_their_first_token_each_count_their_own() -> None:
    """As for a power of p: what stands in the request's output is nobody's yet."""
    of_one = EditedRequests([make_req([4], frequency_penalty=1.0)], VOCAB)
    open_one = population_of([[[], [1]]], [[3, 1]])
    found = torch.zeros(1, 2, 1, VOCAB)
    edit_logits(found, of_one.of_round(open_one), torch.empty(1, 2, 0, dtype=torch.int64), 0)
    assert found[0, :, 0].tolist() == [[0, 0, 0, -1, -1, 0], [0, -2, 0, 0, -1, 0]]


def test_a_row_that_is_used_again_forgets_its_former_request() -> None:
    former = make_req([1, 2], frequency_penalty=2.0, logit_bias={"1": 1.0})
    of_row = EditedRequests([former], VOCAB)
    assert of_row.first(torch.zeros(1, VOCAB)).tolist() == [[0, -1, -2, 0, 0, 0]]
    of_row.begin(1, make_req([5], min_new_tokens=1))
    assert not of_row.first(torch.zeros(1, VOCAB)).any()
    of_row.begin(1, make_req([3], presence_penalty=1.0, logit_bias={"0": -1.0}))
    assert of_row.first(torch.zeros(1, VOCAB)).tolist() == [[-1, 0, 0, -1, 0, 0]]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 1.0}, -1.0),
        ({"frequency_penalty": -0.5}, 1.0),
        ({"repetition_penalty": 0.5}, 0.0),
        ({"logit_bias": {"0": -2.0}}, -2.0),
        ({"min_new_tokens": 2}, -torch.inf),
    ],
)
def test_a_neighbour_s_logits_are_left_alone(params: dict[str, Any], expected: float) -> None:
    """Also what zero becomes by adding zero, and what has no law."""
    reqs = make_req([0], logit_bias={}), make_req([0], **params), make_req([0])
    assert [has_edits(req) for req in reqs] == [False, True, False]
    assert not any(map(has_rules, reqs)), "no edit is the host's"
    of_round = EditedRequests(list(reqs), VOCAB, STOPS)
    logits = torch.tensor([-0.0, torch.nan, -torch.inf, 1.0, -0.0, 2.0]).repeat(3, 1, 1, 1)
    before = logits.clone()
    population = population_of([[[]]] * 3, num_emitted=torch.ones(3, dtype=torch.int64))
    nothing = torch.empty(3, 1, 0, dtype=torch.int64)
    edits = of_round.of_round(population)
    assert list(edits.groups) == [1]
    edit_logits(logits, edits._replace(groups=range(3)), nothing, 0)  # as a captured round does
    for neighbour in (0, 2):
        assert torch.equal(logits[neighbour].view(torch.int32), before[neighbour].view(torch.int32))
    assert logits[1, 0, 0, 0] == expected


class Recorder(CustomLogitProcessor):
    """Adds one to the token of a text's length, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[Any] | None = None
    ) -> torch.Tensor:
        assert custom_param_list is not None
        for row, params in zip(logits, custom_param_list, strict=True):
            text = None if params is None else list(params["__req__"].output_ids)
            self.seen.append(text)
            row[len(text or [])] += 1
        return logits


def with_processor(output_ids: list[int], processor: Any, **custom_params: Any) -> Any:
    req = make_req(output_ids, custom_params=custom_params)
    req.origin_input_ids = array("q", [7, 8])
    req.custom_logit_processor = "loaded"
    if processor is not None:
        req.smc_state.kept[Processors] = processor
    return req


def apply(
    reqs: list[Any],
    last_emitted: list[list[int]],
    tails: list,
    chains: list,
    first: int = 0,
    **fields: Any,
) -> torch.Tensor:
    of_round = rules_of(reqs, population_of(tails, last_emitted, **fields), VOCAB)
    drafted = torch.tensor(chains, dtype=torch.int64)
    num_columns = 1 if first else drafted.shape[2] + 1
    logits = torch.zeros(*drafted.shape[:2], num_columns, VOCAB)
    return of_round.apply(logits, drafted, first)[0]


def test_each_particle_is_shown_its_own_text() -> None:
    """What has been drafted, too; its own first token while that is open; not once it has ended."""
    recorder = Recorder()
    req = with_processor([1], recorder)
    apply([req], [[1, 1]], [[[], [2]]], [[[3, 4], [5, 0]]], first=2)
    apply([req], [[1, 1]], [[[2], [3]]], [[[], []]], ended=torch.tensor([[True, False]]))
    opened = with_processor([1, 0], recorder)
    opened.smc_state.open_token.begin(1)
    apply([opened], [[4, 5]], [[[], []]], [[[], []]])
    begin_rules([make_req([]), with_processor([1, 2], recorder)], torch.zeros(2, VOCAB))
    shown = [[1, 3, 4], [1, 2, 5, 0], [1, 3], [1, 4], [1, 5], [1, 2]]
    assert recorder.seen == shown
    req.sampling_params.custom_params = None
    apply([req], [[1]], [[[]]], [[[]]])
    assert recorder.seen == [*shown, None], "without parameters as in SGLang"


@pytest.mark.parametrize("loaded", [True, False])
def test_a_processor_that_fails_ends_its_own_request_alone(loaded: bool) -> None:
    broken = with_processor([1], DisallowedTokensLogitsProcessor() if loaded else None)
    broken.custom_logit_processor = '{"callable": "00"}'
    recorder = Recorder()
    reqs = [broken, with_processor([1], recorder)]
    found = begin_rules(reqs, torch.zeros(2, VOCAB))
    assert isinstance(broken.to_finish, FINISH_ABORT)
    assert "custom logit processor raised" in broken.to_finish.message
    assert broken.to_finish.status_code == 400
    assert reqs[1].to_finish is None
    assert found.tolist() == [[0] * VOCAB, [0, 1, 0, 0, 0, 0]]
    apply(reqs, [[1], [1]], [[[]], [[]]], [[[]], [[]]])
    assert len(recorder.seen) == 2
