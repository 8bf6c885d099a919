"""Compute 95 % intervals: of proportions, ratios of sums, differences, and ratios of speeds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

Z95 = 1.959964


class Interval(NamedTuple):
    """An estimate with its 95 % interval; ``n`` is the number of trials."""

    mean: float
    low: float
    high: float
    n: int


def wilson(hits: int, n: int, z: float = Z95) -> Interval:
    """Return a proportion with Wilson's interval, which stays within 0 and 1."""
    mean, spread = hits / n, z * z / n
    middle = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(mean * (1 - mean) * spread + spread * spread / 4) / (1 + spread)
    return Interval(mean, max(0.0, middle - half), min(1.0, middle + half), n)


def ratio(numerators: np.ndarray, denominators: np.ndarray | float = 1.0) -> Interval:
    """Return a ratio of sums over two or more answers ``[n]``, with its linearized interval.

    Without denominators it is the mean, with its normal interval.
    """
    return _around(*_linearized(numerators, denominators))


def paired_ratio_difference(
    ours: tuple[np.ndarray, np.ndarray], reference: tuple[np.ndarray, np.ndarray]
) -> Interval:
    """Return our ratio of sums minus the reference's, over the same problems in order, ``[n]``."""
    one, other = _linearized(*ours), _linearized(*reference)
    return _around(one[0] - other[0], one[1] - other[1])


def _linearized(
    numerators: np.ndarray, denominators: np.ndarray | float
) -> tuple[float, np.ndarray]:
    """Return the ratio, and each answer's first-order influence times n: ``[n]``, mean 0."""
    below = np.broadcast_to(denominators, numerators.shape)
    estimate = numerators.sum() / below.sum()
    return float(estimate), (numerators - estimate * below) / below.mean()


def _around(estimate: float, influence: np.ndarray) -> Interval:
    n = len(influence)
    half = Z95 * float(influence.std(ddof=1)) / math.sqrt(n)
    return Interval(estimate, estimate - half, estimate + half, n)


def paired_difference(
    ours: Mapping[Hashable, bool], reference: Mapping[Hashable, bool]
) -> Interval | None:
    """Return the share of right answers minus the reference's, on problems that both answered.

    The interval is Bonett and Price's for paired proportions (2012): Wald's, after adding one
    problem that only we solved and one that only the reference solved. Unlike Wald's it keeps a
    width where few problems differ.
    """
    common = ours.keys() & reference.keys()
    n = len(common)
    if not n:
        return None
    won = sum(ours[key] and not reference[key] for key in common)
    lost = sum(reference[key] and not ours[key] for key in common)
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
    return Interval((won - lost) / n, low, high, n)


# --- Speeds, of a few repeats


class Estimate(NamedTuple):
    """A mean, its variance, its degrees of freedom, and the number of repeats."""

    mean: float
    variance: float
    freedom: float
    n: int

    def minus(self, other: Estimate) -> Estimate:
        """Return the difference of two independent estimates, with Welch's degrees of freedom."""
        total = self.variance + other.variance
        mean, n = self.mean - other.mean, min(self.n, other.n)
        if not 0 < total < math.inf:
            return Estimate(mean, total, min(self.freedom, other.freedom), n)
        spread = sum(one.variance**2 / one.freedom for one in (self, other) if one.freedom)
        return Estimate(mean, total, total**2 / spread, n)

    def interval(self) -> Interval:
        """Return the mean with its interval by Student's t distribution."""
        half = self._half()
        return Interval(self.mean, self.mean - half, self.mean + half, self.n)

    def ratio(self) -> Interval:
        """Return the exponential of the mean, with its interval."""
        half = self._half()
        low, high = math.exp(self.mean - half), math.exp(min(self.mean + half, 700.0))
        return Interval(math.exp(self.mean), low, high, self.n)

    def _half(self) -> float:
        if not self.freedom or math.isinf(self.variance):
            return math.inf
        from scipy.stats import t as student  # slow to import

        return float(student.ppf(0.975, self.freedom)) * math.sqrt(self.variance)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the estimate from one or more repeats; a single one has infinite variance."""
    n = len(values)
    spread = variance(values) / n if n > 1 else math.inf
    return Estimate(fmean(values), spread, n - 1, n)


def log_ratio(ours: Sequence[float], theirs: Sequence[float], *, paired: bool) -> Estimate:
    """Return the log of ours over theirs; ``paired`` if they were measured in turns."""
    if paired:
        pairs = zip(ours, theirs, strict=True)
        return estimate([math.log(one / other) for one, other in pairs])
    logs = ([math.log(value) for value in values] for values in (ours, theirs))
    one, other = map(estimate, logs)
    return one.minus(other)
