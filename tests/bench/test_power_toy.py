"""Powers of a known target: its normaliser is that of enumeration, and rounds estimate it."""

import math

import numpy as np
import pytest
from power import toy


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_the_normalizer_is_the_sum_over_all_texts(power: float) -> None:
    """The law of p has the texts' own probabilities, since those sum to one."""
    found = toy.texts(0.0).log_normalizer(power, toy.TEXT_LENGTH, toy.NUM_TEXT_TOKENS - 1)
    total = sum(mass**power for mass in toy.law_of_texts(1.0).values())
    assert found == pytest.approx(math.log(total), abs=1e-5)


def test_exact_samples_are_as_far_as_noise_and_others_further() -> None:
    law = toy.law_of_texts(2.0)
    texts = np.array(list(law))
    rng = np.random.default_rng(1)
    drawn = texts[rng.choice(len(texts), 2000, p=list(law.values()))]
    distance, half, noise = toy.distances(drawn, 2.0)
    assert abs(distance - noise) < 2.3 * half
    assert toy.distances(drawn, 1.0)[0] > 4 * noise


def test_a_cell_is_measured() -> None:
    """E of Z-hat is Z, within 4.5 standard errors; a wrong length or start would be far off."""
    cell = toy.ToyCell("texts", 2.0, "near", 4, "verified", "chopthin", 1.0)
    row = toy.measure(cell, 300)
    assert row.mean_ratio == pytest.approx(1.0, abs=4.5 / 1.96 * row.mean_ratio_half)
    assert row.noise is not None and 1 < row.tokens_a_round < 3
