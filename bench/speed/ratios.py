"""Compute ratios of speeds with intervals, from a few repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

from results import Interval
from scipy.stats import t as student

LEVEL = 0.95


class Estimate(NamedTuple):
    """A mean, its variance, its degrees of freedom, and the number of repeats."""

    mean: float
    variance: float
    freedom: float
    n: int

    def minus(self, other: Estimate) -> Estimate:
        """Return the difference of two independent estimates, with Welch's degrees of freedom."""
        total = self.variance + other.variance
        n = min(self.n, other.n)
        if not 0 < total < math.inf:
            return Estimate(self.mean - other.mean, total, min(self.freedom, other.freedom), n)
        parts = ((self.variance, self.freedom), (other.variance, other.freedom))
        spread = sum(part**2 / freedom for part, freedom in parts if freedom)
        return Estimate(self.mean - other.mean, total, total**2 / spread, n)

    def interval(self) -> Interval:
        """Return the mean with its 95 % interval by Student's t distribution."""
        half = self._half()
        return Interval(self.mean, self.mean - half, self.mean + half, self.n)

    def ratio(self) -> Interval:
        """Return the exponential of the mean, with its 95 % interval."""
        half = self._half()
        low, high = math.exp(self.mean - half), math.exp(min(self.mean + half, 700.0))
        return Interval(math.exp(self.mean), low, high, self.n)

    def _half(self) -> float:
        if not self.freedom or math.isinf(self.variance):
            return math.inf
        return float(student.ppf((1 + LEVEL) / 2, self.freedom)) * math.sqrt(self.variance)


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
