"""Each row of logits is penalized and biased as SGLang would for the text that the row follows."""

from typing import Any

import pytest
import torch
from edit_cases import begin_rules, make_req, rules_of, stock_edit
from hypothesis import given, settings
from hypothesis import strategies as st
from populations import population_of

from sglang_smc.requests.rules import has_rules

VOCAB = 6
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
    },
)


@st.composite
def rounds(draw: Any) -> dict[str, Any]:
    """Some requests' emitted texts, what N particles have behind them, and what they draft."""
    size, num_particles = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_drafted = draw(st.integers(0, 3))
    texts = st.lists(TOKENS, min_size=num_particles, max_size=num_particles)
    chain = st.lists(st.integers(0, VOCAB - 1), min_size=num_drafted, max_size=num_drafted)
    chains = st.lists(chain, min_size=num_particles, max_size=num_particles)
    return {
        "params": [draw(PARAMS) for _ in range(size)],
        "emitted": [[*draw(TOKENS), draw(st.integers(0, VOCAB - 1))] for _ in range(size)],
        "num_before_prefill": draw(st.integers(0, 8)),
        "tails": [draw(texts) for _ in range(size)],
        "chains": [draw(chains) for _ in range(size)],
        "seed": draw(st.integers(0, 1000)),
    }


def begun(case: dict[str, Any]) -> list[Any]:
    """The requests, after a prefill behind part of their texts, and rounds that emit the rest."""
    reqs = []
    for params, emitted in zip(case["params"], case["emitted"], strict=True):
        start = min(case["num_before_prefill"], len(emitted) - 1)
        req = make_req(emitted[:start], **params)
        begin_rules([req], torch.zeros(1, VOCAB))
        last_emitted, rest = emitted[start], emitted[start + 1 :]
        for emit in (rest[:2], [], rest[2:]):  # none, one or several tokens a round
            tails = [[[*emit, 5, 5], emit]]  # beyond what is emitted, particles differ
            settled = population_of(tails, [[last_emitted, last_emitted]])
            rules_of([req], None, VOCAB).commit(settled, torch.tensor([len(emit)]))
            last_emitted = emit[-1] if emit else last_emitted
        reqs.append(req)
    return reqs


def logits_of(case: dict[str, Any], num_columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"])
    shape = len(case["params"]), len(case["tails"][0]), num_columns, VOCAB
    return torch.randn(shape, generator=generator) * 3


def check(case: dict[str, Any], logits: torch.Tensor, chains: torch.Tensor, first: int) -> None:
    size, num_particles, num_columns, _ = logits.shape
    last_emitted = [[emitted[-1]] * num_particles for emitted in case["emitted"]]
    population = population_of(case["tails"], last_emitted)
    of_round = rules_of(begun(case), population, VOCAB)
    found, _ = of_round.apply(logits.clone(), chains, first)
    for g in range(size):
        for n in range(num_particles):
            for c in range(num_columns):
                drafted = case["chains"][g][n][: first + c]
                text = case["emitted"][g] + case["tails"][g][n] + drafted
                wanted = stock_edit(logits[g, n, c], text, case["params"][g])
                torch.testing.assert_close(found[g, n, c], wanted)


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_each_column_of_a_verification_counts_what_its_own_particle_has_before_it(
    case: dict[str, Any],
) -> None:
    chains = torch.tensor(case["chains"], dtype=torch.int64)
    check(case, logits_of(case, chains.shape[2] + 1), chains, 0)


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_a_step_of_drafting_counts_what_has_been_drafted(case: dict[str, Any]) -> None:
    chains = torch.tensor(case["chains"], dtype=torch.int64)
    check(case, logits_of(case, 1), chains, chains.shape[2])


@settings(max_examples=30, deadline=None)
@given(params=PARAMS, output_ids=TOKENS)
def test_a_first_token_follows_what_had_been_emitted_before_a_retraction(
    params: dict[str, Any], output_ids: list[int]
) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    found = begin_rules([make_req([1]), make_req(output_ids, **params)], logits)
    torch.testing.assert_close(found[0], before[0])
    torch.testing.assert_close(found[1], stock_edit(before[1], output_ids, params))
    assert torch.equal(logits, before), "SGLang's own logits stay as they are"


def test_particles_that_differ_in_their_first_token_each_count_their_own() -> None:
    """As for a power of p: what stands in the request's output is nobody's yet."""
    req = make_req([4], frequency_penalty=1.0)
    req.smc_state.open_token.begin(1)
    begin_rules([req], torch.zeros(1, VOCAB))
    req.output_ids.append(2)
    open_one = population_of([[[], [1]]], [[3, 1]])
    nothing = torch.empty(1, 2, 0, dtype=torch.int64)
    found, _ = rules_of([req], open_one, VOCAB).apply(torch.zeros(1, 2, 1, VOCAB), nothing, 0)
    assert found[0, :, 0].tolist() == [[0, 0, 0, -1, -1, 0], [0, -2, 0, 0, -1, 0]]


def test_only_requests_that_change_logits_have_rules() -> None:
    assert not has_rules(make_req([1]))
    for params in (
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 0.9},
        {"logit_bias": {"3": 1.0}},
    ):
        assert has_rules(make_req([1], **params))
    assert not has_rules(make_req([1], logit_bias={}))


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"logit_bias": {"0": -2.0}}])
def test_a_neighbour_s_logits_are_left_alone(params: dict[str, Any]) -> None:
    reqs = [make_req([0]), make_req([0], **params), make_req([0])]
    begin_rules(reqs, torch.zeros(3, VOCAB))
    logits = torch.zeros(3, 1, 1, VOCAB)
    of_round = rules_of(reqs, population_of([[[]]] * 3), VOCAB)
    found, _ = of_round.apply(logits, torch.empty(3, 1, 0, dtype=torch.int64), 0)
    assert found[:, 0, 0, 0].tolist() == [0.0, -1.0 if "presence_penalty" in params else -2.0, 0.0]
