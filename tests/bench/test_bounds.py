"""The bounds bracket divergences that are known exactly, and are estimated as they should be.

Without resampling two particles are two independent texts x and y with a common first token, and
Z-hat is the mean of their weights. All laws are then sums over texts, those of the bounds, too.
Seeds are fixed; had they been drawn, the stated error probabilities are those with which correct
code would have failed.
"""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from fidelity.bounds import LARGEST_ODDS, kl_bounds, variance_of_log_evidence
from fidelity.reference import Models, Setting
from laws import enumerate_law
from results import Z95, Interval
from toy_reference import Table, Text
from toy_tables import mild_pair

NO_EOS, LENGTH, VOCAB = -1, 3, 3
#: Two particles, drafted to the end in one round and never resampled.
NEVER = Setting(2, 2, ess_threshold=0.0, stratified=False)
BOUNDS = ("upper", "upper_of_runs", "lower", "reverse_upper", "reverse_lower")


class Pair(NamedTuple):
    """What SMC with two particles does at a text x, by enumeration."""

    p: dict[Text, float]
    weight: dict[Text, float]
    others: dict[Text, float]  # law of the other particle, given the first token

    def beside(self, x: Text) -> dict[Text, float]:
        return {y: mass for y, mass in self.others.items() if y[0] == x[0]}

    def inverse(self, x: Text, y: Text) -> float:
        """1 / Z-hat."""
        return 2 / (self.weight[x] + self.weight[y])

    def s(self, x: Text) -> float:
        """Probability that x is the answer: drafted in either slot, and drawn by weight."""
        drafted = self.p[x] / self.weight[x]
        drawn = (mass * self.weight[x] * self.inverse(x, y) for y, mass in self.beside(x).items())
        return drafted * sum(drawn)

    def given(self, x: Text, num_runs: int) -> list[tuple[float, list[float]]]:
        """Law of 1 / Z-hat of conditional runs, as probabilities and values."""
        beside = self.beside(x)
        return [
            (math.prod(beside[y] for y in ys), [self.inverse(x, y) for y in ys])
            for ys in product(beside, repeat=num_runs)
        ]


MILD = mild_pair(LENGTH, VOCAB)
TARGET = Table(MILD.target)
DRAFT = Table(2 * MILD.draft - MILD.target)  # twice as far from the target
TOKENIZER: Any = SimpleNamespace(eos_token_id=NO_EOS)
TOY = Models(TARGET, DRAFT, TOKENIZER)


@pytest.fixture(scope="module")
def pair() -> Pair:
    p = enumerate_law(LENGTH, NO_EOS, lambda position: TARGET.next_probs)
    drafted = enumerate_law(LENGTH, NO_EOS, lambda at: (DRAFT if at else TARGET).next_probs)
    first = TARGET.next_probs(())
    others = {text: mass / float(first[text[0]]) for text, mass in drafted.items()}
    return Pair(p, {text: p[text] / drafted[text] for text in p}, others)


def divergences(pair: Pair) -> tuple[float, float]:
    """KL(s || p) and KL(p || s) in nats."""
    assert math.isclose(sum(map(pair.s, pair.p)), 1.0, rel_tol=1e-9)
    odds = {x: math.log(pair.s(x) / pair.p[x]) for x in pair.p}
    return sum(pair.s(x) * odds[x] for x in odds), -sum(pair.p[x] * odds[x] for x in odds)


def log_mean(values: list[float]) -> float:
    return math.log(sum(values) / len(values))


def exact_bounds(pair: Pair, num_conditional: int) -> dict[str, float]:
    """Expectations of the estimates, from the laws of the runs they use."""
    found = dict.fromkeys(BOUNDS, 0.0)
    for x, p in pair.p.items():
        s = pair.s(x)
        for chance, inverse in pair.given(x, num_conditional):
            found["lower"] += s * chance * log_mean(inverse)
            found["reverse_upper"] -= p * chance * log_mean(inverse)
            cut = min(-log_mean(inverse), math.log(LARGEST_ODDS))
            found["reverse_lower"] += p * chance * cut + s * chance * (1 - math.exp(cut))
        for chance, inverse in pair.given(x, num_conditional + 1):
            # The run that gave x has the density of a conditional one, times p / (s Z-hat).
            mass = p * chance * inverse[0]
            found["upper"] += mass * log_mean(inverse)
            found["upper_of_runs"] += mass * math.log(inverse[0])
    return found


def standard_error(interval: Interval) -> float:
    return (interval.high - interval.mean) / Z95


def test_the_expected_bounds_bracket_and_close_in(pair: Pair) -> None:
    forward, reverse = divergences(pair)
    gaps = []
    for num_conditional in (1, 2):
        exact = exact_bounds(pair, num_conditional)
        assert exact["lower"] < forward < exact["upper"] < exact["upper_of_runs"]
        assert exact["reverse_lower"] < reverse < exact["reverse_upper"]
        gaps.append(exact["upper"] - exact["lower"])
        gaps.append(exact["reverse_upper"] - exact["reverse_lower"])
    assert gaps[0] > gaps[2] and gaps[1] > gaps[3]
    assert max(gaps[2:]) < 0.25 < 0.5 < min(forward, reverse)


@pytest.mark.parametrize("num_conditional", [1, 2])
def test_bounds_are_estimated_without_bias(pair: Pair, num_conditional: int) -> None:
    """Error probability 6e-5 for each of the five."""
    found = kl_bounds(
        TOY, [[0]] * 100, NEVER, 1.0, num_conditional=num_conditional, max_new_tokens=LENGTH
    )
    for name, expected in exact_bounds(pair, num_conditional).items():
        interval = found._asdict()[name]
        assert abs(interval.mean - expected) < 4 * standard_error(interval), name
    assert found.answer_tokens == Interval(LENGTH, LENGTH, LENGTH, 100)


@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_bounds_meet_with_resampling_and_stratified_draws(resample_at: str) -> None:
    """In order and near each other, where no law is enumerated; each gap is about 0.1 nats."""
    setting = Setting(4, 2, resample_at, 0.9)
    found = kl_bounds(TOY, [[0]] * 60, setting, 1.0, max_new_tokens=5)
    assert 0 < found.upper.mean - found.lower.mean < 0.3
    assert 0 < found.reverse_upper.mean - found.reverse_lower.mean < 0.6
    assert found.upper.mean < found.upper_of_runs.mean


def test_the_variance_of_the_evidence_is_per_hundred_tokens(pair: Pair) -> None:
    """Error probability 6e-5."""
    moments = [0.0, 0.0]
    for x, p in pair.p.items():
        for chance, (inverse,) in pair.given(x, 1):
            for power in (1, 2):
                moments[power - 1] += p * chance * inverse * math.log(inverse) ** power
    expected = (moments[1] - moments[0] ** 2) / (LENGTH / 100)
    found = variance_of_log_evidence(TOY, [[0]] * 100, NEVER, 1.0, repeats=4, max_new_tokens=LENGTH)
    assert abs(found.mean - expected) < 4 * standard_error(found)
