"""Estimate the distance of answers from the target's distribution, in nats.

An answer is one draw, its tokens are not, so all intervals are over answers. With p and q the
distributions of the next token (`scoring.py`), H the entropy of p, l = log q/p, and sums over an
answer's tokens:

    innovation  sum(log p + H): mean 0 under the target, as a martingale. Above 0 if the text is
                sharper than the target's, below 0 if it is flatter.
    tilt        sum(l - E_p l) / sum(Var_p l): its numerator has mean 0 under the target, too.
                One Newton step from 0 to the b for which p^(1 - b) q^b fits the answers best.
    KL          KL(s || p) >= E_s[log m(x) / p(x)] for the distribution s of the answers x and any
                distribution m of texts (Gibbs). Here m samples each token from (1 - w) p + w q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from intervals import Z95, Interval, ratio

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
    fold, values = np.arange(n) % FOLDS, np.empty(n)
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
    mean, half = float(pairs.prod(1).sum() / total), Z95 / math.sqrt(total)
    return Interval(mean, mean - half, mean + half, len(pairs))
