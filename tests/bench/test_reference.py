"""The reference against laws that are enumerated, and against its own models without a cache.

Seeds are fixed, so a test passes always or never. Had they been drawn, the stated error
probabilities are those with which correct code would have failed.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fidelity.reference import HuggingFace, Models, Outcome, Setting, ancestral, run
from laws import Law, enumerate_law, p_value
from pair.task import held_out, messages
from toy_reference import Table, Text
from toy_tables import mild_pair
from transformers import PreTrainedModel

from sglang_smc.smc.resampling import SCHEMES

FOLDER = Path(__file__).parents[2] / "bench" / "pair"
EOS, LENGTH, VOCAB = 1, 4, 3
RUNS = 300
TWO = Setting(2, 2, "block", 0.9, "systematic", stratified=True)
#: Two values of each option, such that every two options meet in three of four ways.
SETTINGS = [
    TWO,
    replace(TWO, resampling_method="multinomial", stratified=False),
    replace(TWO, resample_at="token", stratified=False),
    replace(TWO, resample_at="token", resampling_method="multinomial"),
    replace(TWO, num_steps=1),
]
Evidence = dict[tuple[Text, float], float]  # (answer, log Z-hat) -> probability


PAIR = mild_pair(LENGTH, VOCAB)
TARGET, DRAFT = Table(PAIR.target), Table(PAIR.draft)
TOKENIZER: Any = SimpleNamespace(eos_token_id=EOS)
TOY = Models(TARGET, DRAFT, TOKENIZER)
P_LAW = enumerate_law(LENGTH, EOS, lambda position: TARGET.next_probs)


def run_toy(
    setting: Setting, num_runs: int, *, models: Models = TOY, temperature: float = 1.0
) -> list[Outcome]:
    generator = torch.Generator().manual_seed(1)
    return [
        run(models, [0], setting, temperature, generator, max_new_tokens=LENGTH)
        for _ in range(num_runs)
    ]


class State(NamedTuple):
    """Two particles."""

    texts: tuple[Text, Text]
    log_weights: tuple[float, float] = (0.0, 0.0)
    log_evidence: float = 0.0


def has_ended(text: Text) -> bool:
    return text[-1] == EOS or len(text) == LENGTH


def log_mean(log_weights: tuple[float, float]) -> float:
    return math.log(sum(map(math.exp, log_weights)) / 2)


def spread(probs: Sequence[float], scale: float) -> dict[tuple[int, int], float]:
    """Law of what the points (scale u) and (scale u + 1/2) mod 1 draw, for a uniform u."""
    cumulative = list(accumulate(probs))
    jumps = {
        (c - offset + turn) / scale for c in cumulative for offset in (0, 0.5) for turn in (0, 1)
    }
    edges = sorted({0.0, 1.0} | {u for u in jumps if 0 < u < 1})
    law: dict[tuple[int, int], float] = defaultdict(float)
    for low, high in pairwise(edges):
        middle = scale * (low + high) / 2
        one, two = (
            min(bisect_right(cumulative, point % 1.0), len(probs) - 1)
            for point in (middle, middle + 0.5)
        )
        law[one, two] += high - low
    return law


def independent(one: Sequence[float], two: Sequence[float]) -> dict[tuple[int, int], float]:
    return {(a, b): one[a] * two[b] for a, b in product(range(len(one)), range(len(two)))}


def extend(state: State, table: Table, setting: Setting, *, weigh: bool) -> Iterator[Any]:
    """Every way to draw one token for each particle, with its probability."""
    one, two = state.texts
    probs = [[1.0] if has_ended(t) else table.next_probs(t).tolist() for t in state.texts]
    shared = setting.stratified and one == two and not has_ended(one)
    law = spread(probs[0], 1.0) if shared else independent(*probs)
    for (a, b), chance in law.items():
        gains = (gain(one, a), gain(two, b)) if weigh else (0.0, 0.0)
        log_weights = (state.log_weights[0] + gains[0], state.log_weights[1] + gains[1])
        yield State((append(one, a), append(two, b)), log_weights, state.log_evidence), chance


def append(text: Text, token: int) -> Text:
    return text if has_ended(text) else (*text, token)


def gain(text: Text, token: int) -> float:
    if has_ended(text):
        return 0.0
    return math.log(TARGET.next_probs(text)[token] / DRAFT.next_probs(text)[token])


def is_low(state: State, setting: Setting) -> bool:
    one, two = map(math.exp, state.log_weights)
    return (one + two) ** 2 / (one**2 + two**2) < setting.ess_threshold * 2


def resample(state: State, setting: Setting) -> Iterator[Any]:
    """Every choice of ancestors, with its probability."""
    one, two = map(math.exp, state.log_weights)
    weights = (one / (one + two), two / (one + two))
    systematic = setting.resampling_method == "systematic"
    law = spread(weights, 0.5) if systematic else independent(weights, weights)
    for (a, b), chance in law.items():
        texts = (state.texts[a], state.texts[b])
        yield State(texts, (0.0, 0.0), state.log_evidence + log_mean(state.log_weights)), chance


def one_round(state: State, setting: Setting) -> dict[State, float]:
    """Law of what a round makes of a state."""
    drafts, stopped, after = {state: 1.0}, [], defaultdict(float)
    for column in range(1, setting.num_steps + 1):
        longer: dict[State, float] = defaultdict(float)
        is_last = column == setting.num_steps
        for before, mass in drafts.items():
            for drawn, chance in extend(before, DRAFT, setting, weigh=True):
                low = is_low(drawn, setting) and (is_last or setting.resample_at == "token")
                if low:
                    stopped += [(s, mass * chance * c) for s, c in resample(drawn, setting)]
                elif is_last:
                    stopped.append((drawn, mass * chance))
                else:
                    longer[drawn] += mass * chance
        drafts = longer
    for before, mass in stopped:
        for drawn, chance in extend(before, TARGET, setting, weigh=False):
            after[drawn] += mass * chance
    return after


@lru_cache
def enumerate_runs(setting: Setting) -> Evidence:
    """Law of (answer, log Z-hat) of a run with two particles, without the reference's code."""
    found: Evidence = defaultdict(float)
    first = TARGET.next_probs(()).tolist()
    frontier = {State(((token,), (token,))): mass for token, mass in enumerate(first)}
    while frontier:
        longer: dict[State, float] = defaultdict(float)
        for state, mass in frontier.items():
            if all(map(has_ended, state.texts)):
                last = log_mean(state.log_weights)
                for text, log_weight in zip(state.texts, state.log_weights, strict=True):
                    share = math.exp(log_weight - last) / 2
                    found[text, state.log_evidence + last] += mass * share
            else:
                for after, chance in one_round(state, setting).items():
                    longer[after] += mass * chance
        frontier = longer
    return found


def answer_law(setting: Setting) -> Law:
    law: Law = defaultdict(float)
    for (text, _), mass in enumerate_runs(setting).items():
        law[text] += mass
    return law


def texts_of(outcomes: list[Outcome]) -> list[Text]:
    return [tuple(outcome.tokens) for outcome in outcomes]


def standard_errors_off(values: Sequence[float], expected: float) -> float:
    sample = torch.tensor(values, dtype=torch.float64)
    error = float(sample.std()) / math.sqrt(len(sample))
    return abs(float(sample.mean()) - expected) / max(error, 1e-6)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_enumeration_is_a_law_with_unit_evidence_and_not_the_targets(setting: Setting) -> None:
    runs = enumerate_runs(setting)
    law = answer_law(setting)
    assert math.isclose(sum(runs.values()), 1.0, rel_tol=1e-9)
    evidence = sum(mass * math.exp(log_z) for (_, log_z), mass in runs.items())
    assert math.isclose(evidence, 1.0, rel_tol=1e-6)  # tables are float32
    assert 0.5 * sum(abs(law[text] - P_LAW[text]) for text in P_LAW) > 0.04


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_has_the_enumerated_law(setting: Setting) -> None:
    """Answers: error 1e-4 each; mean log Z-hat: 6e-5 each."""
    outcomes = run_toy(setting, RUNS)
    assert p_value(texts_of(outcomes), answer_law(setting)) > 1e-4
    expected = sum(mass * log_z for (_, log_z), mass in enumerate_runs(setting).items())
    assert standard_errors_off([o.log_evidence for o in outcomes], expected) < 4
    assert sum(o.num_resampled for o in outcomes) > RUNS / 8


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_conditional_runs_from_the_target_keep_its_law_and_tell_that_of_answers(
    setting: Setting,
) -> None:
    """From x ~ p: E[1 / Z-hat] = 1 and E[1 / Z-hat | x] = s(x) / p(x); the answer is again ~ p.

    Error probabilities: 6e-5, 1e-4 (4.6 standard errors for about 20 texts), 1e-4.
    """
    generator = torch.Generator().manual_seed(2)
    texts, masses = list(P_LAW), torch.tensor(list(P_LAW.values()))
    outcomes, inverse = [], defaultdict(list)
    for index in masses.multinomial(500, replacement=True, generator=generator).tolist():
        retained = list(texts[index])
        outcome = run(TOY, [0], setting, 1.0, generator, max_new_tokens=LENGTH, retained=retained)
        outcomes.append(outcome)
        inverse[texts[index]].append(math.exp(-outcome.log_evidence))
    assert standard_errors_off([math.exp(-o.log_evidence) for o in outcomes], 1.0) < 4
    common = {text: values for text, values in inverse.items() if len(values) >= 30}
    law = answer_law(setting)
    assert sum(P_LAW[text] for text in common) > 0.5
    for text, values in common.items():
        assert standard_errors_off(values, law[text] / P_LAW[text]) < 4.6, text
    assert p_value(texts_of(outcomes), P_LAW) > 1e-4


@pytest.mark.parametrize("method", list(SCHEMES))
def test_evidence_is_unbiased_forwards_and_backwards(method: str) -> None:
    """E[Z-hat] = 1 for runs, E[1 / Z-hat] = 1 for conditional ones from p: error 6e-5 each."""
    setting = Setting(4, 1, "token", 0.9, method)
    outcomes = run_toy(setting, 120)
    assert standard_errors_off([math.exp(o.log_evidence) for o in outcomes], 1.0) < 4
    generator = torch.Generator().manual_seed(3)
    inverse = []
    for _ in range(120):
        text = ancestral(TARGET, [0], EOS, 1.0, generator, max_new_tokens=LENGTH)
        outcome = run(TOY, [0], setting, 1.0, generator, max_new_tokens=LENGTH, retained=text)
        inverse.append(math.exp(-outcome.log_evidence))
    assert standard_errors_off(inverse, 1.0) < 4


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_one_particle_follows_q_where_drafted_and_p_where_bonus(num_steps: int) -> None:
    """Error probability 1e-4 each."""
    law = enumerate_law(
        LENGTH,
        EOS,
        lambda position: (DRAFT if position % (num_steps + 1) else TARGET).next_probs,
    )
    texts = texts_of(run_toy(Setting(1, num_steps), 2 * RUNS))
    assert p_value(texts, law) > 1e-4
    assert p_value(texts, P_LAW) < 1e-6, "the test could not tell them apart"


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_a_draft_equal_to_the_target_is_exact(resample_at: str, stratified: bool) -> None:
    """Also: stratified draws have the right law, one by one. Error probability 1e-4 each."""
    setting = Setting(4, 2, resample_at, 1.0, stratified=stratified)
    outcomes = run_toy(setting, RUNS, models=Models(TARGET, TARGET, TOKENIZER))
    assert max(abs(o.log_evidence) for o in outcomes) < 1e-12
    assert sum(o.num_resampled for o in outcomes) == 0
    assert {o.mean_ess for o in outcomes if o.num_rounds} == {4.0}
    assert p_value(texts_of(outcomes), P_LAW) > 1e-4


def test_temperature_acts_on_both_models() -> None:
    """Error probability 1e-4."""
    cold = Table((TARGET.table / 0.5).log_softmax(-1))
    expected = enumerate_law(LENGTH, EOS, lambda position: cold.next_probs)
    outcomes = run_toy(Setting(2, 2), RUNS, models=replace(TOY, draft=TARGET), temperature=0.5)
    assert p_value(texts_of(outcomes), expected) > 1e-4


@pytest.fixture(scope="module")
def pair() -> Models:
    return Models.load(FOLDER)


def uncached(model: PreTrainedModel, prompt: list[int], texts: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each token of the texts ``[N, T]``, and of all that may follow."""
    rows = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], dim=1)
    with torch.inference_mode():
        logits = model(input_ids=rows, use_cache=False).logits[:, len(prompt) - 1 :]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("prompt", [[5], [7, 300, 12, 9]], ids=len)
def test_cached_rows_survive_cuts_and_copies(pair: Models, prompt: list[int]) -> None:
    assert isinstance(pair.draft, HuggingFace)
    texts = torch.randint(2, 512, (3, 9), generator=torch.Generator().manual_seed(5))
    ancestors = torch.tensor([2, 2, 0])
    changed = torch.cat([texts[ancestors, :6], torch.tensor([[8], [9], [10]])], dim=1)
    with torch.inference_mode():
        rows = pair.draft.read(prompt, 3)
        found = [rows.log_probs(texts[:, :0], 1, 1.0), rows.log_probs(texts, 5, 1.0)]
        rows.reorder(ancestors)
        found.append(rows.log_probs(changed, 1, 1.0))
    full = uncached(pair.draft.module, prompt, texts)
    expected = [full[:, :1], full[:, -5:], uncached(pair.draft.module, prompt, changed)[:, -1:]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("limit", [160, 20])
def test_a_particle_alone_is_weighed_token_by_token(pair: Models, limit: int) -> None:
    """Given a text, one particle's log Z-hat is the sum of log p - log q where it was drafted."""
    assert isinstance(pair.target, HuggingFace)
    assert isinstance(pair.draft, HuggingFace)
    prompt, generator = pair.prompt_ids(messages(held_out(0))), torch.Generator().manual_seed(6)
    eos = pair.tokenizer.eos_token_id
    text = ancestral(pair.target, prompt, eos, 1.0, generator, max_new_tokens=limit)
    assert (text[-1] == eos) == (limit == 160)
    outcome = run(pair, prompt, Setting(1, 4), 1.0, generator, max_new_tokens=limit, retained=text)
    tokens = torch.tensor([text])
    log_p, log_q = (
        uncached(model.module, prompt, tokens)[0, :-1].gather(1, tokens.T).squeeze(1)
        for model in (pair.target, pair.draft)
    )
    drafted = torch.arange(len(text)) % 5 > 0
    assert outcome.tokens == text
    assert math.isclose(outcome.log_evidence, float((log_p - log_q)[drafted].sum()), abs_tol=1e-3)
    assert outcome.num_rounds == math.ceil((len(text) - 1) / 5)
