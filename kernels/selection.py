"""Compute the rule that selects one of several siblings, one program a group."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.smc import verification

NUM_BINS = tl.constexpr(verification.NUM_BINS)
PER_NAT = tl.constexpr(verification.BINS_PER_NAT)
OFFSETS = tl.constexpr(verification.OFFSETS)
_MAX_TIERS = tl.constexpr(verification.MAX_TIERS)
_TINY, _NUDGE = tl.constexpr(verification.TINY), tl.constexpr(verification.NUDGE)
_NUM_STARTS = tl.constexpr(
    triton.next_power_of_2(verification.NUM_LEVELS + verification.OFFSETS - 1)
)
_MANY_TILES = tl.constexpr(64)  # tiles of masses that are loaded at once


class BinRule(NamedTuple):
    """A group's selection rule by bin; undefined where it does not walk."""

    levels: torch.Tensor  # [G, B] int32: a bin's rank
    density: torch.Tensor  # [G, B] float32: distribution of the selected token over q
    scale: torch.Tensor  # [G] float32: target over p


def selection_rule(
    walking: torch.Tensor, chance: torch.Tensor, follows: torch.Tensor, masses: torch.Tensor
) -> BinRule:
    """Return the rule for the bins of `smc.verification.bins_of`, in one launch.

    Reference: `sglang_smc.smc.verification.selection_rule`, of the masses of all tiles together,
    with `smc.verification.middle_ratios` in bins without draft mass. Levels agree unless one is
    within rounding of the next, densities otherwise to 1e-6.

    Args:
        walking: ``[G]`` bool; others get no rule.
        chance: ``[G]`` float64.
        follows: ``[G, N]`` bool, contiguous.
        masses: ``[G, tiles, 2, B]`` float32 of p and of q, contiguous.
    """
    size, num_tiles = masses.shape[:2]
    max_chains, device = follows.shape[1], masses.device
    rule = BinRule(
        levels=torch.empty(size, verification.NUM_BINS, dtype=torch.int32, device=device),
        density=torch.empty(size, verification.NUM_BINS, dtype=torch.float32, device=device),
        scale=torch.empty(size, dtype=torch.float32, device=device),
    )
    padded = triton.next_power_of_2(max_chains)
    _make_rule[(size,)](
        walking, chance, follows, masses, rule, max_chains, num_tiles, padded, num_warps=4
    )
    return rule


@triton.jit
def _all_masses(masses, group, num_tiles):
    """Return the masses of p and q in each bin, summed over tiles."""
    bins = tl.arange(0, NUM_BINS)
    in_p = tl.zeros([NUM_BINS], dtype=tl.float64)
    in_q = tl.zeros([NUM_BINS], dtype=tl.float64)
    for first in range(0, num_tiles, _MANY_TILES):
        part = first + tl.arange(0, _MANY_TILES)
        at = masses + ((group * num_tiles + part) * (2 * NUM_BINS))[:, None] + bins[None, :]
        inside = (part < num_tiles)[:, None]
        in_p += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float64), 0)
        in_q += tl.sum(tl.load(at + NUM_BINS, mask=inside, other=0.0).to(tl.float64), 0)
    return in_p, in_q


@triton.jit
def _to_power(base, count):
    power = base
    for _ in range(1, count):
        power *= base
    return power


@triton.jit
def _before(sums, place):
    """Return the exclusive sums before each bin, from inclusive ones."""
    earlier = tl.gather(sums, tl.maximum(place - 1, 0), 0)
    return tl.where(place > 0, earlier, 0.0)


@triton.jit
def _best_density(target, draft, ratio, below, at_cut, forced, taken, bins):
    """Compute `smc.verification._best_density` from inclusive sums."""
    floors = (forced - taken + target) / tl.where(draft > 0, draft, 1.0)
    floor = tl.min(tl.where(below & (draft > 0), floors, float("inf")), 0)
    rest = 1.0 - _before(draft, bins)
    has_rest = rest > _TINY
    ceilings = (1.0 - forced + taken - _before(target, bins)) / tl.where(has_rest, rest, 1.0)
    ceiling = tl.max(tl.where(~below & has_rest, ceilings, 0.0), 0)
    return tl.where(below, tl.maximum(ratio, floor), tl.minimum(ratio, ceiling))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _levels(density, draft, count, below, cut, at_cut, forced, bins):
    """Compute `smc.verification._levels` from inclusive sums."""
    low, high = tl.where(below, 0.0, at_cut), tl.where(below, at_cut, 1.0)
    of_low, of_high = tl.where(below, 0.0, forced), tl.where(below, forced, 1.0)
    here = _to_power(draft, count)
    rise = (of_high - here) / tl.maximum(high - draft, _TINY)
    rise -= (here - of_low) / tl.maximum(draft - low, _TINY)
    wanted = tl.gather(density, tl.minimum(bins + 1, NUM_BINS - 1), 0) - density
    splits = tl.minimum(tl.maximum(wanted / tl.maximum(rise, _TINY), 0.0), 1.0)
    splits = tl.where((high - draft <= _TINY) | (draft - low <= _TINY), 0.0, splits)
    place = tl.cumsum(splits, 0) - splits
    first_above = tl.sum(tl.where(bins == tl.minimum(cut, NUM_BINS - 1), place, 0.0), 0)
    below_span = tl.max(tl.where(below, place, 0.0), 0)
    place = tl.where(below, place, place - first_above)
    above_span = tl.max(tl.where(below, 0.0, place), 0)
    span = tl.maximum(tl.where(below, below_span, above_span), _MAX_TIERS)
    levels = (place * (_MAX_TIERS / span) * OFFSETS + _NUDGE).to(tl.int32)
    levels = tl.minimum(tl.maximum(levels, 0), _MAX_TIERS * OFFSETS)
    levels += tl.where(below, 0, (_MAX_TIERS + 1) * OFFSETS)
    return tl.associative_scan(levels, 0, _larger)


@triton.jit
def _mass_below(levels, draft, edges):
    """Return the draft's mass on levels below each edge, by binary search of sorted levels."""
    num_below = tl.zeros_like(edges)
    jump: tl.constexpr = NUM_BINS
    for halving in tl.static_range(0, 31):
        if (jump >> halving) > 0:
            further = num_below + (jump >> halving)
            level = tl.gather(levels, tl.minimum(further, NUM_BINS) - 1, 0)
            num_below = tl.where((further <= NUM_BINS) & (level < edges), further, num_below)
    return _before(draft, num_below)


@triton.jit
def _level_density(levels, draft, count):
    """Compute `smc.verification._law` for each bin."""
    starts = tl.arange(0, _NUM_STARTS) + (1 - OFFSETS)
    start = _mass_below(levels, draft, starts)
    stop = _mass_below(levels, draft, starts + OFFSETS)
    density = tl.full([_NUM_STARTS], 1.0, dtype=tl.float64)
    power = tl.full([_NUM_STARTS], 1.0, dtype=tl.float64)
    for _ in range(1, count):
        power *= start
        density = density * stop + power
    total = tl.cumsum(density, 0)
    return (tl.gather(total, levels + OFFSETS - 1, 0) - _before(total, levels)) / OFFSETS


@triton.jit
def _make_rule(
    walking, chance, follows, masses, rule, max_chains, num_tiles, padded_chains: tl.constexpr
):
    group = tl.program_id(0)
    if tl.load(walking + group) == 0:
        return
    chain = tl.arange(0, padded_chains)
    own = group * max_chains + chain
    count = tl.sum(tl.load(follows + own, mask=chain < max_chains, other=0).to(tl.int32), 0)
    in_p, in_q = _all_masses(masses, group, num_tiles)
    p_total, q_total = tl.sum(in_p, 0), tl.sum(in_q, 0)  # 1, but for rounding
    scale = tl.load(chance + group) / p_total
    in_target, in_draft = in_p * scale, in_q / q_total
    bins = tl.arange(0, NUM_BINS)
    middle = tl.exp((bins - NUM_BINS // 2 + 0.5).to(tl.float64) / PER_NAT)
    is_drafted = in_draft > 0
    ratio = tl.where(is_drafted, in_target / tl.where(is_drafted, in_draft, 1.0), middle)

    target, draft = tl.cumsum(in_target, 0), tl.cumsum(in_draft, 0)
    draft = draft / tl.sum(tl.where(bins == NUM_BINS - 1, draft, 0.0), 0)
    excess = _to_power(draft, count) - target
    most = tl.max(excess, 0)
    first = tl.min(tl.where(excess == most, bins, NUM_BINS - 1), 0)
    cut = tl.where(most > 0, first + 1, 0)
    below = bins < cut
    at_cut = tl.sum(tl.where(bins == cut - 1, draft, 0.0), 0)
    taken = tl.sum(tl.where(bins == cut - 1, target, 0.0), 0)
    forced = _to_power(at_cut, count)

    density = _best_density(target, draft, ratio, below, at_cut, forced, taken, bins)
    levels = _levels(density, draft, count, below, cut, at_cut, forced, bins)
    law = _level_density(levels, draft, count)
    tl.store(rule.levels + group * NUM_BINS + bins, levels)
    tl.store(rule.density + group * NUM_BINS + bins, (law / q_total).to(tl.float32))
    tl.store(rule.scale + group, scale.to(tl.float32))
