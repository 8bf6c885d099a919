"""Structured output through a real engine: every answer is legal, and follows the law it should."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from crowd import last_chunks
from laws import enumerate_law, next_probs, p_value, total_variation
from spelling import GRAMMARS, IS_LEGAL, SERVER, spelling_model
from tiny_models import smc_arguments

from sglang_smc.options.server import CPU_OVERLAP_ENV

pytestmark = pytest.mark.engine

MODES = ("smc", "exact", "mixed", "auto")
SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 24}
PROMPT = [40, 70, 80]
ENDLESS = 'a\na ::= a "x"'  # what an a is nobody can say


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("spelling")
    return spelling_model(folder / "target", 1), spelling_model(folder / "draft", 2)


@pytest.fixture
def running(
    engine: Callable[..., Any], spelling: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """One engine for all tests that need nothing special."""
    monkeypatch.setenv(CPU_OVERLAP_ENV, "0")
    return engine(**smc_arguments(*spelling, **SETTINGS, **SERVER))


def ask(kind: str, seed: int, **smc: Any) -> dict[str, Any]:
    """Sampling parameters."""
    return {
        **GRAMMARS[kind],
        "max_new_tokens": 100,
        "sampling_seed": seed,
        "custom_params": {"smc": smc},
    }


def generate(engine: Any, params: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return engine.generate(input_ids=[PROMPT] * len(params), sampling_params=params)


def assert_legal(kind: str, answer: dict[str, Any]) -> None:
    assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
    assert IS_LEGAL[kind](answer["text"]), answer["text"]


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_is_legal_beside_plain_requests(running: Any, mode: str) -> None:
    """And follows from its seed alone: the batch that it is in changes nothing."""
    kinds = [kind for kind in GRAMMARS for _ in range(6)]
    hot = {"temperature": 1.5, "top_p": 0.95}
    params = [
        {**ask(kind, seed, mode=mode), **(hot if seed % 2 else {})}
        for seed, kind in enumerate(kinds)
    ]
    plain = {"max_new_tokens": 30, "sampling_seed": 7, "custom_params": {"smc": {"mode": mode}}}
    (alone,) = generate(running, [plain])
    *answers, beside = generate(running, [*params, plain])
    for kind, answer in zip(kinds, answers, strict=True):
        assert_legal(kind, answer)
    assert beside["output_ids"] == alone["output_ids"]
    assert len({answer["text"] for answer in answers}) > 12
    for index in (0, 7, 14, 21):
        (again,) = generate(running, [params[index]])
        assert again["output_ids"] == answers[index]["output_ids"]


def test_log_evidence_is_that_of_a_legal_text(running: Any) -> None:
    """Weighed masses can only be below 1, and a random model hardly spells JSON; no mode else."""
    weighed, verified = generate(
        running, [ask("json_schema", 1), ask("json_schema", 1, mode="exact")]
    )
    assert weighed["meta_info"]["spec_smc_log_evidence"] < -20
    assert verified["meta_info"]["spec_smc_log_evidence"] == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_limits_stops_and_minima_hold_within_a_grammar(running: Any, mode: str) -> None:
    smc = {"custom_params": {"smc": {"mode": mode}}, "temperature": 1.5}
    letters = {"regex": "[a-d]{0,60}", **smc}
    cut, stopped, late, greedy = generate(
        running,
        [
            {**letters, "regex": "[a-d]{60}", "max_new_tokens": 9},
            {**letters, "regex": "[a-d]{200}", "max_new_tokens": 80, "stop": ["c"]},
            {**letters, "max_new_tokens": 40, "min_new_tokens": 12},
            {**letters, "regex": "[a-d]{7}", "temperature": 0},
        ],
    )
    assert len(cut["output_ids"]) == 9 and set(cut["text"]) <= set("abcd")
    assert cut["meta_info"]["finish_reason"]["type"] == "length"
    assert set(stopped["text"]) <= set("abd")
    assert stopped["meta_info"]["finish_reason"]["matched"] == "c"
    assert len(late["output_ids"]) >= 12
    assert len(greedy["text"]) == 7


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_ends_its_text_even_where_eos_is_ignored(running: Any, mode: str) -> None:
    """At any place: at the first token, among the drafts, at the bonus."""
    params = [
        {
            **ask("regex", seed, mode=mode),
            "regex": f"[a-d]{{{seed % 8}}}",
            "ignore_eos": True,
        }
        for seed in range(24)
    ]
    answers = generate(running, params)
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers)
    assert all(answer["output_ids"].index(1) == len(answer["output_ids"]) - 1 for answer in answers)
    assert [len(answer["text"]) for answer in answers] == [seed % 8 for seed in range(24)]


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_that_admits_nothing_is_an_error_for_it_alone(running: Any, mode: str) -> None:
    """At the first token, or at a later one; and so is one that does not compile."""
    smc = {"custom_params": {"smc": {"mode": mode}}}
    fine = {**ask("ebnf", 3, mode=mode)}
    for grammar, message in (
        ({"ebnf": f"root ::= {ENDLESS}"}, "admits no text here: behind the 0 output tokens"),
        ({"ebnf": f'root ::= "abc" {ENDLESS}'}, "admits no text here: behind the "),
        ({"regex": "("}, "Failed to compile regex grammar"),
    ):
        asked = [{**fine, "sampling_seed": seed} for seed in range(3)]
        asked.append({**grammar, "max_new_tokens": 20, **smc})

        async def all_at_once(params: list[dict[str, Any]]) -> list[Any]:
            calls = [
                running.async_generate(input_ids=PROMPT, sampling_params=one) for one in params
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        *good, bad = asyncio.get_event_loop().run_until_complete(all_at_once(asked))
        assert isinstance(bad, ValueError) and message in str(bad), bad
        for answer in good:
            assert_legal("ebnf", answer)


def test_min_new_tokens_that_leave_nothing_are_an_error(running: Any) -> None:
    for mode in MODES:
        params = {**ask("regex", 1, mode=mode), "regex": "abc", "min_new_tokens": 30}
        with pytest.raises(ValueError, match="admits no text here: behind the"):
            generate(running, [params])


def test_retraction_aborts_and_results_one_round_late(
    engine: Callable[..., Any], spelling: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the overlap schedule, with SGLang's switch that retracts every few steps."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv(CPU_OVERLAP_ENV, "1")
    running = engine(**smc_arguments(*spelling, **SETTINGS, **SERVER, chunked_prefill_size=16))
    kinds = [list(GRAMMARS)[index % 4] for index in range(32)]
    aborted = {5, 6, 14, 23}

    requests = [
        {
            "input_ids": PROMPT * (1 + index % 9),
            "sampling_params": ask(kind, index, mode=MODES[index // 4 % 4]),
        }
        for index, kind in enumerate(kinds)
    ]
    answers = last_chunks(
        running, requests, arrival=lambda index: 0.02 * index, aborted=aborted, timeout=300
    )
    # Where retractions fall depends on time, and a random model may wander in white space.
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons.count("length") <= 2
    for index, (kind, answer) in enumerate(zip(kinds, answers, strict=True)):
        if index not in aborted and reasons[index] != "length":
            assert_legal(kind, answer)
    infos = [answer["meta_info"] for answer in answers]
    assert sum(info.get("num_retractions", 0) for info in infos) > 4


def test_greedy_is_the_targets_own_constrained_text(
    engine: Callable[..., Any], running: Any, spelling: tuple[str, str]
) -> None:
    params = [
        {**ask(kind, 0, mode=mode), "temperature": 0, "max_new_tokens": 60}
        for kind in GRAMMARS
        for mode in MODES
    ]
    found = [answer["output_ids"] for answer in generate(running, params)]
    stock = engine(model_path=spelling[0], **SERVER)
    plain = [{**one, "custom_params": None} for one in params[:: len(MODES)]]
    expected = [answer["output_ids"] for answer in generate(stock, plain)]
    assert found == [ids for ids in expected for _ in MODES]


# One word a token: t2 leads to t3 t3 alone, t3 to anything.
UNEVEN = "t2t3t3|t3(t2|t3)*"
EOS, WORDS, LENGTH = 1, {2: "a", 3: "b"}, 4
NUM_SAMPLES = 2500


def _laws(p: Callable[..., Any]) -> tuple[dict, dict, float]:
    """p given a legal text, the local mask's law, and the chance of a legal text."""
    joint = enumerate_law(LENGTH, EOS, lambda _: p)

    def is_legal(text: tuple[int, ...]) -> bool:
        words = text[:-1] if text[-1] == EOS else text
        if not set(words) <= {2, 3} or not words:
            return False
        return words[0] == 3 or (words == (2, 3, 3) and text[-1] == EOS)

    legal = {text: mass for text, mass in joint.items() if is_legal(text)}
    prefixes = {text[:length] for text in legal for length in range(LENGTH + 1)}

    def local(text: tuple[int, ...]) -> float:
        mass = 1.0
        for place, token in enumerate(text):
            probs = p(text[:place])
            left = sum(float(probs[t]) for t in range(4) if (*text[:place], t) in prefixes)
            mass *= float(probs[token]) / left
        return mass

    total = sum(legal.values())
    conditional = {text: mass / total for text, mass in legal.items()}
    return conditional, {text: local(text) for text in legal}, total


def test_the_law_through_an_engine(engine: Callable[..., Any], tiny: Callable[..., str]) -> None:
    """p given the grammar with many particles, the local mask's law where drafts are verified."""
    pair = tiny(seed=1, vocab_size=4, scale=0.5), tiny(seed=2, vocab_size=4, scale=0.5)
    prompt, hot = [3, 2, 3], {"temperature": 2.0}
    conditional, local, total = _laws(next_probs(pair[0], prompt, **hot))
    running = engine(
        **smc_arguments(*pair, num_particles=16, num_steps=2, max_lag=16),
        max_running_requests=128,
        max_total_tokens=60_000,
    )

    def draw(**smc: Any) -> tuple[list[tuple[int, ...]], list[float]]:
        base = {"regex": UNEVEN, "max_new_tokens": LENGTH, "custom_params": {"smc": smc}, **hot}
        answers = running.generate(
            input_ids=[prompt] * NUM_SAMPLES,
            sampling_params=[{**base, "sampling_seed": seed} for seed in range(NUM_SAMPLES)],
        )
        evidence = [math.exp(a["meta_info"]["spec_smc_log_evidence"]) for a in answers]
        return [tuple(a["output_ids"]) for a in answers], evidence

    texts, evidence = draw()
    assert total_variation(texts, conditional) < 0.4 * total_variation(texts, local)
    mean = sum(evidence) / NUM_SAMPLES
    variance = sum((z - mean) ** 2 for z in evidence) / (NUM_SAMPLES - 1)
    assert abs(mean - total) < 4 * math.sqrt(variance / NUM_SAMPLES)
    texts, _ = draw(mode="exact", num_particles=3)
    assert p_value(texts, local) > 1e-4
