"""Resampling: which particles go on, and in how many copies.

Every scheme has one signature, ``scheme(weights, uniforms, num_particles=None) -> ancestors``:

weights         [..., S] normalised, float64, at least one positive
uniforms        [..., S] float64 in [0, 1); a scheme uses as many as it needs
num_particles   [...] int64, N <= S: slots beyond N are empty and weigh nothing; None is N = S
ancestors       [..., S] int64; slot i < N becomes a copy of particle ``ancestors[i]``,
                what stands in the others means nothing

All are unbiased, E[offspring of n] = N w_n, and none ever chooses a particle of
weight zero. They differ in the variance that they add (Chopin and Papaspiliopoulos,
An Introduction to Sequential Monte Carlo, 2020, chapter 9):

systematic    one uniform for all; offspring floor or ceil of N w_n; the default
stratified    one uniform per stratum; lower variance than multinomial, and proven
multinomial   N independent draws; the textbook's, with the highest variance
residual      floor(N w_n) copies for sure, the rest multinomial
ssp           Srinivasan sampling process (Gerber, Chopin and Whiteley 2019):
              floor or ceil as systematic, with a proof of convergence
"""

from collections.abc import Callable

import torch

Scheme = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def systematic(
    weights: torch.Tensor, uniforms: torch.Tensor, num_particles: torch.Tensor | None = None
) -> torch.Tensor:
    """Points ``(u + i) / N`` through the inverse distribution function."""
    points = (uniforms[..., :1] + _slots(weights)) / _count(weights, num_particles)
    return _inverse_cdf(weights, points)


def stratified(
    weights: torch.Tensor, uniforms: torch.Tensor, num_particles: torch.Tensor | None = None
) -> torch.Tensor:
    """One point in each interval ``[i / N, (i + 1) / N)``."""
    points = (uniforms + _slots(weights)) / _count(weights, num_particles)
    return _inverse_cdf(weights, points)


def multinomial(
    weights: torch.Tensor, uniforms: torch.Tensor, num_particles: torch.Tensor | None = None
) -> torch.Tensor:
    """N independent draws."""
    return _inverse_cdf(weights, uniforms)


def residual(
    weights: torch.Tensor, uniforms: torch.Tensor, num_particles: torch.Tensor | None = None
) -> torch.Tensor:
    """``floor(N w_n)`` copies of each particle, what is left by multinomial draws."""
    copies, fractions = _split(weights, num_particles)
    num_certain = copies.sum(-1, keepdim=True)
    certain = _repeat(copies)
    drawn = _inverse_cdf(fractions, uniforms)
    return torch.where(_slots(weights) < num_certain, certain, drawn)


def ssp(
    weights: torch.Tensor, uniforms: torch.Tensor, num_particles: torch.Tensor | None = None
) -> torch.Tensor:
    """Round each ``N w_n`` up or down, pair by pair, so that each pair keeps its sum."""
    copies, fractions = _split(weights, num_particles)
    undecided = torch.zeros_like(copies[..., :1])
    for other in range(1, weights.shape[-1]):
        fractions, undecided = _settle_one(fractions, undecided, other, uniforms[..., other, None])
    # Fractions sum to an integer, so the one left over is whole up to rounding.
    return _repeat(copies + fractions.round().long())


SCHEMES: dict[str, Scheme] = {
    scheme.__name__: scheme for scheme in (systematic, stratified, multinomial, residual, ssp)
}


def _slots(weights: torch.Tensor) -> torch.Tensor:
    return torch.arange(weights.shape[-1], device=weights.device)


def _inverse_cdf(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The particle whose share of [0, 1) holds each point, ``[..., N]``."""
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1:]
    found = torch.searchsorted(cumulative, points * total, right=True)
    # Rounding may carry a point to the total itself: stay at the last positive weight.
    return torch.minimum(found, (cumulative < total).sum(-1, keepdim=True))


def _count(weights: torch.Tensor, num_particles: torch.Tensor | None) -> torch.Tensor | int:
    """N, as ``[..., 1]`` where groups differ in it."""
    return weights.shape[-1] if num_particles is None else num_particles.unsqueeze(-1)


def _split(
    weights: torch.Tensor, num_particles: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``N w_n`` as whole copies (int64) and the fractions beyond them."""
    expected = weights * _count(weights, num_particles)
    copies = expected.floor()
    return copies.long(), expected - copies


def _repeat(copies: torch.Tensor) -> torch.Tensor:
    """Ancestors in order from offspring counts; slots beyond their sum repeat the last."""
    found = torch.searchsorted(
        copies.cumsum(-1), _slots(copies).expand_as(copies).contiguous(), right=True
    )
    return found.clamp_max(copies.shape[-1] - 1)


def _settle_one(
    fractions: torch.Tensor, undecided: torch.Tensor, other: int, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move mass between two fractions until one is 0 or 1; return which is not.

    Raising a by ``up_a`` with probability ``up_b / (up_a + up_b)``, else b by ``up_b``,
    keeps both expectations.
    """
    others = torch.full_like(undecided, other)
    a, b = fractions.gather(-1, undecided), fractions.gather(-1, others)
    up_a, up_b = torch.minimum(1 - a, b), torch.minimum(1 - b, a)
    raise_a = (uniform * (up_a + up_b) < up_b) | (b == 0)  # a dead particle gains nothing
    # Set what settles to its exact value: a sum could miss 0 or 1 by a rounding.
    full = a + b >= 1  # then the raised one becomes 1, else the lowered one becomes 0
    high, low = torch.where(full, 1.0, a + b), torch.where(full, a + b - 1, 0.0)
    a, b = torch.where(raise_a, high, low), torch.where(raise_a, low, high)
    fractions = fractions.scatter(-1, undecided, a).scatter(-1, others, b)
    return fractions, torch.where(raise_a == full, others, undecided)
