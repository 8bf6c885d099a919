"""Compute intervals of proportions and means."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, stdev

from results import Z95, Interval


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


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean with its 95 % normal interval, infinite for a single value."""
    if not values:
        return None
    n, mean = len(values), fmean(values)
    half = Z95 * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    return Interval(mean, mean - half, mean + half, n)
