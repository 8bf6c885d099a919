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

from sglang_smc.kernels.selection import NUM_BINS, OFFSETS, PER_NAT, selection_rule
from sglang_smc.kernels.tensors import check_contiguous, contiguous, tiles
from sglang_smc.smc.verification import Chains, Verified, Walk

_BIN_TILE = 1024  # tokens that a program bins, which is slow
_BIN_CHUNK = 64  # tokens binned at once
_TILE = 4096  # tokens per program of the residual's sum
_EXACT = {"enable_fp_fusion": False}  # all kernels compute bit-identical probabilities


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
    padded = triton.next_power_of_2(max_chains)
    _begin[(size,)](num_chains.contiguous(), walk, max_chains, max_steps, padded_chains=padded)
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


@triton.jit
def _begin(num_chains, walk, max_chains, max_steps, padded_chains: tl.constexpr):
    group = tl.program_id(0)
    chain = tl.arange(0, padded_chains)
    own = group * max_chains + chain
    tl.store(walk.follows + own, chain < tl.load(num_chains + group), mask=chain < max_chains)
    tl.store(walk.chance + group, 1.0)
    tl.store(walk.walking + group, 1)
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
