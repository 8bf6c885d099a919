"""A power of p: whole texts follow p(x)^alpha over its sum, and Z-hat estimates that sum.

So particles draw their first tokens apart: one for all would follow the power of its own law,
whatever N is, since no weight tells it from another.

Error probabilities are those of correct code, had the seeds been drawn.
"""

import math
from pathlib import Path

import pytest
import torch
from toy_laws import EOS, LENGTH, Text, languages, law, run, total_variation
from toy_worker import Language

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.server import SMCConfig
from sglang_smc.tokens.distribution import TokenDistribution

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"


def assert_mean_evidence(log_evidence: torch.Tensor, expected: float) -> None:
    """Within 4 standard errors (error probability 6e-5)."""
    evidence = log_evidence.exp()
    error = float(evidence.std()) / math.sqrt(len(evidence))
    assert abs(float(evidence.mean()) - expected) < 4 * error


def test_a_power_of_one_changes_no_bit() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = -torch.inf
    plain = TokenDistribution(logits, torch.tensor([0.3, 1.0]))
    found, log_sum = plain.to_power(TORCH, torch.ones(50))
    assert torch.equal(found.log_probs(TORCH), plain.log_probs(TORCH))
    assert not log_sum.any()


@pytest.mark.parametrize("power", [0.1, 0.5, 2.0, 40.0])
def test_the_law_of_the_next_token_and_its_sum(power: float) -> None:
    """What p excludes stays excluded: 0 to a small power is no NaN."""
    p = torch.tensor([[0.5, 0.3, 0.0, 0.2]], dtype=torch.float64)
    law = TokenDistribution((p * 7).log() * 0.6, torch.tensor([0.6]))
    raised, log_sum = law.to_power(TORCH, torch.tensor([power]))
    found, powers = raised.log_probs(TORCH), p**power
    assert torch.allclose(found.double().exp(), powers / powers.sum(), atol=1e-6)
    assert torch.allclose(log_sum.exp(), powers.sum(), rtol=1e-5)
    assert found[0, 2] == -torch.inf


def test_groups_have_powers_of_their_own() -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    powers = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    raised, log_sum = TokenDistribution(logits, torch.ones(3)).to_power(TORCH, powers)
    for group in range(3):
        own = TokenDistribution(logits[[group]], torch.ones(1)).to_power(TORCH, powers[[group]])
        assert torch.equal(raised.log_probs(TORCH)[[group]], own[0].log_probs(TORCH))
        assert log_sum[group] == own[1]


def powers_of_texts(target: Language, power: float) -> dict[Text, float]:
    """p(x)^power of every text, not normalised."""
    return {text: mass**power for text, mass in law([target] * LENGTH).items()}


@pytest.mark.parametrize(("power", "may_end"), [(0.5, True), (2.0, True), (4.0, False)])
def test_texts_follow_the_power_of_p_with_many_particles(power: float, may_end: bool) -> None:
    """Noise alone makes a TV of about .04, more where the law is flat.

    Powers of next-token laws, which is what one particle and temperature make, are far from it.
    """
    target, draft = languages()
    if not may_end:
        target.logits[:, EOS] = draft.logits[:, EOS] = -torch.inf
    powers = powers_of_texts(target, power)
    expected = {text: mass / sum(powers.values()) for text, mass in powers.items()}
    many, one = (
        run(SMCConfig(num_particles=size, num_steps=2, power=power), (target, draft))
        for size in (24, 1)
    )
    assert total_variation(many, expected) < 0.08
    assert total_variation(one, expected) > 0.15


@pytest.mark.parametrize(
    ("power", "num_particles", "distance"), [(2.0, 8, 0.09), (4.0, 8, 0.62), (4.0, 64, 0.18)]
)
def test_docs_targets_says_how_far_texts_are_from_the_power_of_p(
    power: float, num_particles: int, distance: float
) -> None:
    """Noise alone makes a TV of about .05 and .03."""
    powers = powers_of_texts(languages()[0], power)
    expected = {text: mass / sum(powers.values()) for text, mass in powers.items()}
    config = SMCConfig(num_particles=num_particles, num_steps=2, power=power)
    found = total_variation(run(config, languages(), num_runs=600), expected)
    assert found == pytest.approx(distance, abs=0.04)
    assert f" {distance:.2f}" in PAGE.read_text()


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize(
    ("num_particles", "num_steps", "max_lag"), [(1, 2, 256), (2, 1, 1), (4, 3, 3), (8, 5, 256)]
)
@pytest.mark.parametrize("power", [0.5, 2.0, 4.0])
def test_z_hat_is_unbiased_for_the_sum_over_texts(
    power: float, num_particles: int, num_steps: int, max_lag: int, resample_at: str
) -> None:
    """Without the sums at the first token, at every bonus or behind an end it would be far off."""
    target, draft = languages()
    config = SMCConfig(
        num_particles=num_particles,
        num_steps=num_steps,
        max_lag=max_lag,
        power=power,
        resample_at=resample_at,
    )
    outcome = run(config, (target, draft))
    assert_mean_evidence(outcome.log_evidence, sum(powers_of_texts(target, power).values()))
