"""Laws of a whole SMC run on enumerable toy models (DESIGN, section 2).

Seeds are fixed, so a test passes always or never. Had they been drawn, the stated error
probabilities are those with which correct code would have failed.
"""

import math

import pytest
import torch
from scipy.stats import chisquare
from toy_smc import (
    Pair,
    Setup,
    frequencies,
    law,
    mild_pair,
    random_logits,
    simulate,
    table,
    target_law,
)

from sglang_smc.smc.resampling import SCHEMES

EOS = 1


def law_p_value(outputs: torch.Tensor, expected_law: torch.Tensor) -> float:
    """Chi-square p-value of outputs under a law; the rare ones share a cell."""
    observed = frequencies(outputs, expected_law.shape[0]).flatten().double()
    expected = expected_law.flatten() * len(outputs)
    assert observed[expected_law.flatten() == 0].sum() == 0
    common = expected >= 8
    cells = [torch.cat([x[common], x[~common].sum().view(1)]) for x in (observed, expected)]
    if cells[1][-1] < 8:
        cells = [torch.cat([x[:-2], x[-2:].sum().view(1)]) for x in cells]
    return float(chisquare(*cells).pvalue)


def assert_unit_mean_evidence(log_evidence: torch.Tensor) -> None:
    """E[Z-hat] = 1 within 4 standard errors (error probability 6e-5)."""
    evidence = log_evidence.exp()
    assert evidence.std() > 0
    error = evidence.std() / math.sqrt(len(evidence))
    assert abs(evidence.mean() - 1) < 4 * error


def total_variation(outputs: torch.Tensor, expected_law: torch.Tensor) -> float:
    observed = frequencies(outputs, expected_law.shape[0]) / len(outputs)
    return 0.5 * float((observed - expected_law).abs().sum())


@pytest.mark.parametrize("eos", [-1, EOS])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_one_particle_follows_q_where_drafted_and_p_where_bonus(num_steps: int, eos: int) -> None:
    # Error probability 1e-4 each.
    pair = mild_pair(length=5, vocab=3)
    outputs = simulate(pair, Setup(1, num_steps, eos=eos), 30_000).outputs
    is_drafted = [position > 0 and position % (num_steps + 1) != 0 for position in range(5)]
    expected = law([pair.draft if drafted else pair.target for drafted in is_drafted], eos)
    assert law_p_value(outputs, expected) > 1e-4
    assert law_p_value(outputs, target_law(pair, eos)) < 1e-12, "the test could not tell them apart"


@pytest.mark.parametrize("ess_threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_particles", [1, 4])
def test_draft_equal_to_target_is_exact_and_never_resamples(
    num_particles: int, resample_at: str, ess_threshold: float
) -> None:
    # Error probability 1e-4 each.
    target = mild_pair(length=4, vocab=3).target
    setup = Setup(num_particles, 2, ess_threshold, resample_at, eos=EOS)
    runs = simulate(Pair(target, target), setup, 20_000)
    assert runs.num_resampled == 0
    assert runs.lowest_ess == num_particles
    assert runs.log_evidence.abs().max() < 1e-12
    assert law_p_value(runs.outputs, target_law(Pair(target, target), EOS)) > 1e-4


@pytest.mark.parametrize("ess_threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("num_particles", [1, 2, 4, 8])
def test_evidence_is_unbiased(
    num_particles: int, num_steps: int, resample_at: str, ess_threshold: float
) -> None:
    setup = Setup(num_particles, num_steps, ess_threshold, resample_at)
    runs = simulate(mild_pair(), setup, 5000, seed=1)
    assert_unit_mean_evidence(runs.log_evidence)
    resamples = ess_threshold == 1.0 and num_particles > 1
    assert not resamples or runs.num_resampled > 4000


@pytest.mark.parametrize("method", list(SCHEMES))
@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_evidence_is_unbiased_with_every_scheme(method: str, resample_at: str) -> None:
    runs = simulate(mild_pair(), Setup(5, 2, 0.9, resample_at, method, eos=EOS), 8000, seed=2)
    assert runs.num_resampled > 5000
    assert_unit_mean_evidence(runs.log_evidence)


@pytest.mark.parametrize("max_lag", [1, 2, 3])
def test_evidence_is_unbiased_when_the_population_collapses_on_the_way(max_lag: int) -> None:
    runs = simulate(mild_pair(), Setup(4, 1, 0.5, max_lag=max_lag), 8000, seed=3)
    assert_unit_mean_evidence(runs.log_evidence)


@pytest.mark.parametrize("method", list(SCHEMES))
def test_law_tends_to_the_target_as_one_over_n(method: str) -> None:
    """The bias of the event that N=1 overrates most; N * bias settles between 0.4 and 0.6 here.

    With 40 000 runs a probability has a standard error below 0.0025: 0.04 on N * bias at N=16.
    Siblings that share their noise bring it down faster still.
    """
    pair = mild_pair(length=4, vocab=4)
    expected = target_law(pair)
    alone = law([pair.target if t % 3 == 0 else pair.draft for t in range(4)])
    overrated = alone > expected
    scaled_bias = []
    for num_particles in (2, 4, 8, 16):
        setup = Setup(num_particles, 2, resampling_method=method, stratifies=False)
        outputs = simulate(pair, setup, 40_000, seed=4).outputs
        found = frequencies(outputs, 4)[overrated].sum() / len(outputs)
        scaled_bias.append(num_particles * float(found - expected[overrated].sum()))
    assert min(scaled_bias) > 0.3
    assert max(scaled_bias) < 0.75
    outputs = simulate(pair, setup._replace(stratifies=True), 40_000, seed=4).outputs
    found = frequencies(outputs, 4)[overrated].sum() / len(outputs)
    assert 16 * float(found - expected[overrated].sum()) < scaled_bias[-1]


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("ess_threshold", [0.0, 0.5, 1.0])
def test_output_law_is_near_the_target_with_many_particles(
    ess_threshold: float, resample_at: str
) -> None:
    """Noise alone makes a TV of about .02 over these 27 outputs; one particle's law is .31 away."""
    pair = mild_pair(length=3, vocab=3)
    setup = Setup(64, 2, ess_threshold, resample_at)
    outputs = simulate(pair, setup, 10_000, seed=5).outputs
    assert total_variation(outputs, target_law(pair)) < 0.03


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_eos_inside_a_block_ends_the_weight_there(num_steps: int, resample_at: str) -> None:
    """The two models end texts at very different rates; wrong weights after an EOS would show."""
    logits = random_logits(5, 3, 1.0, seed=20)
    ending = torch.zeros(3)
    ending[EOS] = 1.0
    pair = Pair(table(logits), table(logits + ending))
    runs = simulate(pair, Setup(48, num_steps, 0.5, resample_at, eos=EOS), 10_000, seed=6)
    assert total_variation(runs.outputs, target_law(pair, EOS)) < 0.04
    assert_unit_mean_evidence(runs.log_evidence)


@pytest.mark.parametrize("temperatures", [(0.6, 1.4), (1.4, 0.6)])
def test_temperatures_that_differ_are_corrected(temperatures: tuple[float, float]) -> None:
    logits = random_logits(3, 3, 1.0, seed=30)
    target, draft = (table(logits, temperature=temperature) for temperature in temperatures)
    runs = simulate(Pair(target, draft), Setup(64, 2), 10_000, seed=7)
    assert total_variation(runs.outputs, target_law(Pair(target, draft))) < 0.03
    assert_unit_mean_evidence(runs.log_evidence)


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_particles", [1, 2, 32])
def test_tokens_that_top_p_cuts_from_the_target_never_come_out(
    num_particles: int, resample_at: str
) -> None:
    """q has mass where p has none: weight zero, and an exact target step where all die at once."""
    logits = random_logits(4, 4, 1.0, seed=40)
    pair = Pair(table(logits, top_p=0.6), table(logits + random_logits(4, 4, 0.5, seed=41)))
    expected = target_law(pair)
    assert (pair.target == -torch.inf).float().mean() > 0.3
    runs = simulate(pair, Setup(num_particles, 3, 0.5, resample_at), 10_000, seed=8)
    assert frequencies(runs.outputs, 4)[expected == 0].sum() == 0
    assert not runs.log_evidence.isnan().any()
    assert runs.num_all_zero > 0 or num_particles > 2
    if num_particles == 32:
        assert total_variation(runs.outputs, expected) < 0.05


def test_a_group_that_dies_entirely_takes_exact_target_steps() -> None:
    """Disjoint supports: every draft is refused, and the output follows p exactly (error 1e-4)."""
    logits = random_logits(4, 4, 1.0, seed=50)
    low, high = logits.clone(), logits.clone()
    low[..., :2], high[..., 2:] = -torch.inf, -torch.inf
    pair = Pair(table(low), table(high))
    runs = simulate(pair, Setup(4, 3), 20_000, seed=9)
    assert runs.num_all_zero == 3 * 20_000
    assert law_p_value(runs.outputs, target_law(pair)) > 1e-4


@pytest.mark.parametrize(("num_particles", "num_steps"), [(2, 1), (4, 2), (8, 2)])
def test_siblings_that_share_their_noise_lower_the_variance_of_z_hat(
    num_particles: int, num_steps: int
) -> None:
    """The same runs with and without; a variance has a relative error of about 4 % here."""
    setup = Setup(num_particles, num_steps)
    spread, apart = (
        simulate(mild_pair(), setup._replace(stratifies=stratifies), 8000, seed=10).log_evidence
        for stratifies in (True, False)
    )
    assert_unit_mean_evidence(spread)
    assert spread.exp().var() < 0.9 * apart.exp().var()
