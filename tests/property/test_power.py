"""A power of p: whole texts follow p(x)^alpha over its sum, and Z-hat estimates that sum.

So particles draw their first tokens apart: one for all would follow the power of its own law,
whatever N is, since no weight tells it from another.

Error probabilities are those of correct code, had the seeds been drawn.
"""

import math

import pytest
import torch
import toy_laws
from toy_smc import Setup, frequencies, mild_pair, power_sums, simulate

from sglang_smc.options.server import SMCConfig
from sglang_smc.smc.distribution import power_law

EOS = 1
PAIR = mild_pair(length=4, vocab=3)


def total_variation(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    found = frequencies(outputs, expected.shape[0]) / len(outputs)
    return 0.5 * float((found - expected).abs().sum())


def assert_mean_evidence(log_evidence: torch.Tensor, expected: float) -> None:
    """Within 4 standard errors (error probability 6e-5)."""
    evidence = log_evidence.exp()
    error = float(evidence.std()) / math.sqrt(len(evidence))
    assert abs(float(evidence.mean()) - expected) < 4 * error


def test_a_power_of_one_changes_no_bit() -> None:
    log_p = torch.log_softmax(torch.randn(50, 9, generator=torch.Generator().manual_seed(0)), -1)
    log_p[:, 3] = -torch.inf
    for given in (log_p, log_p.double()):
        found, log_sum = power_law(given, torch.ones(50))
        assert torch.equal(found, given.double())
        assert not log_sum.any()


@pytest.mark.parametrize("power", [0.1, 0.5, 2.0, 40.0])
def test_the_law_of_the_next_token_and_its_sum(power: float) -> None:
    """What p excludes stays excluded: 0 to a small power is no NaN."""
    p = torch.tensor([[0.5, 0.3, 0.0, 0.2]], dtype=torch.float64)
    found, log_sum = power_law(p.log(), torch.tensor([power]))
    raised = p**power
    assert torch.allclose(found.exp(), raised / raised.sum(), atol=1e-12)
    assert torch.allclose(log_sum.exp(), raised.sum())
    assert found[0, 2] == -torch.inf


def test_groups_have_powers_of_their_own() -> None:
    log_p = torch.log_softmax(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), -1)
    powers = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    found, log_sum = power_law(log_p, powers)
    for group in range(3):
        alone, own_sum = power_law(log_p[group], powers[group])
        assert torch.equal(found[group], alone) and log_sum[group] == own_sum


@pytest.mark.parametrize("eos", [-1, EOS])
@pytest.mark.parametrize("power", [0.5, 2.0, 4.0])
def test_texts_follow_the_power_of_p_with_many_particles(power: float, eos: int) -> None:
    """Noise alone makes a TV of about .02, .04 where the law is flat.

    Powers of next-token laws, which is what one particle and temperature make, are far from it.
    """
    sums = power_sums(PAIR, power, eos)
    expected = sums / sums.sum()
    setup = Setup(64, 2, eos=eos, power=power)
    many = simulate(PAIR, setup, 8000, seed=1).outputs
    one = simulate(PAIR, setup._replace(num_particles=1), 8000, seed=1).outputs
    assert total_variation(many, expected) < 0.05
    assert total_variation(one, expected) > 0.2


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize(("num_particles", "num_steps"), [(1, 2), (2, 1), (4, 3), (8, 5)])
@pytest.mark.parametrize("power", [0.5, 2.0, 4.0])
def test_z_hat_is_unbiased_for_the_sum_over_texts(
    power: float, num_particles: int, num_steps: int, resample_at: str
) -> None:
    """Without the sums at the first token, at every bonus or behind an end it would be far off."""
    for eos in (-1, EOS):
        setup = Setup(num_particles, num_steps, 0.5, resample_at, eos=eos, power=power)
        runs = simulate(PAIR, setup, 6000, seed=2)
        assert_mean_evidence(runs.log_evidence, float(power_sums(PAIR, power, eos).sum()))


@pytest.mark.parametrize("max_lag", [1, 3, toy_laws.LENGTH])
@pytest.mark.parametrize("power", [0.5, 2.0])
def test_through_the_steps_of_the_package(power: float, max_lag: int) -> None:
    """The lag bound costs diversity, so the law is near only without it; Z-hat is unbiased."""
    target, draft = toy_laws.languages()
    config = SMCConfig(num_particles=24, num_steps=2, power=power, max_lag=max_lag)
    outcome = toy_laws.run(config, (target, draft), num_runs=2500)
    plain = toy_laws.law([target] * toy_laws.LENGTH)
    raised = {text: mass**power for text, mass in plain.items()}
    total = sum(raised.values())
    assert_mean_evidence(outcome.log_evidence, total)
    if max_lag == toy_laws.LENGTH:
        expected = {text: mass / total for text, mass in raised.items()}
        assert toy_laws.total_variation(outcome, expected) < 0.08
