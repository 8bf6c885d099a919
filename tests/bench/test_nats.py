"""The statistics of fidelity, on two small models whose every law is known.

Target and draft are Markov chains over six tokens, of which one ends a text; a sampler takes a
share of its tokens from the draft. Seeds are fixed; the stated probabilities are over seeds.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from fidelity.nats import FOLDS, kl_at_least, watched_tilt
from fidelity.scoring import token_statistics
from intervals import Z95, Interval, paired_ratio_difference, ratio
from scipy.stats import binom

V, EOS, START, LIMIT = 6, 0, 5, 80
SAMPLES, ANSWERS = 100, 300
#: A published row has so many answers.
PUBLISHED = 2000


class Answers(NamedTuple):
    """Sums over the tokens of each answer, ``[n]``, and log q/p of each token."""

    tokens: np.ndarray
    log_p: np.ndarray
    innovation: np.ndarray
    tilt: np.ndarray
    information: np.ndarray
    log_ratios: list[np.ndarray]

    def part(self, place: int, size: int) -> "Answers":
        own = slice(place * size, (place + 1) * size)
        return Answers(*(values[own] for values in self))


def tables() -> tuple[np.ndarray, np.ndarray]:
    """log p and log q, ``[last, next]``; about as far apart as those of the shipped pair."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, V, V)) * [[[1.0]], [[0.7]]]
    logits = np.stack([noise[0], noise[0] + noise[1]])
    logits[..., EOS] = -2.5  # some 50 tokens an answer
    log_p, log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p, log_q


LOG_P, LOG_Q = tables()


def law(share: float) -> np.ndarray:
    """Of the next token, where ``share`` of all tokens are the draft's, ``[last, next]``."""
    return (1 - share) * np.exp(LOG_P) + share * np.exp(LOG_Q)


def sampled(n: int, share: float, seed: int) -> Answers:
    """``n`` answers."""
    rng, bounds = np.random.default_rng(seed), law(share).cumsum(-1)
    chain = np.full((n, LIMIT + 1), START)
    for column in range(LIMIT):
        within = bounds[chain[:, column]] < rng.random((n, 1))
        chain[:, column + 1] = np.minimum(within.sum(-1), V - 1)
    ends = (chain[:, 1:] == EOS).argmax(1)
    lengths = np.where((chain[:, 1:] == EOS).any(1), ends + 1, LIMIT)
    kept = np.arange(LIMIT) < lengths[:, None]
    last, tokens = chain[:, :-1][kept], chain[:, 1:][kept]
    found = token_statistics(LOG_P[last], LOG_Q[last], tokens)
    total = partial(np.add.reduceat, indices=np.cumsum([0, *lengths[:-1]]))
    sums = (found.log_p, found.innovation, found.tilt, found.information)
    log_ratios = np.split(found.log_ratio, np.cumsum(lengths[:-1]))
    return Answers(lengths.astype(float), *map(total, sums), log_ratios)


def tilt(answers: Answers) -> Interval:
    return ratio(answers.tilt, answers.information)


def innovation(answers: Answers) -> Interval:
    return ratio(answers.innovation, answers.tokens)


@pytest.fixture(scope="module")
def target() -> Answers:
    """Plain decoding, often enough for all samples."""
    return sampled(SAMPLES * ANSWERS, 0.0, seed=1)


@pytest.mark.parametrize("statistic", [tilt, innovation])
def test_plain_decoding_passes_in_95_of_100_samples(target: Answers, statistic: Any) -> None:
    """Of true 95 % intervals 88 to 99 of 100 cover, but for a probability of 1 %."""
    assert binom.cdf(87, SAMPLES, 0.95) + binom.sf(99, SAMPLES, 0.95) < 0.01
    found = [statistic(target.part(place, ANSWERS)) for place in range(SAMPLES)]
    assert 88 <= sum(one.low <= 0 <= one.high for one in found) <= 99


def test_problems_in_common_make_the_difference_narrow() -> None:
    """Problems differ far more than answers to one do; both arms have them in common."""
    rng = np.random.default_rng(5)
    tokens, problem = np.full(400, 50.0), rng.normal(-30, 10, 400)
    ours, reference = (problem + rng.normal(shift, 1, 400) for shift in (-1.0, 0.0))
    found = paired_ratio_difference((ours, tokens), (reference, tokens))
    assert found.low < -1 / 50 < found.high < 0
    assert found.high - found.low == pytest.approx(2 * Z95 * 2**0.5 / 20 / 50, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_one_token_in_twenty_from_the_draft_is_found(seed: int) -> None:
    """In as many answers as a published row has; missed with a probability below 1 in 1,000."""
    found = tilt(sampled(PUBLISHED, 0.05, seed))
    standard_error = (found.high - found.low) / 2 / Z95
    assert found.low > 0
    assert true_tilt(0.05) > (Z95 + 3.1) * standard_error


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_tilt_is_what_the_models_say(share: float) -> None:
    """Of 20,000 answers, to within four standard errors: off by chance once in 15,000 seeds."""
    found = tilt(sampled(20_000, share, seed=3))
    assert found.mean == pytest.approx(true_tilt(share), abs=found.high - found.low)


def test_plain_decoding_has_no_divergence(target: Answers) -> None:
    """A bound above 0 would be a false alarm: at most 2.5 in 100 on average, 9 once in 900."""
    found = [kl_at_least(target.part(place, ANSWERS).log_ratios) for place in range(SAMPLES)]
    assert binom.sf(8, SAMPLES, 0.025) < 1 / 900
    assert sum(one.low > 0 for one in found) < 9
    assert min(one.mean for one in found) == 0


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_bound_is_below_the_divergence_and_near_it(share: float) -> None:
    """A sampler that mixes is in the family that the bound chooses from, so it loses little.

    The interval's lower end is above the truth with a probability of 2.5 %.
    """
    found = kl_at_least(sampled(20_000, share, seed=6).log_ratios)
    assert found.low < true_kl(share)
    assert found.mean > 0.95 * true_kl(share)


def test_no_answer_chooses_its_own_weight() -> None:
    """One answer that looks like the draft's among others that do not, each fold with one."""
    answers = [np.array([20.0]), *(np.array([-0.5]) for _ in range(FOLDS - 1))]
    assert kl_at_least(answers) == Interval(0.0, 0.0, kl_at_least(answers).high, FOLDS)


def visits(share: float) -> np.ndarray:
    """How often a text draws its next token behind each token, on average, ``[last]``."""
    move, at, found = law(share), np.eye(V)[START], np.zeros(V)
    for _ in range(LIMIT):
        found += at
        at = at @ move
        at[EOS] = 0.0
    return found


def true_tilt(share: float) -> float:
    """The limit of the estimate."""
    p, log_ratio = np.exp(LOG_P), LOG_Q - LOG_P
    mean = (p * log_ratio).sum(-1)
    variance = (p * log_ratio**2).sum(-1) - mean**2
    shift = (law(share) * log_ratio).sum(-1) - mean
    return float(visits(share) @ shift / (visits(share) @ variance))


def true_kl(share: float) -> float:
    """KL(sampler || target) of whole texts."""
    per_token = (law(share) * (np.log(law(share)) - LOG_P)).sum(-1)
    return float(visits(share) @ per_token)


def test_ratio_by_hand() -> None:
    found = ratio(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 4.0]))
    # 6 / 8, and residuals -0.5, 0.5, 0 over a mean of 8 / 3.
    half = Z95 * (3 / 8 * 0.5) / 3**0.5
    assert found == pytest.approx((0.75, 0.75 - half, 0.75 + half, 3))


def test_the_servers_own_tilt_weighs_answers_by_their_information() -> None:
    watched = {"spec_smc_tilt": 0.3, "spec_smc_tilt_information": 12.0}
    other = {"spec_smc_tilt": -0.1, "spec_smc_tilt_information": 4.0}
    nothing = {"spec_smc_tilt": None, "spec_smc_tilt_information": 0.0}
    found = watched_tilt([watched, other, nothing, {"completion_tokens": 1}])
    assert found == pytest.approx((0.2, 0.2 - Z95 / 4, 0.2 + Z95 / 4, 2))
    assert watched_tilt([{"completion_tokens": 1}, nothing]) is None
