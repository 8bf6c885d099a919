"""The law of the output against exact enumeration, through a real engine.

Each test states its error probability for the fixed seeds: a p-value below
``ALPHA`` happens by chance once in ten thousand runs of one such comparison.

Sizes are those that a wrong law needs to be told: 2,000 texts in some 60 cells turn a test of
``ALPHA`` red, in 999 of 1,000 runs, where the law is off by a chi-square distance of 0.06 or more.
Here p and q, or p at another temperature, are farther apart than 0.3. Smaller errors of the rules
are sought where texts cost less, in tests/unit and tests/property.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
from laws import Law, Sequence, enumerate_law, next_probs, p_value, total_variation
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

ALPHA = 1e-4
SIZE = 2000
PROMPT = [3, 2, 3]
EOS = 1
MODEL = {"vocab_size": 4, "scale": 0.5}
ROOM = {"max_running_requests": 128, "max_total_tokens": 60_000, "max_lag": 16}
PLAIN = {"evidence_threshold": 0}  # the algorithm of the paper, whose laws are these
MOST = {"num_particles": 16, "num_steps": 3}


def draw(
    engine: Any,
    num_samples: int,
    max_new_tokens: int,
    *,
    smc: dict[str, Any] | None = None,
    **params: Any,
) -> tuple[list[Sequence], list[dict]]:
    """Independent outputs for one prompt, each with a seed of its own, and their meta_info."""
    answers = engine.generate(
        input_ids=[PROMPT] * num_samples,
        sampling_params=[
            {
                "max_new_tokens": max_new_tokens,
                "sampling_seed": seed,
                "custom_params": {"smc": PLAIN if smc is None else smc},
                **params,
            }
            for seed in range(num_samples)
        ],
    )
    return [tuple(a["output_ids"]) for a in answers], [a["meta_info"] for a in answers]


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, **MODEL), tiny(seed=2, **MODEL)


@pytest.fixture
def running(engine: Callable[..., Any], pair: tuple[str, str]) -> Any:
    """One engine for all laws: each request says what it wants."""
    return engine(**smc_arguments(*pair, **MOST, **ROOM))


@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_one_particle_follows_the_draft_at_drafted_positions(
    running: Any, pair: tuple[str, str], resample_at: str
) -> None:
    p, q = (next_probs(model, PROMPT) for model in pair)
    smc = {**PLAIN, "num_particles": 1, "num_steps": 2, "resample_at": resample_at}
    # Prefill draws position 0 from the target; then K drafts and a bonus, again and again.
    law = enumerate_law(5, EOS, lambda position: p if position % 3 == 0 else q)
    outputs, _ = draw(running, SIZE, 5, smc=smc)
    assert p_value(outputs, law) > ALPHA


def test_draft_temperature_is_the_draft_s_own(running: Any, pair: tuple[str, str]) -> None:
    p, q = next_probs(pair[0], PROMPT), next_probs(pair[1], PROMPT, temperature=2.0)
    smc = {**PLAIN, "num_particles": 1, "num_steps": 2, "draft_temperature": 2.0}
    law = enumerate_law(5, EOS, lambda position: p if position % 3 == 0 else q)
    outputs, _ = draw(running, SIZE, 5, smc=smc)
    assert p_value(outputs, law) > ALPHA


def test_draft_equal_to_target_is_exact_and_never_resamples(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    target, _ = pair
    running = engine(**smc_arguments(target, target, num_particles=4, num_steps=2, **ROOM))
    for params in ({}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 3, "temperature": 1.7}):
        p = next_probs(target, PROMPT, **params)
        outputs, infos = draw(running, SIZE, 4, **params)
        assert p_value(outputs, enumerate_law(4, EOS, lambda _, p=p: p)) > ALPHA
        assert sum(info["spec_smc_resample_ct"] for info in infos) == 0
        # The two models score in passes of different shape, so logits agree to rounding only.
        assert all(abs(info["spec_smc_log_evidence"]) < 1e-4 for info in infos)


@pytest.mark.nightly  # tests/property/test_round_law.py has the same on the package's own rounds
@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_error_falls_with_particles_and_evidence_is_unbiased(
    running: Any, pair: tuple[str, str], resample_at: str
) -> None:
    # Hot enough for p and q to overlap: with hardly any overlap 1/N sets in far beyond N = 16.
    p = next_probs(pair[0], PROMPT, temperature=2.0)
    law = enumerate_law(4, EOS, lambda _: p)
    distance = {}
    for num_particles in (1, 4, 16):
        smc = {**PLAIN, "num_particles": num_particles, "num_steps": 2, "resample_at": resample_at}
        outputs, infos = draw(running, 6000, 4, smc=smc, temperature=2.0)
        distance[num_particles] = total_variation(outputs, law)
        _check_evidence(infos, 1.0)
    assert distance[4] < 0.6 * distance[1]
    assert distance[16] < 0.6 * distance[4]


@pytest.mark.parametrize("power", [pytest.param(0.5, marks=pytest.mark.nightly), 2.0])
def test_a_power_of_the_target_is_sampled_and_its_normaliser_estimated(
    running: Any, pair: tuple[str, str], power: float
) -> None:
    p = next_probs(pair[0], PROMPT, temperature=2.0)
    raised = {text: mass**power for text, mass in enumerate_law(4, EOS, lambda _: p).items()}
    total = sum(raised.values())
    law = {text: mass / total for text, mass in raised.items()}
    distance = {}
    for num_particles in (1, 16):
        smc = {"num_particles": num_particles, "num_steps": 2, "power": power}
        outputs, infos = draw(running, 6000, 4, smc=smc, temperature=2.0)
        distance[num_particles] = total_variation(outputs, law)
        _check_evidence(infos, total)
    assert distance[16] < 0.4 * distance[1]


def test_mixed_lies_between_exact_and_weighing_alone(running: Any, pair: tuple[str, str]) -> None:
    """The higher the evidence that a block needs, the nearer to p, and the fewer tokens a round."""
    p = next_probs(pair[0], PROMPT, temperature=2.0)
    law = enumerate_law(6, EOS, lambda _: p)
    distance, tokens = [], []
    for threshold in (0.0, 1.0, 1e9):
        smc = {"mode": "mixed", "num_particles": 4, "evidence_threshold": threshold}
        outputs, infos = draw(running, 3000, 6, smc=smc, temperature=2.0)
        distance.append(total_variation(outputs, law))
        rounds = sum(info["spec_smc_rounds_ct"] for info in infos)
        tokens.append((sum(map(len, outputs)) - len(outputs)) / rounds)
    assert distance[0] > distance[1] > distance[2]
    assert tokens[0] > tokens[1] > tokens[2]


def distance_of_laws(one: Law, other: Law) -> float:
    outputs = set(one) | set(other)
    return 0.5 * sum(abs(one.get(output, 0.0) - other.get(output, 0.0)) for output in outputs)


def _check_evidence(infos: list[dict], expected: float) -> None:
    """E[Z-hat] within four standard errors (6e-5), and those not so wide as to say nothing."""
    estimates = [math.exp(info["spec_smc_log_evidence"]) for info in infos]
    size = len(estimates)
    mean = sum(estimates) / size
    error = math.sqrt(sum((z - mean) ** 2 for z in estimates) / (size - 1) / size)
    assert error < 0.1 * expected
    assert abs(mean - expected) < 4 * error


def test_top_k_cuts_p_where_q_has_mass(running: Any, pair: tuple[str, str]) -> None:
    p, q = (next_probs(model, PROMPT, top_k=2) for model in pair)
    law = enumerate_law(4, EOS, lambda _: p)
    smc = {**PLAIN, "num_particles": 2, "num_steps": 2}  # few enough to die together at times
    outputs, infos = draw(running, 4000, 4, smc=smc, top_k=2)
    assert set(outputs) <= set(law)  # a draft that p forbids is never emitted
    of_draft = enumerate_law(4, EOS, lambda _: q)
    assert total_variation(outputs, law) < 0.5 * distance_of_laws(of_draft, law)
    assert sum(info["spec_smc_all_zero_ct"] for info in infos) > 0  # the fallback has run


@pytest.mark.parametrize(
    "num_particles",
    [pytest.param(1, marks=pytest.mark.nightly), 3, pytest.param(8, marks=pytest.mark.nightly)],
)
def test_exact_mode_follows_the_target(
    running: Any, pair: tuple[str, str], num_particles: int
) -> None:
    smc = {"mode": "exact", "num_particles": num_particles}
    for params in (
        {"temperature": 0.3},
        {},
        {"temperature": 1.7},
        {"temperature": 1.7, "top_k": 3},
        {"temperature": 1.7, "top_p": 0.9},
    ):
        p = next_probs(pair[0], PROMPT, **params)
        outputs, infos = draw(running, SIZE, 5, smc=smc, **params)
        assert p_value(outputs, enumerate_law(5, EOS, lambda _, p=p: p)) > ALPHA
        assert all(info["spec_smc_log_evidence"] == 0.0 for info in infos)
