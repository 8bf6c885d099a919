"""Each statistic against enumeration, and its false-alarm rate against what is stated."""

import itertools
import math
import random

import numpy
import pytest
from scipy.stats import binom

from sglang_smc_tools.testing import statistics
from sglang_smc_tools.testing.statistics import Fit, goodness_of_fit

P = [0.4, 0.3, 0.17, 0.09, 0.04]
Q = [0.1, 0.3, 0.2, 0.1, 0.3]
ALPHA = 1e-4


def top(law: list[float], size: int) -> dict[int, float]:
    ranked = sorted(range(len(law)), key=lambda token: -law[token])[:size]
    return {token: math.log(law[token]) for token in ranked}


@pytest.mark.parametrize("size", [1, 3, 5])
def test_innovation_has_mean_zero_under_the_target_only(size: int) -> None:
    values = [statistics.innovation(token, top(P, size)) for token in range(5)]
    assert math.fsum(p * v for p, v in zip(P, values, strict=True)) == pytest.approx(0, abs=1e-9)
    assert abs(math.fsum(q * v for q, v in zip(Q, values, strict=True))) > 0.1


def test_innovation_of_a_whole_law_is_log_p_plus_entropy() -> None:
    entropy = -math.fsum(p * math.log(p) for p in P)
    assert statistics.innovation(2, top(P, 5)) == pytest.approx(math.log(P[2]) + entropy)


@pytest.mark.parametrize(("of_p", "of_q"), [(5, 5), (3, 4), (1, 5)])
def test_tilt_is_zero_under_the_target_and_above_under_the_draft(of_p: int, of_q: int) -> None:
    values = [statistics.tilt(token, top(P, of_p), top(Q, of_q)) for token in range(5)]
    assert math.fsum(p * v for p, v in zip(P, values, strict=True)) == pytest.approx(0, abs=1e-9)
    assert math.fsum(q * v for q, v in zip(Q, values, strict=True)) > 0.1


@pytest.mark.parametrize("size", [1, 3, 5])
def test_ranks_of_tokens_tile_the_unit_interval(size: int) -> None:
    """Then they are uniform under p, whatever p is."""
    listed = top(P, size)
    ends = sorted(
        (statistics.rank_uniform(t, listed, 0.0), statistics.rank_uniform(t, listed, 1.0))
        for t in range(5)
    )
    distinct = sorted(set(ends))
    assert distinct[0][0] == 0.0 and distinct[-1][1] == pytest.approx(1.0)
    for (_, end), (begin, _) in itertools.pairwise(distinct):
        assert begin == pytest.approx(end)
    widths = [end - begin for begin, end in distinct]
    expected = [*P[:size], *([math.fsum(P[size:])] if size < 5 else [])]
    assert widths == pytest.approx(expected)


def test_the_mean_s_p_value_is_two_sided() -> None:
    """Values without skewness: the transformation leaves Student's t nearly as it is."""
    values = [-1.0, 1.0] * 5000
    for expected in (0.03, -0.03):
        p_value = statistics.p_value_of_mean(values, expected)
        assert p_value == pytest.approx(0.0027, rel=0.01)
    assert statistics.p_value_of_mean([1.0, 1.0], 1.0) == 1.0
    assert statistics.p_value_of_mean([1.0, 1.0], 1.1) == 0.0


def test_false_alarms_of_skewed_means_are_nearly_as_rare_as_stated() -> None:
    """Log-normal weights, as evidence is: 1.7 times as often as stated, Student's t 5.2 times."""
    weights = numpy.random.default_rng(0).lognormal(-0.5, 1.0, size=(10_000, 400))
    level = 1e-3
    alarms = sum(statistics.p_value_of_mean(row, 1.0) < level for row in weights.tolist())
    most = binom.ppf(1 - ALPHA, len(weights), 1.7 * level)
    assert 0 < alarms <= most
    assert most < 0.8 * 5.2 * level * len(weights)


def test_a_count_of_equal_chances_is_binomial() -> None:
    tails = binom.cdf(3, 9, 0.5), binom.sf(2, 9, 0.5)
    assert statistics.p_value_of_count(3, [0.5] * 9) == pytest.approx(2 * min(tails))
    assert statistics.p_value_of_count(2, [1.0 + 1e-12] * 2) == 1.0


def test_error_per_token_is_that_of_independent_answers() -> None:
    """Tokens of one answer are not independent here: all of them share one value."""
    source = random.Random(0)
    means = []
    for _ in range(400):
        lengths = [source.randint(1, 9) for _ in range(60)]
        sums = [length * source.gauss(0, 1) for length in lengths]
        means.append(statistics.per_token(sums, lengths))
    spread = math.sqrt(sum(mean.estimate**2 for mean in means) / len(means))
    stated = sum(mean.standard_error for mean in means) / len(means)
    assert stated == pytest.approx(spread, rel=0.12)


def test_a_text_counts_for_its_longest_prefix_in_the_law() -> None:
    law = {(): 0.1, (1,): 0.3, (1, 2): 0.6}
    texts = [(1, 2)] * 60 + [(1, 0)] * 30 + [(4, 4)] * 10
    assert goodness_of_fit(texts, law) == Fit(pytest.approx(0.0), 2)
    assert goodness_of_fit([(4, 4)] * 100, law).p_value < 1e-12


def test_thin_cells_are_one() -> None:
    law = {(token,): 0.9 if token == 0 else 0.01 for token in range(11)}
    fit = goodness_of_fit([(0,)] * 90 + [(token,) for token in range(1, 11)], law)
    assert fit.df == 1 and fit.statistic == pytest.approx(0.0)
    assert goodness_of_fit([(0,)] * 90, {(0,): 1.0}) == Fit(0.0, 0)


@pytest.mark.parametrize("level", [0.1, 0.01])
def test_false_alarms_of_a_chi_square_are_as_rare_as_stated(level: float) -> None:
    """One in 1/ALPHA seeds would turn this red; this seed does not."""
    source = random.Random(1)
    law = {(token,): mass for token, mass in enumerate(P)}
    repeats = 2000
    alarms = sum(
        goodness_of_fit([(t,) for t in source.choices(range(5), P, k=300)], law).p_value < level
        for _ in range(repeats)
    )
    low, high = binom.ppf([ALPHA / 2, 1 - ALPHA / 2], repeats, level)
    assert low <= alarms <= high
