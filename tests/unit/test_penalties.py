"""Each row of logits is changed as SGLang would for the text that the row follows."""

import itertools
from array import array
from typing import Any

import pytest
import torch
from edit_cases import EditedRequests, begin_rules, make_req, rules_of, stock_edit
from hypothesis import given, settings
from hypothesis import strategies as st
from populations import population_of
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from sglang_smc.rules.processors import Processors
from sglang_smc.rules.registry import has_rules
from sglang_smc.smc.edits import Edits, count_tokens, edit_logits
from sglang_smc.state.edits import has_edits

VOCAB, STOPS = 6, frozenset({0, 4})
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=7)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([-2.0, 0.3, 1.5]),
        "presence_penalty": st.sampled_from([-0.7, 0.4, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1).map(str), st.sampled_from([-100.0, 0.5, 3.0]), max_size=3
        ),
        "min_new_tokens": st.integers(1, 12),
    },
)


@st.composite
def rounds(draw: Any) -> dict[str, Any]:
    size, num_particles, num_drafted = (draw(st.integers(*of)) for of in ((1, 3), (1, 3), (0, 3)))
    token = st.integers(0, VOCAB - 1)

    def each(inner: Any, length: int) -> Any:
        return st.lists(inner, min_size=length, max_size=length)

    return {
        "params": draw(each(PARAMS, size)),
        "emitted": [[*draw(TOKENS), draw(token)] for _ in range(size)],
        "num_before_prefill": draw(st.integers(0, 8)),
        "tails": draw(each(each(TOKENS, num_particles), size)),
        "chains": draw(each(each(each(token, num_drafted), num_particles), size)),
        "seed": draw(st.integers(0, 1000)),
    }


def begun(case: dict[str, Any]) -> EditedRequests:
    """The requests, after a prefill behind part of their texts, and rounds that emit the rest."""
    emitted = case["emitted"]
    starts = [min(case["num_before_prefill"], len(text) - 1) for text in emitted]
    reqs = [
        make_req(text[:start], **params)
        for text, start, params in zip(emitted, starts, case["params"], strict=True)
    ]
    of_case = EditedRequests(reqs, VOCAB, STOPS)
    texts = [text[start:] for text, start in zip(emitted, starts, strict=True)]
    for first, last in ((0, 2), (2, 2), (2, 9)):  # none, one or several tokens a round
        emits = [text[1:][first:last] for text in texts]
        behind = [text[: 1 + first][-1:] for text in texts]
        # Beyond what is emitted, particles differ.
        settled = population_of([[[*emit, 5, 5], emit] for emit in emits], [b * 2 for b in behind])
        counts = torch.tensor([len(emit) for emit in emits])
        columns = of_case.of_round(settled).columns
        count_tokens(columns, of_case.rows, settled.texts[:, 0, 1:], counts)
    return of_case


def edits_of(case: dict[str, Any]) -> Edits:
    num_particles = len(case["tails"][0])
    last_emitted = [[emitted[-1]] * num_particles for emitted in case["emitted"]]
    num_emitted = torch.tensor([len(emitted) for emitted in case["emitted"]])
    population = population_of(case["tails"], last_emitted, num_emitted=num_emitted)
    return begun(case).of_round(population)


def check(case: dict[str, Any], chains: torch.Tensor, first: int, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    logits = torch.randn(*chains.shape[:2], num_columns, VOCAB, generator=generator) * 3
    found = logits.clone()
    edit_logits(found, edits_of(case), chains, first)
    for g, n, c in itertools.product(*map(range, logits.shape[:3])):
        text = case["emitted"][g] + case["tails"][g][n] + case["chains"][g][n][: first + c]
        wanted = stock_edit(logits[g, n, c], text, case["params"][g], STOPS)
        torch.testing.assert_close(found[g, n, c], wanted)


@settings(max_examples=60)
@given(rounds())
def test_each_column_counts_what_its_own_particle_has_before_it(case: dict[str, Any]) -> None:
    """Of a verification, and of a step of drafting."""
    chains = torch.tensor(case["chains"], dtype=torch.int64)
    check(case, chains, 0, chains.shape[2] + 1)
    check(case, chains, chains.shape[2], 1)


@settings(max_examples=30)
@given(params=PARAMS, output_ids=TOKENS)
def test_a_first_token_follows_what_had_been_emitted_before_a_retraction(
    params: dict[str, Any], output_ids: list[int]
) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    reqs = [make_req([1]), make_req(output_ids, **params)]
    found = EditedRequests(reqs, VOCAB, STOPS).first(logits.clone())
    assert torch.equal(found[0], logits[0])
    torch.testing.assert_close(found[1], stock_edit(logits[1], output_ids, params, STOPS))


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
