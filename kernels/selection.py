"""Compute the rule that selects one of several siblings, one program a group."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.smc.verification import (
    BINS_PER_NAT,
    MAX_TIERS,
    NUDGE,
    NUM_BINS,
    NUM_LEVELS,
    OFFSETS,
    TINY,
)

_MANY_TILES = 64  # tiles of masses that are loaded at once


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
        levels=torch.empty(size, NUM_BINS, dtype=torch.int32, device=device),
        density=torch.empty(size, NUM_BINS, dtype=torch.float32, device=device),
        scale=torch.empty(size, dtype=torch.float32, device=device),
    )
    _make_rule[(size,)](
        walking,
        chance,
        follows,
        masses,
        *rule,
        max_chains,
        num_tiles,
        num_bins=NUM_BINS,
        bins_per_nat=BINS_PER_NAT,
        padded_chains=triton.next_power_of_2(max_chains),
        many=_MANY_TILES,
        offsets=OFFSETS,
        max_tiers=MAX_TIERS,
        num_starts=triton.next_power_of_2(NUM_LEVELS + OFFSETS - 1),
        tiny=TINY,
        nudge=NUDGE,
        num_warps=4,
    )
    return rule


@triton.jit
def _all_masses(masses, group, num_tiles, num_bins: tl.constexpr, many: tl.constexpr):
    """Return the masses of p and q in each bin, summed over tiles."""
    bins = tl.arange(0, num_bins)
    in_p = tl.zeros([num_bins], dtype=tl.float64)
    in_q = tl.zeros([num_bins], dtype=tl.float64)
    for first in range(0, num_tiles, many):
        part = first + tl.arange(0, many)
        at = masses + ((group * num_tiles + part) * (2 * num_bins))[:, None] + bins[None, :]
        inside = (part < num_tiles)[:, None]
        in_p += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float64), 0)
        in_q += tl.sum(tl.load(at + num_bins, mask=inside, other=0.0).to(tl.float64), 0)
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
def _best_density(target, draft, ratio, below, at_cut, forced, taken, bins, tiny: tl.constexpr):
    """Compute `smc.verification._best_density` from inclusive sums."""
    floors = (forced - taken + target) / tl.where(draft > 0, draft, 1.0)
    floor = tl.min(tl.where(below & (draft > 0), floors, float("inf")), 0)
    rest = 1.0 - _before(draft, bins)
    has_rest = rest > tiny
    ceilings = (1.0 - forced + taken - _before(target, bins)) / tl.where(has_rest, rest, 1.0)
    ceiling = tl.max(tl.where(~below & has_rest, ceilings, 0.0), 0)
    return tl.where(below, tl.maximum(ratio, floor), tl.minimum(ratio, ceiling))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _levels(
    density,
    draft,
    count,
    below,
    cut,
    at_cut,
    forced,
    bins,
    num_bins: tl.constexpr,
    offsets: tl.constexpr,
    max_tiers: tl.constexpr,
    tiny: tl.constexpr,
    nudge: tl.constexpr,
):
    """Compute `smc.verification._levels` from inclusive sums."""
    low, high = tl.where(below, 0.0, at_cut), tl.where(below, at_cut, 1.0)
    of_low, of_high = tl.where(below, 0.0, forced), tl.where(below, forced, 1.0)
    here = _to_power(draft, count)
    rise = (of_high - here) / tl.maximum(high - draft, tiny)
    rise -= (here - of_low) / tl.maximum(draft - low, tiny)
    wanted = tl.gather(density, tl.minimum(bins + 1, num_bins - 1), 0) - density
    splits = tl.minimum(tl.maximum(wanted / tl.maximum(rise, tiny), 0.0), 1.0)
    splits = tl.where((high - draft <= tiny) | (draft - low <= tiny), 0.0, splits)
    place = tl.cumsum(splits, 0) - splits
    first_above = tl.sum(tl.where(bins == tl.minimum(cut, num_bins - 1), place, 0.0), 0)
    below_span = tl.max(tl.where(below, place, 0.0), 0)
    place = tl.where(below, place, place - first_above)
    above_span = tl.max(tl.where(below, 0.0, place), 0)
    span = tl.maximum(tl.where(below, below_span, above_span), max_tiers)
    levels = (place * (max_tiers / span) * offsets + nudge).to(tl.int32)
    levels = tl.minimum(tl.maximum(levels, 0), max_tiers * offsets)
    levels += tl.where(below, 0, (max_tiers + 1) * offsets)
    return tl.associative_scan(levels, 0, _larger)


@triton.jit
def _mass_below(levels, draft, edges, num_bins: tl.constexpr):
    """Return the draft's mass on levels below each edge, by binary search of sorted levels."""
    num_below = tl.zeros_like(edges)
    jump: tl.constexpr = num_bins
    for halving in tl.static_range(0, 31):
        if (jump >> halving) > 0:
            further = num_below + (jump >> halving)
            level = tl.gather(levels, tl.minimum(further, num_bins) - 1, 0)
            num_below = tl.where((further <= num_bins) & (level < edges), further, num_below)
    return _before(draft, num_below)


@triton.jit
def _level_density(
    levels,
    draft,
    count,
    num_bins: tl.constexpr,
    offsets: tl.constexpr,
    num_starts: tl.constexpr,
):
    """Compute `smc.verification._law` for each bin."""
    starts = tl.arange(0, num_starts) + (1 - offsets)
    start = _mass_below(levels, draft, starts, num_bins)
    stop = _mass_below(levels, draft, starts + offsets, num_bins)
    density = tl.full([num_starts], 1.0, dtype=tl.float64)
    power = tl.full([num_starts], 1.0, dtype=tl.float64)
    for _ in range(1, count):
        power *= start
        density = density * stop + power
    total = tl.cumsum(density, 0)
    return (tl.gather(total, levels + offsets - 1, 0) - _before(total, levels)) / offsets


@triton.jit
def _make_rule(
    walking,
    chance,
    follows,
    masses,
    out_levels,
    out_density,
    out_scale,
    max_chains,
    num_tiles,
    num_bins: tl.constexpr,
    bins_per_nat: tl.constexpr,
    padded_chains: tl.constexpr,
    many: tl.constexpr,
    offsets: tl.constexpr,
    max_tiers: tl.constexpr,
    num_starts: tl.constexpr,
    tiny: tl.constexpr,
    nudge: tl.constexpr,
):
    group = tl.program_id(0)
    if tl.load(walking + group) == 0:
        return
    chain = tl.arange(0, padded_chains)
    own = group * max_chains + chain
    count = tl.sum(tl.load(follows + own, mask=chain < max_chains, other=0).to(tl.int32), 0)
    in_p, in_q = _all_masses(masses, group, num_tiles, num_bins, many)
    p_total, q_total = tl.sum(in_p, 0), tl.sum(in_q, 0)  # 1, but for rounding
    scale = tl.load(chance + group) / p_total
    in_target, in_draft = in_p * scale, in_q / q_total
    bins = tl.arange(0, num_bins)
    middle = tl.exp((bins - num_bins // 2 + 0.5).to(tl.float64) / bins_per_nat)
    is_drafted = in_draft > 0
    ratio = tl.where(is_drafted, in_target / tl.where(is_drafted, in_draft, 1.0), middle)

    target, draft = tl.cumsum(in_target, 0), tl.cumsum(in_draft, 0)
    draft = draft / tl.sum(tl.where(bins == num_bins - 1, draft, 0.0), 0)
    excess = _to_power(draft, count) - target
    most = tl.max(excess, 0)
    first = tl.min(tl.where(excess == most, bins, num_bins - 1), 0)
    cut = tl.where(most > 0, first + 1, 0)
    below = bins < cut
    at_cut = tl.sum(tl.where(bins == cut - 1, draft, 0.0), 0)
    taken = tl.sum(tl.where(bins == cut - 1, target, 0.0), 0)
    forced = _to_power(at_cut, count)

    density = _best_density(target, draft, ratio, below, at_cut, forced, taken, bins, tiny)
    levels = _levels(
        density,
        draft,
        count,
        below,
        cut,
        at_cut,
        forced,
        bins,
        num_bins,
        offsets,
        max_tiers,
        tiny,
        nudge,
    )
    law = _level_density(levels, draft, count, num_bins, offsets, num_starts)
    tl.store(out_levels + group * num_bins + bins, levels)
    tl.store(out_density + group * num_bins + bins, (law / q_total).to(tl.float32))
    tl.store(out_scale + group, scale.to(tl.float32))
