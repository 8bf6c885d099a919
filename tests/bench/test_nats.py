"""The statistics of fidelity, held against slow computations in plain Python, and by hand."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from intervals import FOLDS, WEIGHTS, Z95, kl_at_least, paired_ratio_difference, ratio, watched_tilt


def test_ratio_by_hand() -> None:
    found = ratio(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 4.0]))
    # 6 / 8, and residuals -0.5, 0.5, 0 over a mean of 8 / 3.
    half = Z95 * (3 / 8 * 0.5) / 3**0.5
    assert found == pytest.approx((0.75, 0.75 - half, 0.75 + half, 3))


def test_problems_in_common_make_the_difference_narrow() -> None:
    """Problems differ far more than answers to one do; both arms have them in common."""
    rng = np.random.default_rng(5)
    tokens = np.full(400, 50.0)
    problem = rng.normal(-30, 10, 400)
    ours, reference = (problem + rng.normal(shift, 1, 400) for shift in (-1.0, 0.0))
    found = paired_ratio_difference((ours, tokens), (reference, tokens))
    assert found.low < -1 / 50 < found.high < 0
    assert found.high - found.low == pytest.approx(2 * Z95 * 2**0.5 / 20 / 50, rel=0.1)


@pytest.mark.parametrize("shift", [-0.5, 0.3])
def test_the_bound_is_of_weights_that_other_answers_choose(shift: float) -> None:
    """Of answers of 1 to 6 tokens; below 0 it is 0, as it is for answers of the target."""
    rng = np.random.default_rng(2)
    answers = [rng.normal(shift, 1.0, size=1 + n % 6) for n in range(23)]

    def gain(answer: np.ndarray, weight: float) -> float:
        return sum(math.log(1 - weight + weight * math.exp(one)) for one in answer)

    def chosen(fold: int) -> float:
        others = [answer for place, answer in enumerate(answers) if place % FOLDS != fold]
        return max(WEIGHTS, key=lambda weight: sum(gain(one, weight) for one in others))

    weights = [chosen(fold) for fold in range(FOLDS)]
    values = [gain(one, weights[place % FOLDS]) for place, one in enumerate(answers)]
    half = Z95 * stdev(values) / math.sqrt(len(values))
    ends = (fmean(values), fmean(values) - half, fmean(values) + half)
    assert (ends[0] > 0.2) == (shift > 0)
    assert kl_at_least(answers) == pytest.approx((*(max(0.0, end) for end in ends), 23))


def test_the_servers_own_tilt_weighs_answers_by_their_information() -> None:
    watched = {"spec_smc_tilt": 0.3, "spec_smc_tilt_information": 12.0}
    other = {"spec_smc_tilt": -0.1, "spec_smc_tilt_information": 4.0}
    nothing = {"spec_smc_tilt": None, "spec_smc_tilt_information": 0.0}
    found = watched_tilt([watched, other, nothing, {"completion_tokens": 1}])
    assert found == pytest.approx((0.2, 0.2 - Z95 / 4, 0.2 + Z95 / 4, 2))
    assert watched_tilt([{"completion_tokens": 1}, nothing]) is None
