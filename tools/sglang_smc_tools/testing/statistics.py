"""Compute statistics with a known distribution for texts that follow the target.

Functions import scipy themselves: the import takes half a second, which --help skips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Text = tuple[int, ...]
Token = int | str  # servers name tokens by id or by text
Top = Mapping[Any, float]
"""Maps the likeliest tokens, by id or by text, to their log-probabilities."""

SMALLEST_CELL = 8.0
"""Expected answers per cell, at least: the chi-square approximation holds from there on."""

_RAREST = 1e-9  # a mass below it is rounding
_FARTHEST = 5.0  # bound on |log q/p| of a token


class Mean(NamedTuple):
    """An estimated mean and its standard error."""

    estimate: float
    standard_error: float


class Fit(NamedTuple):
    """A chi-square statistic: its mean is ``df``, its standard deviation sqrt(2 df)."""

    statistic: float
    df: int

    @property
    def p_value(self) -> float:
        from scipy.stats import chi2

        return float(chi2.sf(self.statistic, self.df)) if self.df else 1.0


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of two or more independent values."""
    import numpy

    error = numpy.std(values, ddof=1) / math.sqrt(len(values))
    return Mean(float(numpy.mean(values)), float(error))


def p_value_of_mean(values: Sequence[float], expected: float) -> float:
    """Return the two-sided p-value of independent values having this mean.

    Uses the normal approximation of Student's t after Hall's transformation (1992), which corrects
    for the values' skewness: a mean of weights is too low more often than too high.
    """
    from scipy.stats import norm, skew

    mean = mean_of(values)
    if mean.standard_error == 0.0:
        return float(mean.estimate == expected)
    t = (mean.estimate - expected) / mean.standard_error
    a = float(skew(values)) / math.sqrt(len(values))
    return float(2 * norm.sf(abs(t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6)))


def p_value_of_count(count: int, chances: Sequence[float]) -> float:
    """Return the two-sided p-value of so many of independent events with these probabilities."""
    from scipy.stats import poisson_binom

    law = poisson_binom([min(1.0, chance) for chance in chances])  # rounding leaves more than 1
    return min(1.0, 2.0 * float(min(law.cdf(count), law.sf(count - 1))))


def per_token(sums: Sequence[float], lengths: Sequence[int]) -> Mean:
    """Return the mean per token of sums over independent answers of these lengths."""
    total = sum(lengths)
    mean = math.fsum(sums) / total
    gaps = [value - mean * length for value, length in zip(sums, lengths, strict=True)]
    return Mean(mean, math.sqrt(math.fsum(gap * gap for gap in gaps)) / total)


def goodness_of_fit(
    texts: Iterable[Text], law: Mapping[Text, float], smallest: float = SMALLEST_CELL
) -> Fit:
    """Return Pearson's chi-square of independent texts under a distribution.

    Args:
        law: prefix -> mass of the texts of which it is the longest prefix here. The rest
            up to 1, and cells with too few expected texts, form one cell.
    """
    counts = Counter(_cell(text, law) for text in texts)
    size = counts.total()
    common = [cell for cell, mass in law.items() if mass * size >= smallest]
    observed = [float(counts[cell]) for cell in common]
    expected = [law[cell] * size for cell in common]
    observed.append(size - math.fsum(observed))
    expected.append(max(0.0, size - math.fsum(expected)))
    if expected[-1] < smallest and len(expected) > 1:  # merged into the thinnest cell
        thinnest = min(range(len(expected) - 1), key=expected.__getitem__)
        observed[thinnest] += observed.pop()
        expected[thinnest] += expected.pop()
    if len(expected) == 1:
        return Fit(0.0, 0)
    gaps = zip(observed, expected, strict=True)
    return Fit(math.fsum((seen - mean) ** 2 / mean for seen, mean in gaps), len(expected) - 1)


def _cell(text: Text, law: Mapping[Text, float]) -> Text | None:
    prefixes = (text[:length] for length in range(len(text), -1, -1))
    return next((prefix for prefix in prefixes if prefix in law), None)


def innovation(token: Token, top: Top) -> float:
    """Return log p(token) minus its mean under p: mean 0 under p, positive if texts are too likely.

    Tokens outside ``top``, which maps tokens to log p, count as one token. That is a function of
    the context, so the mean stays exactly 0.
    """
    masses = {name: math.exp(value) for name, value in top.items()}
    rest = max(0.0, 1.0 - math.fsum(masses.values()))
    of_rest = math.log(max(rest, _RAREST))
    mean = math.fsum(masses[name] * value for name, value in top.items()) + rest * of_rest
    return top.get(token, of_rest) - mean


def tilt(token: Token, top_p: Top, top_q: Top) -> float:
    """Return log q/p of the token minus its mean under p: mean 0 under p, positive towards q.

    Tokens that one side lacks count as log q/p = 0; others are clamped to `_FARTHEST` either way.
    """
    ratios = {
        name: max(-_FARTHEST, min(_FARTHEST, top_q[name] - value))
        for name, value in top_p.items()
        if name in top_q
    }
    mean = math.fsum(math.exp(top_p[name]) * ratio for name, ratio in ratios.items())
    return ratios.get(token, 0.0) - mean


def rank_uniform(token: Token, top: Top, uniform: float) -> float:
    """Return the mass of the tokens that are likelier under p, plus a share of the token's own.

    Uniform on [0, 1] and independent from token to token under p. Tokens outside ``top`` count as
    one, the last.
    """
    own = top.get(token, -math.inf)
    above = math.fsum(
        math.exp(value)
        for name, value in top.items()
        if value > own or (value == own and str(name) < str(token))
    )
    mass = math.exp(own) if token in top else max(0.0, 1.0 - above)
    return min(1.0, above + uniform * mass)
