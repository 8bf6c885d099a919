"""Verify drafts exactly, in four launches a column.

A column's two rows of the vocabulary are read twice. Tiles store the mass of p and q in each bin,
and one program a group computes from these the rule that selects a token. Tiles store the residual
of p over the rule's distribution, and one program a group stops there or selects the next token.

Every kernel that needs a token's bin recomputes it, from operations that no compiler rounds
differently: a difference, a sum, and a product with a power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tensors import check_contiguous, contiguous, tiles
from sglang_smc.smc import verification
from sglang_smc.smc.verification import Chains, Verified, Walk

NUM_BINS = tl.constexpr(verification.NUM_BINS)
PER_NAT = tl.constexpr(verification.BINS_PER_NAT)
OFFSETS = tl.constexpr(verification.OFFSETS)
_MAX_TIERS = tl.constexpr(verification.MAX_TIERS)
_TINY, _NUDGE = tl.constexpr(verification.TINY), tl.constexpr(verification.NUDGE)
_NUM_STARTS = tl.constexpr(
    triton.next_power_of_2(verification.NUM_LEVELS + verification.OFFSETS - 1)
)
_MANY_TILES = tl.constexpr(64)  # tiles of masses that are loaded at once
_BIN_TILE = 1024  # tokens that a program bins, which is slow
_BIN_CHUNK = 64  # tokens binned at once
_TILE = 4096  # tokens per program of the residual's sum
_EXACT = {"enable_fp_fusion": False}  # all kernels compute bit-identical probabilities


class BinRule(NamedTuple):
    """A group's selection rule by bin; undefined where it does not walk."""

    levels: torch.Tensor  # [G, B] int32: a bin's rank
    density: torch.Tensor  # [G, B] float32: distribution of the selected token over q
    scale: torch.Tensor  # [G] float32: target over p


class _Laws(NamedTuple):
    """The rows of p and q of each group."""

    log_p: torch.Tensor
    log_q: torch.Tensor
    p_stride: int
    q_stride: int
    vocab_size: int


def begin_walk(chains: Chains, num_chains: torch.Tensor, vocab_size: int) -> Walk:
    """Return the walk of all groups at the root, in one launch.

    Reference: `sglang_smc.smc.verification.begin_walk`, same arguments; the result is the same, but
    has room for two residuals a group: that of the accepted path and that of the column.
    """
    size, max_chains, max_steps = chains.tokens.shape

    def of_groups(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return num_chains.new_empty(size, dtype=dtype)

    walk = Walk(
        follows=num_chains.new_empty(size, max_chains, dtype=torch.bool),
        chance=of_groups(torch.float64),
        walking=of_groups(torch.bool),
        p_row=of_groups(),
        q_row=of_groups(),
        found=Verified(
            num_columns=of_groups(),
            winner=of_groups(),
            rejects=of_groups(torch.bool),
            left=of_groups(),
            residuals=num_chains.new_empty(2 * size, vocab_size, dtype=torch.float32),
        ),
    )
    sizes = num_chains.contiguous(), chains.num_steps.contiguous()
    _begin[(size,)](*sizes, walk, max_chains, max_steps, triton.next_power_of_2(max_chains))
    return walk


def walk_on(
    walk: Walk, chains: Chains, log_p: torch.Tensor, log_q: torch.Tensor, step: int
) -> Walk:
    """Stop after the path, or select its next token, in four launches; updates ``walk`` in place.

    Reference: `sglang_smc.smc.verification.walk_on`, same arguments, ``walk`` from `begin_walk` of
    this module. Masses agree to rounding (1e-6), and so do the decisions, unless one of them is
    within rounding of its threshold.
    """
    check_contiguous(log_p, "log_p")
    check_contiguous(log_q, "log_q")
    size, vocab_size = log_p.shape
    device, max_chains = log_p.device, walk.follows.shape[1]
    bin_tile, num_bin_tiles = tiles(vocab_size, _BIN_TILE)
    tile, num_tiles = tiles(vocab_size, _TILE)
    masses = torch.empty(size, num_bin_tiles, 2, NUM_BINS.value, device=device)  # [G, tiles, 2, B]
    sums = torch.empty(size, num_tiles, device=device)  # [G, tiles]
    laws = _Laws(log_p, log_q, log_p.stride(0), log_q.stride(0), vocab_size)
    chunk = min(_BIN_CHUNK, bin_tile)
    grid = size, num_bin_tiles
    _add_up_bins[grid](walk, laws, masses, tile=bin_tile, chunk=chunk, num_warps=8, **_EXACT)
    rule = selection_rule(walk.walking, walk.chance, walk.follows, masses)
    _add_up_residual[(size, num_tiles)](walk, laws, rule, sums, tile=tile, num_warps=8, **_EXACT)
    _stop_or_go_on[(size,)](
        Chains(*contiguous(chains)),
        laws,
        rule,
        sums,
        walk,
        *chains.tokens.shape[1:],
        num_tiles,
        step,
        padded_chains=triton.next_power_of_2(max_chains),
        padded_tiles=triton.next_power_of_2(num_tiles),
        num_warps=1,
        **_EXACT,
    )
    return walk


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
def _begin(num_chains, num_steps, walk, max_chains, max_steps, padded_chains: tl.constexpr):
    group = tl.program_id(0)
    chain = tl.arange(0, padded_chains)
    own = group * max_chains + chain
    tl.store(walk.follows + own, chain < tl.load(num_chains + group), mask=chain < max_chains)
    tl.store(walk.chance + group, 1.0)
    tl.store(walk.walking + group, tl.load(num_steps + group) > 0)
    tl.store(walk.p_row + group, group * max_chains * (max_steps + 1))
    tl.store(walk.q_row + group, group * max_chains)
    tl.store(walk.found.num_columns + group, 0)
    tl.store(walk.found.winner + group, 0)
    tl.store(walk.found.rejects + group, 0)
    tl.store(walk.found.left + group, group)


@triton.jit
def _bin_of(log_p, log_q, log_chance):
    """Compute `smc.verification.bins_of`; where that has NaN, the bin is arbitrary."""
    log_ratio = log_p - log_q + log_chance
    place = tl.floor(tl.where(log_ratio == log_ratio, log_ratio, 0.0) * PER_NAT)
    half: tl.constexpr = NUM_BINS // 2
    return tl.minimum(tl.maximum(place, -half), half - 1).to(tl.int32) + half


@triton.jit
def _log_chance(walk, group):
    return tl.log(tl.load(walk.chance + group)).to(tl.float32)


@triton.jit
def _load(laws, group, columns, inside):
    """Return log-probabilities of some tokens in a group's two rows."""
    of_group = group.to(tl.int64)
    p_at, q_at = of_group * laws.p_stride + columns, of_group * laws.q_stride + columns
    of_p = tl.load(laws.log_p + p_at, mask=inside, other=-float("inf"))
    of_q = tl.load(laws.log_q + q_at, mask=inside, other=-float("inf"))
    return of_p, of_q


@triton.jit
def _add_up_bins(walk, laws, masses, tile: tl.constexpr, chunk: tl.constexpr):
    group = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(walk.walking + group) == 0:
        return
    log_chance = _log_chance(walk, group)
    bins = tl.arange(0, NUM_BINS)
    in_p = tl.zeros([NUM_BINS, chunk], dtype=tl.float32)
    in_q = tl.zeros([NUM_BINS, chunk], dtype=tl.float32)
    for start in tl.static_range(0, tile, chunk):
        columns = part * tile + start + tl.arange(0, chunk)
        of_p, of_q = _load(laws, group, columns, columns < laws.vocab_size)
        here = _bin_of(of_p, of_q, log_chance)[None, :] == bins[:, None]
        in_p += tl.where(here, tl.exp(of_p)[None, :], 0.0)
        in_q += tl.where(here, tl.exp(of_q)[None, :], 0.0)
    at = masses + (group * tl.num_programs(1) + part) * (2 * NUM_BINS) + bins
    tl.store(at, tl.sum(in_p, 1))
    tl.store(at + NUM_BINS, tl.sum(in_q, 1))


@triton.jit
def _target_and_law(of_p, of_q, log_chance, rule, group):
    """Return p times the path's chance, the selected token's distribution, and the bin."""
    own = group * NUM_BINS + _bin_of(of_p, of_q, log_chance)
    law = tl.exp(of_q) * tl.load(rule.density + own)
    return tl.exp(of_p) * tl.load(rule.scale + group), law, own


@triton.jit
def _other(left, group, num_groups):
    """Return the group's residual row that does not hold the accepted path's; it has two."""
    return 2 * group + num_groups - left


@triton.jit
def _add_up_residual(walk, laws, rule, sums, tile: tl.constexpr):
    group = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(walk.walking + group) == 0:
        return
    columns = part * tile + tl.arange(0, tile)
    inside = columns < laws.vocab_size
    of_p, of_q = _load(laws, group, columns, inside)
    target, law, _ = _target_and_law(of_p, of_q, _log_chance(walk, group), rule, group)
    difference = target - law
    # NaN propagates, unlike through a maximum.
    residual = tl.where(difference < 0, 0.0, difference)
    row = _other(tl.load(walk.found.left + group), group, tl.num_programs(0)).to(tl.int64)
    tl.store(walk.found.residuals + row * laws.vocab_size + columns, residual, mask=inside)
    tl.store(sums + group * tl.num_programs(1) + part, tl.sum(residual, 0))


@triton.jit
def _stop_or_go_on(
    chains,
    laws,
    rule,
    sums,
    walk,
    max_chains,
    max_steps,
    num_tiles,
    step,
    padded_chains: tl.constexpr,
    padded_tiles: tl.constexpr,
):
    group = tl.program_id(0)
    if tl.load(walk.walking + group) == 0:
        return
    chain = tl.arange(0, padded_chains)
    here = chain < max_chains
    own = group * max_chains + chain
    at = own * max_steps + step
    numbers = chains.uniforms + group * max_chains * max_steps
    still = here & (tl.load(walk.follows + own, mask=here, other=0) != 0)
    first = tl.min(tl.where(still, chain, max_chains - 1), 0)
    found = tl.load(walk.found.num_columns + group)
    found_chain = tl.load(walk.found.winner + group)
    found_rejects = tl.load(walk.found.rejects + group) != 0
    found_left = tl.load(walk.found.left + group)

    # Accept the path up to here, unless a longer part of it is accepted later.
    part = tl.arange(0, padded_tiles)
    of_tiles = tl.load(sums + group * num_tiles + part, mask=part < num_tiles, other=0.0)
    mass = tl.sum(of_tiles.to(tl.float64), 0)
    a = tl.load(walk.chance + group)
    stop_chance = tl.where(a < 1, mass / tl.where(a < 1, mass + 1 - a, 1.0), 1.0)
    stops = tl.load(numbers + tl.maximum(step - 1, 0)) < stop_chance
    other = _other(found_left, group, tl.num_programs(0))
    found = tl.where(stops, step, found)
    found_chain = tl.where(stops, first, found_chain)
    found_rejects = tl.where(stops, mass > 0, found_rejects)
    found_left = tl.where(stops, other, found_left)

    # Select the next token.
    token = tl.load(chains.tokens + at, mask=still, other=0)
    of_p, of_q = _load(laws, group, token, still)
    target, law, bins = _target_and_law(of_p, of_q, tl.log(a).to(tl.float32), rule, group)
    level = tl.load(rule.levels + bins)
    offset = (tl.load(numbers + tl.minimum(1, max_chains - 1) * max_steps + step)) * OFFSETS
    # A single chain needs no uniform, and there may be none.
    shift = tl.where(tl.sum(still.to(tl.int32), 0) > 1, offset, 0.0).to(tl.int32)
    tier = tl.where(still, (level + shift) // OFFSETS, -1)
    chosen = tl.min(tl.where(tier == tl.max(tier, 0), chain, max_chains - 1), 0)
    is_chosen = chain == chosen
    chosen_target = tl.sum(tl.where(is_chosen, target, 0.0), 0).to(tl.float64)
    chosen_law = tl.sum(tl.where(is_chosen, law, 0.0), 0).to(tl.float64)
    can_be = chosen_law > 0
    ratio = tl.where(can_be, chosen_target / tl.where(can_be, chosen_law, 1.0), 0.0)
    new_chance = tl.where(ratio > 1, 1.0, ratio)

    # At the path's end, accept all of it with the path's chance.
    chosen_at = (group * max_chains + chosen) * max_steps + step
    at_end = (tl.load(chains.ends + chosen_at) != 0) | (
        step + 1 == tl.load(chains.num_steps + group)
    )
    accepted = at_end & (tl.load(numbers + step) < new_chance)
    still = still & (token == tl.sum(tl.where(is_chosen, token, 0), 0))
    row = group * max_chains + tl.min(tl.where(still, chain, max_chains - 1), 0)
    tl.store(walk.follows + own, still, mask=here)
    tl.store(walk.chance + group, new_chance)
    tl.store(walk.walking + group, (~at_end) & (new_chance > 0))
    tl.store(walk.p_row + group, row.to(tl.int64) * (max_steps + 1) + step + 1)
    tl.store(walk.q_row + group, row.to(tl.int64))
    tl.store(walk.found.num_columns + group, tl.where(accepted, step + 1, found).to(tl.int64))
    tl.store(walk.found.winner + group, tl.where(accepted, chosen, found_chain).to(tl.int64))
    tl.store(walk.found.rejects + group, found_rejects & (~accepted))
    tl.store(walk.found.left + group, found_left)


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
def _best_density(target, draft, ratio, below, forced, taken, bins):
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
    """Compute `smc.verification._level_density` for each bin."""
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
    cut = tl.where(most > _TINY, first + 1, 0)
    below = bins < cut
    at_cut = tl.sum(tl.where(bins == cut - 1, draft, 0.0), 0)
    taken = tl.sum(tl.where(bins == cut - 1, target, 0.0), 0)
    forced = _to_power(at_cut, count)

    density = _best_density(target, draft, ratio, below, forced, taken, bins)
    levels = _levels(density, draft, count, below, cut, at_cut, forced, bins)
    of_levels = _level_density(levels, draft, count)
    tl.store(rule.levels + group * NUM_BINS + bins, levels)
    tl.store(rule.density + group * NUM_BINS + bins, (of_levels / q_total).to(tl.float32))
    tl.store(rule.scale + group, scale.to(tl.float32))
