"""Compute weights, cuts, ancestors, kept blocks and totals, each in one launch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tensors import as_float, padded_particles
from sglang_smc.smc.verification import Kept, Verified
from sglang_smc.smc.weighing import HALF_RATIO_INVERSE, SCHEMES, Block, Decision, Resampled

_SYSTEMATIC = tl.constexpr(SCHEMES.index("systematic"))
_MULTINOMIAL = tl.constexpr(SCHEMES.index("multinomial"))
_CHOPTHIN = tl.constexpr(SCHEMES.index("chopthin"))
_HALF_RATIO_INVERSE = tl.constexpr(HALF_RATIO_INVERSE)
_LEAST_COLUMNS = 16  # of a block, padded: rounds of fewer steps compile no kernel again


class _Sizes(NamedTuple):
    num_particles: float  # see `as_float`
    num_drafted: float
    p_stride: float  # from particle to particle, of log p


def reweight_and_resample(block: Block) -> Decision:
    """Weigh a block of drafts, cut it, and resample where the effective sample size is low.

    Reference: `sglang_smc.smc.weighing.reweight_and_resample`, of tensors of any strides.
    Numbers agree to rounding (1e-12), and so do the decisions, unless one of them is within
    rounding of its threshold.
    """
    size, num_particles, _ = block.log_p.shape

    def room(dtype: torch.dtype, *more: int) -> torch.Tensor:
        return torch.empty(size, *more, dtype=dtype, device=block.log_p.device)

    found = Decision(
        num_columns=room(torch.int64),
        num_kept=room(torch.int64, num_particles),
        weighed=room(torch.float64, num_particles),
        ess=room(torch.float64),
        resampled=room(torch.bool),
        all_zero=room(torch.bool),
        ancestors=room(torch.int64, num_particles),
        log_weights=room(torch.float64, num_particles),
        log_evidence=room(torch.float64),
        num_killed=room(torch.int64),
        verified=room(torch.bool),
    )
    _launch(_reweight, block, found)
    return found


def resample_by_weights(
    log_weights: torch.Tensor,
    gains: torch.Tensor,
    present: torch.Tensor,
    ess_threshold: torch.Tensor,
    uniforms: torch.Tensor,
    scheme: torch.Tensor,
) -> Resampled:
    """Multiply weights by exp(gains), and resample where the effective sample size is low.

    Reference: `sglang_smc.smc.weighing.resample_by_weights`. It is `reweight_and_resample` of a
    block of one column, which any evidence covers, so that it is kept unless all particles die.
    """
    zero = torch.zeros_like(ess_threshold)
    one = torch.ones_like(scheme)
    decision = reweight_and_resample(
        Block(
            log_weights=log_weights,
            log_p=gains.unsqueeze(2),
            log_q=torch.zeros_like(gains).unsqueeze(2),
            up_to_end=torch.ones_like(present).unsqueeze(2),
            present=present,
            power=torch.ones_like(zero),
            num_steps=one,
            ess_threshold=ess_threshold,
            resample_each_token=one < 1,
            evidence_threshold=zero,
            scheme=scheme,
            keep_uniforms=zero,
            uniforms=uniforms,
        )
    )
    return Resampled(
        weighed=decision.weighed,
        ess=decision.ess,
        resampled=decision.resampled,
        all_zero=decision.all_zero,
        ancestors=decision.ancestors,
        log_weights=decision.log_weights,
        log_evidence=decision.log_evidence,
        num_killed=decision.num_killed,
    )


def keep(verified: Verified, block: Block, ends: torch.Tensor) -> Kept:
    """Keep the columns that the evidence covers, or that exact verification accepts, in one launch.

    Reference: `sglang_smc.smc.verification.keep`, same arguments.
    Numbers agree to rounding (1e-12), and so do the decisions, unless one of them is within
    rounding of its threshold.
    """
    kept = Kept(
        num_columns=torch.empty_like(verified.num_columns),
        winner=torch.empty_like(verified.winner),
        by_block=torch.empty_like(verified.rejects),
        rejects=torch.empty_like(verified.rejects),
        row=torch.empty_like(verified.winner),
        ess=torch.empty_like(verified.winner, dtype=torch.float64),
    )
    _launch(_keep, block, verified, ends.contiguous(), kept)
    return kept


def _launch(kernel: Any, block: Block, *others: Any) -> None:
    """Launch a kernel over the groups of a block, whose log p is read in place if it can be."""
    size, num_particles, num_drafted = block.log_q.shape
    log_p = block.log_p
    p_stride = block.log_p.stride(1)
    if log_p.stride() != (num_particles * p_stride, p_stride, 1):
        log_p = log_p.contiguous()
        p_stride = num_drafted
    others_of_block = {
        name: column.contiguous() for name, column in block._asdict().items() if name != "log_p"
    }
    kernel[(size,)](
        Block(log_p=log_p, **others_of_block),
        *others,
        _Sizes(
            num_particles=as_float(num_particles),
            num_drafted=as_float(num_drafted),
            p_stride=as_float(p_stride),
        ),
        padded_particles=padded_particles(num_particles),
        padded_columns=max(_LEAST_COLUMNS, triton.next_power_of_2(num_drafted + 1)),
    )


def tally(
    totals: torch.Tensor,
    rows: torch.Tensor,
    *,
    added: Sequence[torch.Tensor],
    lowest: torch.Tensor,
    latest: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Accumulate values into rows of ``totals``: sums, then a minimum, then latest values.

    Reference: `sglang_smc.smc.ops.tally`, same arguments.
    """
    values = *added, lowest, *latest
    after = totals.new_empty(len(rows), len(values))  # [G, C]
    _tally[(len(rows),)](
        totals,
        totals.stride(0),
        rows.contiguous(),
        values,
        tuple(as_float(value.stride(0)) for value in values),
        after,
        num_added=len(added),
    )
    return after


@triton.jit
def _whole(sizes):
    """Return the sizes as integers."""
    return _Sizes(
        num_particles=tl.cast(sizes.num_particles, tl.int32),
        num_drafted=tl.cast(sizes.num_drafted, tl.int32),
        p_stride=tl.cast(sizes.p_stride, tl.int32),
    )


@triton.jit
def _members(num_particles, padded: tl.constexpr):
    """Return this program's group, its particles, their places in ``[G, N]``, and which are."""
    group = tl.program_id(0)
    particle = tl.arange(0, padded)
    return group, particle, group * num_particles + particle, particle < num_particles


@triton.jit
def _num_distinct(places, is_present, particle):
    """Return the number of distinct places of present particles, int64."""
    is_before = is_present[None, :] & (particle[None, :] < particle[:, None])
    is_again = tl.max((is_before & (places[None, :] == places[:, None])).to(tl.int32), 1)
    return tl.sum(tl.where(is_present, 1 - is_again, 0), 0).to(tl.int64)


@triton.jit
def _weighed(block, alpha, start, sizes, own, here, column):
    """Return log-weights after each column, and which columns are open.

    Open columns add ``alpha log p - log q``, of which NaN and +inf are -inf.
    """
    drafted = here[None, :] & (column > 0)[:, None] & (column <= sizes.num_drafted)[:, None]
    at = own[None, :] * sizes.num_drafted + column[:, None] - 1
    p_at = own[None, :] * sizes.p_stride + column[:, None] - 1
    is_open = tl.load(block.up_to_end + at, mask=drafted, other=0) != 0
    steps = tl.load(block.log_p + p_at, mask=is_open, other=0.0).to(tl.float64) * alpha
    steps -= tl.load(block.log_q + at, mask=is_open, other=0.0).to(tl.float64)
    steps = tl.where((steps != steps) | (steps == float("inf")), -float("inf"), steps)
    return tl.cumsum(tl.where((column == 0)[:, None], start[None, :], steps), 0), is_open


@triton.jit
def _summed(running):
    """Return weights relative to each column's largest, the log of their sum, and dead columns.

    So equal log-weights give equal weights of exactly 1.
    """
    highest = tl.max(running, 1)
    dead = highest == -float("inf")
    relative = tl.exp(running - tl.where(dead, 0.0, highest)[:, None])
    return relative, tl.log(tl.sum(relative, 1)) + highest, dead


@triton.jit
def _effective_sample_size(relative, axis: tl.constexpr):
    """Return the ESS of weights, 0 of dead ones; see `smc.weighing.effective_sample_size`."""
    sums = tl.sum(relative, axis)
    squares = tl.sum(relative * relative, axis)
    return sums * sums / tl.where(squares > 0, squares, 1.0)


@triton.jit
def _covered(block, total, column, num_steps, sizes, group):
    """Return the most columns that the evidence covers, see `smc.weighing.covered_columns`."""
    threshold = tl.load(block.evidence_threshold + group)
    log_coin = tl.log(tl.load(block.keep_uniforms + group)) + tl.log(threshold)
    log_evidence = total - _pick(total, column == 0)
    enough = (log_coin < log_evidence) & (column <= sizes.num_drafted)
    return tl.minimum(tl.max(tl.where(enough, column, 0), 0), num_steps)


@triton.jit
def _pick(of_columns, where):
    """Return the entry selected by ``where``; the others may be infinite."""
    return tl.sum(tl.where(where, of_columns, 0), 0)


@triton.jit
def _ancestors(weights, points, particle):
    """Return the particle at each point of summed weights, see `smc.weighing._inverse_cdf`."""
    alive = weights > 0
    targets = points * tl.sum(weights, 0)
    reached = (tl.cumsum(weights, 0)[None, :] > targets[:, None]) & alive[None, :]
    found = tl.min(tl.where(reached, particle[None, :], 0x7FFFFFFF), 1)
    # A point may round up to the total itself: use the last positive weight.
    return tl.minimum(found, tl.max(tl.where(alive, particle, 0), 0))


@triton.jit
def _ancestors_of(block, weights, size, sizes, group, particle, here):
    """Return the particle that each becomes a copy of, see `smc.weighing.ancestors_of`."""
    uniforms = block.uniforms + group * sizes.num_particles
    scheme = tl.load(block.scheme + group)
    points = tl.load(uniforms + particle, mask=here, other=0.0)
    has_one = (scheme == _SYSTEMATIC) | (scheme == _CHOPTHIN)
    in_place = tl.where(has_one, tl.load(uniforms), points) + particle
    points = tl.where(scheme == _MULTINOMIAL, points, in_place / size)
    return _ancestors(weights, points, particle)


@triton.jit
def _chopped(weights, size):
    """Return each particle's mean number of offspring and the bound, see `smc.weighing.chopped`."""
    scaled = weights * _HALF_RATIO_INVERSE
    below = tl.maximum(_last_place(weights, weights, size), _last_place(weights, scaled, size))
    is_light = weights <= below
    is_heavy = scaled > below
    light = tl.sum(tl.where(is_light, weights, 0.0), 0)
    heavy = tl.sum(tl.where(is_heavy, weights, 0.0), 0)
    num_whole = tl.sum((~is_light & ~is_heavy).to(tl.int32), 0)
    bound = (light + heavy * _HALF_RATIO_INVERSE) / (size - num_whole)
    bound = tl.where(bound > 0, bound, 1.0)
    return _num_offspring(weights, bound), bound


@triton.jit
def _last_place(weights, places, size):
    """Return the largest of the places where the numbers of offspring sum to N or more, or 0."""
    bounds = tl.where(places > 0, places, 1.0)
    sums = tl.sum(_num_offspring(weights[None, :], bounds[:, None]), 1)
    return tl.max(tl.where(sums >= size, places, 0.0), 0)


@triton.jit
def _num_offspring(weights, bound):
    ratio = weights / bound
    return tl.minimum(ratio, tl.maximum(ratio * _HALF_RATIO_INVERSE, 1.0))


@triton.jit
def _of_copies(weights, bound, size, ancestors, present, particle):
    """Return the log-weights of chopthin's offspring, see `smc.weighing.resample`."""
    same = (ancestors[:, None] == ancestors[None, :]) & present[None, :]
    num_alike = tl.sum(same.to(tl.int32), 1).to(tl.float64)
    is_own = ancestors[:, None] == particle[None, :]
    own = tl.sum(tl.where(is_own, weights[None, :], 0.0), 1)
    heavy = tl.maximum(own, bound) * size
    return tl.log(heavy) - tl.log(tl.maximum(num_alike, 1.0))


@triton.jit
def _drawn(block, relative, size, sizes, group, particle, present, here):
    """Return ancestors, and the log-weights of their copies, see `smc.weighing.resample`."""
    weights = _normalized(relative)
    shares, bound = _chopped(weights, size)
    is_chopped = tl.load(block.scheme + group) == _CHOPTHIN
    shares = tl.where(is_chopped, shares, weights)
    ancestors = _ancestors_of(block, shares, size, sizes, group, particle, here)
    of_copies = _of_copies(weights, bound, size, ancestors, present, particle)
    return ancestors, tl.where(is_chopped, of_copies, 0.0)


@triton.jit
def _normalized(unnormalized):
    mass = tl.sum(unnormalized, 0)
    return unnormalized / tl.where(mass > 0, mass, 1.0)


@triton.jit
def _reweight(block, found, sizes, padded_particles: tl.constexpr, padded_columns: tl.constexpr):
    sizes = _whole(sizes)
    group, particle, own, here = _members(sizes.num_particles, padded_particles)
    column = tl.arange(0, padded_columns)  # 0 is before the block
    log_weights = tl.load(block.log_weights + own, mask=here, other=-float("inf"))
    present = tl.load(block.present + own, mask=here, other=0) != 0
    size = tl.sum(present.to(tl.int32), 0).to(tl.float64)
    num_steps = tl.load(block.num_steps + group).to(tl.int32)

    # weigh
    running, is_open = _weighed(
        block, tl.load(block.power + group), log_weights, sizes, own, here, column
    )
    relative, total, dead = _summed(running)
    ess = _effective_sample_size(relative, 1)

    # cut
    covered = _covered(block, total, column, num_steps, sizes, group)
    low = ess < tl.load(block.ess_threshold + group) * size
    num_columns = _num_columns(block, low, covered, column, sizes, group)
    tl.store(found.all_zero + group, _dies_next(dead, num_columns, column, num_steps, sizes))
    at = column == num_columns
    resampled = _pick(low.to(tl.int32), at) != 0
    weighed = tl.sum(tl.where(at[:, None], running, 0.0), 0)
    kept = is_open & (column <= num_columns)[:, None]
    tl.store(found.num_columns + group, num_columns.to(tl.int64))
    tl.store(found.weighed + own, weighed, mask=here)
    tl.store(found.ess + group, _pick(ess, at))
    tl.store(found.resampled + group, resampled)
    tl.store(found.verified + group, 0)
    tl.store(found.num_kept + own, tl.sum(kept.to(tl.int64), 0), mask=here)

    # resample
    relative = tl.sum(tl.where(at[:, None], relative, 0.0), 0)
    drawn = _drawn(block, relative, size, sizes, group, particle, present, here)
    ancestors = tl.where(resampled & present, drawn[0], particle)
    log_weights = tl.where(resampled & present, drawn[1], weighed)
    tl.store(
        found.num_killed + group,
        size.to(tl.int64) - _num_distinct(ancestors, present, particle),
    )
    tl.store(found.ancestors + own, ancestors.to(tl.int64), mask=here)
    tl.store(found.log_weights + own, log_weights, mask=here)
    tl.store(found.log_evidence + group, tl.where(resampled, _pick(total, at) - tl.log(size), 0.0))


@triton.jit
def _num_columns(block, low, covered, column, sizes, group):
    """Return the columns to keep: all covered ones, or up to the first of a low ESS."""
    low_after = low & (column > 0) & (column <= sizes.num_drafted)
    first_low = tl.min(tl.where(low_after, column, sizes.num_drafted + 1), 0)
    each_token = tl.load(block.resample_each_token + group) != 0
    return tl.where(each_token, tl.minimum(first_low, covered), covered)


@triton.jit
def _dies_next(dead, num_columns, column, num_steps, sizes):
    """Return whether every particle dies in the column after the kept ones."""
    next_column = tl.minimum(num_columns + 1, sizes.num_drafted)
    return (_pick(dead.to(tl.int32), column == next_column) != 0) & (num_columns < num_steps)


@triton.jit
def _keep(
    block,
    verified,
    ends,
    kept,
    sizes,
    padded_particles: tl.constexpr,
    padded_columns: tl.constexpr,
):
    sizes = _whole(sizes)
    group, particle, own, here = _members(sizes.num_particles, padded_particles)
    column = tl.arange(0, padded_columns)  # 0 is before the block
    present = tl.load(block.present + own, mask=here, other=0) != 0
    num_steps = tl.load(block.num_steps + group).to(tl.int32)

    # weigh
    start = tl.where(present, 0.0, -float("inf")).to(tl.float64)
    running, is_open = _weighed(block, 1.0, start, sizes, own, here, column)
    relative, total, _ = _summed(running)
    covered = _covered(block, total, column, num_steps, sizes, group)
    weighed = tl.sum(tl.where((column == covered)[:, None], relative, 0.0), 0)

    # draw
    point = tl.load(block.uniforms + group * sizes.num_particles)
    point += tl.zeros([padded_particles], dtype=tl.float64)
    drawn = tl.max(_ancestors(_normalized(weighed), point, particle), 0)

    # keep
    num_columns = tl.load(verified.num_columns + group).to(tl.int32)
    winner = tl.load(verified.winner + group).to(tl.int32)
    of_winner = ends + (group * sizes.num_particles + winner) * sizes.num_drafted
    by_block = covered > _reached(of_winner, num_columns, column, num_steps)
    of_block = is_open & (particle == drawn)[None, :] & (column <= covered)[:, None]
    num_open = tl.sum(tl.sum(of_block.to(tl.int32), 0), 0)
    num_columns = tl.where(by_block, num_open, num_columns)
    winner = tl.where(by_block, drawn, winner)
    row = (group * sizes.num_particles + winner).to(tl.int64) * (sizes.num_drafted + 1)
    tl.store(kept.num_columns + group, num_columns.to(tl.int64))
    tl.store(kept.winner + group, winner.to(tl.int64))
    tl.store(kept.by_block + group, by_block)
    tl.store(kept.rejects + group, (tl.load(verified.rejects + group) != 0) & (~by_block))
    tl.store(kept.row + group, row + num_columns)
    tl.store(kept.ess + group, _effective_sample_size(weighed, 0))


@triton.jit
def _reached(ends, num_columns, column, num_steps):
    """Return the columns that verification reaches: all, if the sequence has ended in its own."""
    has_ended = tl.load(ends + column, mask=column < num_columns, other=0).to(tl.int32)
    return tl.where(tl.max(has_ended, 0) != 0, num_steps, num_columns)


@triton.jit
def _tally(totals, row_stride, rows, values, strides, after, num_added: tl.constexpr):
    group = tl.program_id(0)
    of_row = totals + tl.load(rows + group) * row_stride
    for column in tl.static_range(len(values)):
        value = tl.load(values[column] + group * tl.cast(strides[column], tl.int32)).to(tl.float64)
        if column < num_added:
            value += tl.load(of_row + column)
        if column == num_added:
            value = tl.minimum(value, tl.load(of_row + column))
        tl.store(of_row + column, value)
        tl.store(after + group * len(values) + column, value)
