"""Compute 95 % intervals: of proportions, ratios of sums, differences, and ratios of speeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

Z95 = 1.959964


class Interval(NamedTuple):
    """An estimate with its 95 % interval; ``n`` is the number of trials."""

    mean: float
    low: float
    high: float
    n: int


def wilson(hits: int, n: int) -> Interval:
    """Return a proportion with Wilson's interval, which stays within 0 and 1."""
    from scipy.stats import binomtest  # slow to import

    found = binomtest(hits, n).proportion_ci(method="wilson")
    return Interval(hits / n, found.low, found.high, n)


def ratio(numerators: np.ndarray, denominators: np.ndarray | float = 1.0) -> Interval:
    """Return a ratio of sums over two or more answers ``[n]``, with its linearized interval.

    Without denominators it is the mean, with its normal interval.
    """
    return _around(*_linearized(numerators, denominators))


def paired_ratio_difference(
    ours: tuple[np.ndarray, np.ndarray], reference: tuple[np.ndarray, np.ndarray]
) -> Interval:
    """Return our ratio of sums minus the reference's, over the same problems in order, ``[n]``."""
    one, its = _linearized(*ours)
    other, their = _linearized(*reference)
    return _around(one - other, its - their)


def paired_ratio_of_ratios(
    ours: tuple[np.ndarray, np.ndarray], reference: tuple[np.ndarray, np.ndarray]
) -> Interval:
    """Return our ratio of sums over the reference's, over the same problems in order, ``[n]``."""
    one, its = _linearized(*ours)
    other, their = _linearized(*reference)
    return _around(one / other, (its - one / other * their) / other)


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
    up = (won + 1) / (n + 2)
    down = (lost + 1) / (n + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low = max(-1.0, up - down - half)
    high = min(1.0, up - down + half)
    return Interval((won - lost) / n, low, high, n)


# --- Distances from the target, in nats
#
# An answer is one draw, its tokens are not, so all intervals are over answers. With p and q the
# distributions of the next token (`fidelity/scoring.py`), H the entropy of p, l = log q/p, and sums
# over an answer's tokens:
#
#   innovation  sum(log p + H): mean 0 under the target, as a martingale. Above 0 if the text is
#               sharper than the target's, below 0 if it is flatter.
#   tilt        sum(l - E_p l) / sum(Var_p l): its numerator has mean 0 under the target, too.
#               One Newton step from 0 to the b for which p^(1 - b) q^b fits the answers best.
#   KL          KL(s || p) >= E_s[log m(x) / p(x)] for the distribution s of the answers x and any
#               distribution m of texts (Gibbs). Here m samples each token from (1 - w) p + w q.

#: The weights w that the bound chooses from; at 0 the bound is 0.
WEIGHTS = np.linspace(0.0, 0.98, 50)
FOLDS = 5


def kl_at_least(log_ratios: Sequence[np.ndarray]) -> Interval:
    """Return a lower bound of KL(s || p), nats per answer, from log q/p of each answer's tokens.

    The weight for a fold of the answers is the best one of all others, so that no answer chooses
    its own. A bound below 0 is reported as 0.
    """
    gains = _log_likelihood_gains(log_ratios)  # [n, W]
    n = len(gains)
    fold = np.arange(n) % FOLDS
    values = np.empty(n)
    for held_out in range(FOLDS):
        own = fold == held_out
        values[own] = gains[own][:, gains[~own].mean(0).argmax()]
    mean, low, high = (max(0.0, value) for value in ratio(values)[:3])
    return Interval(mean, low, high, n)


def _log_likelihood_gains(log_ratios: Sequence[np.ndarray]) -> np.ndarray:
    """Return log m(x) / p(x) of n answers at each weight, ``[n, W]``."""
    ratios = np.exp(np.concatenate(log_ratios))  # [tokens]
    starts = np.cumsum([0, *(len(answer) for answer in log_ratios[:-1])])
    each = [np.add.reduceat(np.log1p(w * (ratios - 1)), starts) for w in WEIGHTS]
    return np.stack(each, axis=1)


def watched_tilt(meta_infos: Sequence[Mapping[str, Any]]) -> Interval | None:
    """Return the mean of the server's own tilt, answers weighted by their information."""
    keys = ("spec_smc_tilt", "spec_smc_tilt_information")
    found = [tuple(info.get(key) for key in keys) for info in meta_infos]
    pairs = np.array([pair for pair in found if None not in pair], dtype=float).reshape(-1, 2)
    total = float(pairs[:, 1].sum())
    if total <= 0:
        return None
    mean = float(pairs.prod(1).sum() / total)
    half = Z95 / math.sqrt(total)
    return Interval(mean, mean - half, mean + half, len(pairs))


# --- Speeds, of a few repeats


def mean_of(values: Sequence[float]) -> Interval:
    """Return the mean of one or more repeats with Student's interval; one has no bounds."""
    from scipy.stats import ttest_1samp  # slow to import

    return Interval(fmean(values), *_bounds(ttest_1samp, values, 0.0), len(values))


def speed_ratio(logs: Sequence[float], others: Sequence[float] = ()) -> Interval:
    """Return exp of the mean of log ratios with Student's interval, Welch's over the others'."""
    from scipy.stats import ttest_ind  # slow to import

    mean, low, high, n = mean_of(logs)
    if others:
        low, high = _bounds(ttest_ind, logs, others, equal_var=False)
        mean = mean - fmean(others)
        n = min(n, len(others))
    return Interval(math.exp(mean), math.exp(low), math.exp(min(high, 700.0)), n)


def _bounds(test: Callable[..., Any], *samples: Any, **how: Any) -> tuple[float, float]:
    """Return the interval of a test; infinite bounds where one repeat says nothing of spread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the degrees of freedom, 0
        found = test(*samples, **how).confidence_interval()
    return (-math.inf, math.inf) if math.isnan(found.low) else (found.low, found.high)
