"""A power of p: whole texts follow p(x)^alpha over its sum, and Z-hat estimates that sum.

So particles draw their first tokens apart: one for all would follow the power of its own law,
whatever N is, since no weight tells it from another.
"""

from pathlib import Path

import pytest
import torch
from toy_laws import (
    EOS,
    LENGTH,
    Text,
    assert_properly_weighted,
    languages,
    law,
    pairwise,
    run,
    total_variation,
)
from toy_worker import Language

from sglang_smc.ops.interface import TORCH
from sglang_smc.options.server import SMCConfig
from sglang_smc.smc.distribution import TokenDistribution

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"


def test_the_law_of_the_next_token_and_its_sum_by_the_power_of_each_group() -> None:
    """What p excludes stays excluded: 0 to a small power is no NaN."""
    p = torch.tensor([0.5, 0.3, 0.0, 0.2], dtype=torch.float64).expand(4, -1)
    power = torch.tensor([0.1, 0.5, 2.0, 40.0])
    law = TokenDistribution((p * 7).log() * 0.6, torch.full((4,), 0.6))
    raised, log_sum = law.to_power(TORCH, power)
    found, powers = raised.log_probs(TORCH), p ** power.unsqueeze(1)
    sums = powers.sum(1, keepdim=True)
    assert torch.allclose(found.double().exp(), powers / sums, atol=1e-6)
    assert torch.allclose(log_sum.exp(), sums[:, 0], rtol=1e-5)
    assert (found[:, 2] == -torch.inf).all()


def powers_of_texts(target: Language, power: float) -> dict[Text, float]:
    """p(x)^power of every text, not normalised."""
    return {text: mass**power for text, mass in law([target] * LENGTH).items()}


@pytest.mark.parametrize(
    ("power", "num_particles", "distance"),
    [(2.0, 8, 0.09), (4.0, 8, 0.62), pytest.param(4.0, 64, 0.18, marks=pytest.mark.nightly)],
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


@pytest.mark.parametrize(
    ("sizes", "power", "advance"),
    pairwise(
        [(1, 2, 256), (4, 1, 1), (8, 5, 256)],
        [0.5, 2.0, 4.0],
        [{"resample_at": "block"}, {"resample_at": "token"}, {"proposal": "verified"}],
    ),
    ids=str,
)
def test_texts_are_weighed_by_the_power_of_p(
    sizes: tuple[int, int, int], power: float, advance: dict[str, str]
) -> None:
    """Without the sums at the first token, at every bonus or behind an end it would be far off."""
    target, draft = languages()
    num_particles, num_steps, max_lag = sizes
    config = SMCConfig(
        num_particles=num_particles, num_steps=num_steps, max_lag=max_lag, power=power, **advance
    )
    assert_properly_weighted(run(config, (target, draft)), powers_of_texts(target, power))


def test_texts_that_never_end_are_weighed_by_the_power_of_p() -> None:
    target, draft = languages()
    target.logits[:, EOS] = draft.logits[:, EOS] = -torch.inf
    outcome = run(SMCConfig(num_particles=8, num_steps=2, power=4.0), (target, draft))
    assert_properly_weighted(outcome, powers_of_texts(target, 4.0))
