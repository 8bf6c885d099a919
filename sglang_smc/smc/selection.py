"""How one of m drafted siblings is selected, so that the target can take it.

Tokens stand in bins, in the order of target / draft. Bins get levels that rise with it, and tiers
are runs of `OFFSETS` levels that begin at a random offset; the first sibling in the highest tier
is selected. Two tokens far apart in level are ranked surely, two close ones only now and then, so
that the law's density over the draft can rise as steeply as the target's and no more. Where the
tiers are all one, the law is the draft; where each token has its own, the rule is the greedy order
of Thomas and Pal (arXiv 2602.16961). Any bins and any levels are exact, since the law follows from
them; these are near the best, and nearer the finer the bins are.
"""

from typing import NamedTuple

import torch

OFFSETS = 32  # levels in a tier; more come closer to the best rule, at hardly any cost
MAX_TIERS = 3  # tiers on one side of the cut; more change nothing measurable
NUM_LEVELS = 2 * MAX_TIERS * OFFSETS + OFFSETS + 1
TINY = 1e-12
NUDGE = 1e-4  # of a level: so much below a whole one counts as rounding


class Rule(NamedTuple):
    """How one of several siblings is selected, per group, by the bin of its token."""

    levels: torch.Tensor  # [G, B] int64: a bin's rank; tiers are runs of `OFFSETS` levels
    density: torch.Tensor  # [G, B] float64: the law of the selected token, over the draft


class _Ranked(NamedTuple):
    """Bins in the order of target / draft. Sums have B + 1 entries, from 0 on."""

    ratio: torch.Tensor  # [G, B]: target over draft
    target: torch.Tensor  # [G, B + 1]: mass of the first bins, in all the path's chance
    draft: torch.Tensor  # [G, B + 1]: mass of the first bins, 1 in all
    cut: torch.Tensor  # [G, 1]: so many bins are drafted more than the target can take


def select(levels: torch.Tensor, follows: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first chain ``[G]`` in the highest tier, of those that follow.

    Args:
        levels: ``[G, N]`` of the chains' tokens.
        follows: ``[G, N]`` bool.
        uniforms: ``[G]``; where tiers begin.
    """
    offset = (uniforms * OFFSETS).long().unsqueeze(1)
    tier = (levels + offset).div(OFFSETS, rounding_mode="floor")
    lowest = torch.iinfo(tier.dtype).min  # a lone chain's offset may be no number at all
    return torch.where(follows, tier, lowest).argmax(1)


def selection_rule(
    ratio: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor,
    num_siblings: torch.Tensor,
    max_siblings: int,
) -> Rule:
    """Which of m draws from ``draft`` to select so that ``target`` can take it.

    Args:
        ratio: ``[G, B]`` float64 in rising order: target / draft in each bin.
        target: ``[G, B]`` float64 masses, of any sum up to 1.
        draft: ``[G, B]`` float64 masses, of sum 1.
        num_siblings: ``[G]``, m from 1 to ``max_siblings``.
    """
    count = num_siblings.unsqueeze(1)
    ranked = _rank(ratio, target, draft, count)
    levels = _levels(ranked, _best_density(ranked, count), count)
    return Rule(levels, _law(levels, ranked.draft, count, max_siblings).gather(1, levels))


def _rank(
    ratio: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, count: torch.Tensor
) -> _Ranked:
    """Add up the bins, and find the set that q forces on the selection most."""
    mass = torch.nn.functional.pad(torch.stack([target, draft]).cumsum(2), (1, 0))
    drafted = mass[1] / mass[1, :, -1:]
    return _Ranked(ratio, mass[0], drafted, cut=(drafted**count - mass[0]).argmax(1, keepdim=True))


def _best_density(ranked: _Ranked, count: torch.Tensor) -> torch.Tensor:
    """Law over draft ``[G, B]``, in order, of the best rule that rises as little as possible.

    All draws fall below the cut with probability forced = draft^m, more than the target has
    there, else one above it is selected, which the target can take. So the law may exceed the
    target only below the cut, where water is filled up to a floor, and is cut to a ceiling above.
    """
    below = _below_cut(ranked)
    draft, target = ranked.draft, ranked.target
    forced = draft.gather(1, ranked.cut) ** count
    taken = target.gather(1, ranked.cut)
    floors = (forced - taken + target[:, 1:]) / draft[:, 1:]
    floor = floors.masked_fill(~below | (draft[:, 1:] <= 0), torch.inf).amin(1, keepdim=True)
    rest = 1.0 - draft[:, :-1]
    ceilings = (1.0 - forced + taken - target[:, :-1]) / rest
    ceiling = ceilings.masked_fill(below | (rest <= TINY), 0.0).amax(1, keepdim=True)
    return torch.where(
        below, torch.maximum(ranked.ratio, floor), torch.minimum(ranked.ratio, ceiling)
    )


def _below_cut(ranked: _Ranked) -> torch.Tensor:
    """Which of the ordered bins lie below the cut, ``[G, B]``."""
    return torch.arange(ranked.ratio.shape[1], device=ranked.cut.device) < ranked.cut


def _levels(ranked: _Ranked, density: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Levels ``[G, B]`` in order: a tier begins between two bins as often as it must.

    One threshold at draft mass t, on a side of the cut that spans lo to hi, lets the density
    jump by J(t) = (hi^m - t^m) / (hi - t) - (t^m - lo^m) / (t - lo). So it is put there with
    probability (wanted jump) / J(t). That gives the density exactly as long as a side's
    probabilities sum to 1 at most, and approximately where there are several thresholds at once.
    """
    below = _below_cut(ranked)
    at_cut, at = ranked.draft.gather(1, ranked.cut), ranked.draft[:, 1:]
    low, high = torch.where(below, 0.0, at_cut), torch.where(below, at_cut, 1.0)
    rise = (high**count - at**count) / (high - at).clamp_min(TINY)
    rise = rise - (at**count - low**count) / (at - low).clamp_min(TINY)
    wanted = density.diff(dim=1, append=density[:, -1:])
    splits = (wanted / rise.clamp_min(TINY)).clamp(0.0, 1.0)
    splits = splits.masked_fill((high - at <= TINY) | (at - low <= TINY), 0.0)
    place = splits.cumsum(1) - splits  # in tiers, of both sides one after the other
    first_above = place.gather(1, ranked.cut.clamp_max(place.shape[1] - 1))
    place = torch.where(below, place, place - first_above)
    spans = torch.stack([place.masked_fill(below, 0.0), place.masked_fill(~below, 0.0)])
    above_span, below_span = spans.amax(2, keepdim=True)
    shrink = MAX_TIERS / torch.where(below, below_span, above_span).clamp_min(MAX_TIERS)
    levels = (place * shrink * OFFSETS + NUDGE).long().clamp(0, MAX_TIERS * OFFSETS)
    # No tier reaches across the cut. The maximum undoes roundings of a parallel sum.
    levels = torch.where(below, levels, levels + (MAX_TIERS + 1) * OFFSETS)
    return levels.cummax(1).values


def _law(
    levels: torch.Tensor, draft: torch.Tensor, count: torch.Tensor, max_siblings: int
) -> torch.Tensor:
    """Law over draft of the selected token, per level, ``[G, levels]``.

    A tier that holds the draft's mass from x to y is selected with probability y^m - x^m, and
    then gives the draft restricted to it: density (y^m - x^m) / (y - x), here as a sum of
    powers, which needs no division. A level's law is the mean over the tiers that hold it.
    """
    size = len(levels)
    edges = torch.arange(1 - OFFSETS, NUM_LEVELS + OFFSETS, device=levels.device)
    num_below = torch.searchsorted(levels, edges.expand(size, -1).contiguous())
    mass_below = draft.gather(1, num_below)
    start, stop = mass_below[:, :-OFFSETS], mass_below[:, OFFSETS:]
    density, power = torch.ones_like(start), torch.ones_like(start)
    for n in range(1, max_siblings):
        power = power * start
        density = torch.where(n < count, density * stop + power, density)
    total = torch.nn.functional.pad(density.cumsum(1), (1, 0))
    return (total[:, OFFSETS:] - total[:, :-OFFSETS]) / OFFSETS
