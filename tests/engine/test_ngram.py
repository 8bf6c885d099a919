"""N-gram matches in a real engine: the law, the text, what they save, and what is refused.

Error probabilities are those of correct code with these seeds, as in test_law.py.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
from laws import enumerate_law, next_probs, p_value
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

ALPHA = 1e-4
SIZE = 1500
PROMPT = [3, 2, 3]
EOS = 1
MODEL = {"vocab_size": 4, "scale": 0.5}
CORPUS = {"speculative_ngram_capacity": 100_000, "speculative_ngram_max_trie_depth": 6}
ROOM = {"max_running_requests": 128, "max_total_tokens": 60_000, "max_lag": 16, **CORPUS}
MOST = {"num_particles": 8, "num_steps": 3}
LOOP = [7, 30, 12, 45, 9, 22]


def beside(engine: Callable[..., Any], pair: tuple[str, str], **more: Any) -> Any:
    """An engine with a draft model and matches."""
    return engine(**smc_arguments(*pair, **{**MOST, **ROOM, "ngram_weight": 0.3, **more}))


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, **MODEL), tiny(seed=2, **MODEL)


def draw(engine: Any, num_samples: int, smc: dict[str, Any], **params: Any) -> list[Any]:
    """Answers of 5 tokens to one prompt, each with a seed of its own."""
    return engine.generate(
        input_ids=[PROMPT] * num_samples,
        sampling_params=[
            {
                "max_new_tokens": 5,
                "sampling_seed": seed,
                "custom_params": {"smc": smc},
                **params,
            }
            for seed in range(num_samples)
        ],
    )


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_exact_mode_follows_the_target(
    engine: Callable[..., Any], pair: tuple[str, str], weight: float
) -> None:
    """What matches depends on who was answered before, and the law does not."""
    running = beside(engine, pair)
    for params in ({}, {"temperature": 1.7, "top_k": 3}):
        p = next_probs(pair[0], PROMPT, **params)
        smc = {"mode": "exact", "num_particles": 3, "ngram_weight": weight}
        answers = draw(running, SIZE, smc, **params)
        law = enumerate_law(5, EOS, lambda _, p=p: p)
        assert p_value([tuple(answer["output_ids"]) for answer in answers], law) > ALPHA


def test_weights_know_the_mixture(engine: Callable[..., Any], pair: tuple[str, str]) -> None:
    """E[Z-hat] = 1 within four standard errors (6e-5)."""
    smc = {"evidence_threshold": 0, "num_particles": 4, "num_steps": 2}
    answers = draw(beside(engine, pair), SIZE, smc, temperature=2.0)
    evidence = [math.exp(answer["meta_info"]["spec_smc_log_evidence"]) for answer in answers]
    mean = sum(evidence) / SIZE
    error = math.sqrt(sum((z - mean) ** 2 for z in evidence) / (SIZE - 1) / SIZE)
    assert 0 < error < 0.1
    assert abs(mean - 1) < 4 * error


@pytest.fixture
def wide(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, vocab_size=64), tiny(seed=2, vocab_size=64)


def say(engine: Any, prompts: list[list[int]], smc: dict[str, Any], **params: Any) -> list[Any]:
    asked = {"max_new_tokens": 48, "ignore_eos": True, "custom_params": {"smc": smc}, **params}
    return engine.generate(
        input_ids=prompts,
        sampling_params=[{**asked, "sampling_seed": seed} for seed in range(len(prompts))],
    )


PROMPTS = [[3, 2, 3], LOOP * 4, [5, 9, 5, 9, 5], [40]]


@pytest.fixture
def greedy_texts(engine: Callable[..., Any], wide: tuple[str, str]) -> list[list[int]]:
    """The target's own, at temperature 0, without speculation."""
    plain = engine(model_path=wide[0])
    params = {"max_new_tokens": 48, "ignore_eos": True, "temperature": 0}
    return [a["output_ids"] for a in plain.generate(input_ids=PROMPTS, sampling_params=params)]


def test_at_temperature_0_every_text_is_the_targets(
    greedy_texts: list[list[int]], engine: Callable[..., Any], wide: tuple[str, str]
) -> None:
    """Twice, so that the second time matches are all of the first answer; and for fewer passes."""
    running = beside(engine, wide)
    for mode, weight in (("exact", 1.0), ("smc", 0.9), ("auto", 0.7), ("smc", 0.3)):
        smc = {"mode": mode, "ngram_weight": weight}
        for _ in range(2):
            answers = say(running, PROMPTS, smc, temperature=0)
            assert [answer["output_ids"] for answer in answers] == greedy_texts
        passes = [answer["meta_info"]["spec_smc_rounds_ct"] for answer in answers]
        assert all(
            answer["meta_info"]["spec_smc_log_evidence"] in (0.0, None) for answer in answers
        )
        if weight > 0.5:
            assert max(passes) <= 14  # 47 tokens behind the first, at most 4 a round
        else:
            assert min(passes) > 14


def test_a_text_that_was_said_before_takes_fewer_passes(
    engine: Callable[..., Any], wide: tuple[str, str]
) -> None:
    """By seeds the same each time. Red where the corpus does not hear answers."""
    running = beside(engine, wide)
    passes = []
    for weight in (0.0, 0.9):
        running.flush_cache()
        smc = {"mode": "exact", "num_particles": 4, "ngram_weight": weight}
        for _ in range(2):
            answer = say(running, [[3, 2, 3]], smc, temperature=0.02)[0]
        passes.append(answer["meta_info"]["spec_smc_rounds_ct"])
    assert passes[1] < 0.5 * passes[0]


def test_who_wants_none_shares_a_batch_and_the_prefix_cache(
    engine: Callable[..., Any], wide: tuple[str, str]
) -> None:
    """The text of a seed stays what it is beside others' matches."""
    running = beside(engine, wide)
    none, some = {"ngram_weight": 0.0}, {"ngram_weight": 0.5}
    alone = [a["output_ids"] for a in say(running, PROMPTS, none)]
    asked = {"max_new_tokens": 48, "ignore_eos": True}
    together = running.generate(
        input_ids=[prompt for prompt in PROMPTS for _ in range(2)],
        sampling_params=[
            {**asked, "sampling_seed": seed, "custom_params": {"smc": smc}}
            for seed in range(len(PROMPTS))
            for smc in (none, some)
        ],
    )
    assert [answer["output_ids"] for answer in together[::2]] == alone
    assert any(answer["meta_info"]["cached_tokens"] for answer in together)


def test_retracted_requests_go_on(engine: Callable[..., Any], wide: tuple[str, str]) -> None:
    """Strict checks of memory are on: a slot that is lost ends the engine."""
    running = beside(engine, wide, max_total_tokens=700, max_running_requests=16, max_lag=4)
    for _ in range(2):
        answers = say(running, PROMPTS * 4, {"mode": "exact", "num_particles": 4})
        assert all(len(answer["output_ids"]) == 48 for answer in answers)


@pytest.mark.parametrize(
    ("smc", "said"),
    [
        ({"ngram_weight": 1}, "ngram_weight=1; allowed: mode 'exact', 'mixed' or 'auto'"),
        ({"ngram_weight": 1.5}, "allowed: a number from 0"),
        ({"ngram_weight": "much"}, "allowed: a number from 0"),
    ],
)
def test_a_request_is_told_what_it_may_have(
    engine: Callable[..., Any], pair: tuple[str, str], smc: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        draw(beside(engine, pair), 1, smc)


def test_a_server_without_texts_has_no_matches(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    running = engine(**smc_arguments(*pair, **MOST))
    with pytest.raises(ValueError, match="allowed: 0, since this server has no --speculative-smc"):
        draw(running, 1, {"ngram_weight": 0.3})
    assert draw(running, 1, {"ngram_weight": 0})[0]["output_ids"]


def alone(engine: Callable[..., Any], target: str, **more: Any) -> Any:
    """An engine without a draft model."""
    arguments = smc_arguments(
        target, "", **{**MOST, **ROOM, "mode": "exact", "ngram_weight": 1, **more}
    )
    return engine(**{**arguments, "speculative_draft_model_path": None})


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 1.7, "top_k": 3}, {"logit_bias": {"2": -100.0}}]
)
def test_alone_the_law_is_the_targets(
    engine: Callable[..., Any], pair: tuple[str, str], asked: dict[str, Any]
) -> None:
    """Where nothing matches drafts are nonsense, and are rejected."""
    bias = {int(token): value for token, value in asked.get("logit_bias", {}).items()}
    params = {name: value for name, value in asked.items() if name != "logit_bias"}
    p = next_probs(pair[0], PROMPT, **params)

    def biased(output: tuple[int, ...]) -> Any:
        probs = p(output).clone()
        for token in bias:
            probs[token] = 0.0  # e^-100 of what it was
        return probs / probs.sum()

    answers = draw(alone(engine, pair[0]), SIZE, {"num_particles": 3}, **asked)
    law = enumerate_law(5, EOS, lambda _: biased)
    assert p_value([tuple(answer["output_ids"]) for answer in answers], law) > ALPHA


def test_alone_at_temperature_0_the_text_is_the_targets_in_fewer_passes(
    greedy_texts: list[list[int]], engine: Callable[..., Any], wide: tuple[str, str]
) -> None:
    running = alone(engine, wide[0])
    for smc in ({}, {"mode": "auto"}, {"mode": "mixed", "num_steps": 2}):
        for _ in range(2):
            answers = say(running, PROMPTS, smc, temperature=0)
            assert [answer["output_ids"] for answer in answers] == greedy_texts
        passes = [answer["meta_info"]["spec_smc_rounds_ct"] for answer in answers]
        assert max(passes) <= (18 if "num_steps" in smc else 14)


def test_alone_requests_are_retracted_and_constrained_as_any(
    engine: Callable[..., Any], wide: tuple[str, str]
) -> None:
    """Strict checks of memory are on; a pattern forbids what matches propose."""
    running = alone(engine, wide[0], max_total_tokens=700, max_running_requests=16)
    for _ in range(2):
        answers = say(running, PROMPTS * 4, {}, stop=["t63 t63 t63"])
        assert all(len(answer["output_ids"]) == 48 for answer in answers)
    with pytest.raises(ValueError, match="allowed: mode 'exact', 'mixed' or 'auto'"):
        say(running, [[3]], {"mode": "smc"})
    with pytest.raises(ValueError, match="allowed: 1, since this server has no draft model"):
        say(running, [[3]], {"ngram_weight": 0.5})
