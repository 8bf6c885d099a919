"""Compute weights, cuts and ancestors, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_smc.smc.weighing import SCHEMES, BlockCut, Resampled, Reweighted, WeightRules

_SYSTEMATIC, _STRATIFIED, _MULTINOMIAL, _RESIDUAL, _ = (
    tl.constexpr(i) for i in range(len(SCHEMES))
)


def reweight_and_resample(
    log_weights: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    before_end: torch.Tensor,
    power: torch.Tensor,
    rules: WeightRules,
    present: torch.Tensor,
    keep_uniforms: torch.Tensor,
    uniforms: torch.Tensor,
    scheme: torch.Tensor,
    methods: Sequence[str],
) -> Reweighted:
    """Weigh a block of drafts, cut it, and resample where the effective sample size is low.

    Reference: `sglang_smc.smc.weighing.reweight_and_resample`, same arguments, of any strides.
    Numbers agree to rounding (1e-12), and so do the decisions, unless one of them is within
    rounding of its threshold.
    """
    found = _like(log_weights)
    groups = log_weights, power, *rules, present, keep_uniforms, uniforms, scheme
    _reweight[(len(log_weights),)](
        *(argument.contiguous() for argument in (log_p, log_q, before_end, *groups)),
        *found.cut,
        found.num_kept,
        *found.resampled,
        *log_p.shape[1:],
        padded_particles=triton.next_power_of_2(log_p.shape[1]),
        padded_columns=triton.next_power_of_2(log_p.shape[2] + 1),
    )
    return found


def _like(log_weights: torch.Tensor) -> Reweighted:
    """Allocate the results, ``[G, N]`` or ``[G]`` as in `BlockCut`."""
    of_groups = log_weights[:, 0]  # [G]
    return Reweighted(
        cut=BlockCut(
            num_columns=_empty(of_groups, torch.int64),
            log_weights=_empty(log_weights, torch.float64),
            ess=_empty(of_groups, torch.float64),
            resample=_empty(of_groups, torch.bool),
            all_zero=_empty(of_groups, torch.bool),
        ),
        num_kept=_empty(log_weights, torch.int64),
        resampled=_like_resampled(log_weights),
    )


def _like_resampled(log_weights: torch.Tensor) -> Resampled:
    """Allocate the results of a resampling step, ``[G, N]`` or ``[G]`` as in `Resampled`."""
    return Resampled(
        ancestors=_empty(log_weights, torch.int64),
        log_weights=_empty(log_weights, torch.float64),
        log_evidence=_empty(log_weights[:, 0], torch.float64),
    )


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype, device=like.device)


@triton.jit
def _increments(log_p, log_q, before_end, alpha, at, drafted):
    """Return ``alpha log p - log q`` of open columns; NaN and +inf become -inf."""
    is_open_here = tl.load(before_end + at, mask=drafted, other=0) != 0
    scored = tl.load(log_p + at, mask=is_open_here, other=0.0).to(tl.float64) * alpha
    steps = scored - tl.load(log_q + at, mask=is_open_here, other=0.0).to(tl.float64)
    broken = (steps != steps) | (steps == float("inf"))
    return tl.where(broken, -float("inf"), steps), is_open_here


@triton.jit
def _covered(total, column, num_drafted, log_coin, num_steps):
    """Return the most columns that the evidence covers, see `smc.weighing.covered_columns`."""
    log_evidence = total - _pick(total, column == 0)
    enough = (log_coin < log_evidence) & (column <= num_drafted)
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
def _repeated(copies, particle, last):
    """Return ancestors in order from offspring counts, see `smc.weighing._repeat`."""
    reached = tl.cumsum(copies, 0)[None, :] > particle[:, None]
    found = tl.min(tl.where(reached, particle[None, :], 0x7FFFFFFF), 1)
    return tl.minimum(found, last)


@triton.jit
def _in_pairs(fractions, uniforms, particle, num_particles):
    """Return fractions raised to 1 or lowered to 0 in pairs, see `smc.weighing.ssp`."""
    undecided = 0
    for other in range(1, num_particles):
        a = tl.sum(tl.where(particle == undecided, fractions, 0.0), 0)
        b = tl.sum(tl.where(particle == other, fractions, 0.0), 0)
        up_a, up_b = tl.minimum(1 - a, b), tl.minimum(1 - b, a)
        raise_a = (tl.load(uniforms + other) * (up_a + up_b) < up_b) | (b == 0)
        full = a + b >= 1
        high, low = tl.where(full, 1.0, a + b), tl.where(full, a + b - 1, 0.0)
        of_a, of_b = tl.where(raise_a, high, low), tl.where(raise_a, low, high)
        fractions = tl.where(particle == undecided, of_a, fractions)
        fractions = tl.where(particle == other, of_b, fractions)
        undecided = tl.where(raise_a == full, other, undecided)
    return fractions


@triton.jit
def _drawn(weights, uniforms, particle, num_particles, size, scheme):
    """Return ancestors by a scheme, given as its index in `smc.weighing.SCHEMES`."""
    points = tl.load(uniforms + particle, mask=particle < num_particles, other=0.0)
    if scheme <= _MULTINOMIAL:
        points = tl.where(scheme == _SYSTEMATIC, tl.load(uniforms), points)
        points = tl.where(scheme == _MULTINOMIAL, points, (points + particle) / size)
        return _ancestors(weights, points, particle)
    expected = weights * size
    copies = tl.floor(expected).to(tl.int32)
    fractions = expected - copies
    if scheme == _RESIDUAL:
        certain = _repeated(copies, particle, num_particles - 1)
        rest = _ancestors(fractions, points, particle)
        return tl.where(particle < tl.sum(copies, 0), certain, rest)
    rounded = _in_pairs(fractions, uniforms, particle, num_particles)
    return _repeated(copies + tl.floor(rounded + 0.5).to(tl.int32), particle, num_particles - 1)


@triton.jit
def _normalized(unnormalized):
    mass = tl.sum(unnormalized, 0)
    return unnormalized / tl.where(mass > 0, mass, 1.0)


@triton.jit
def _reweight(
    log_p,
    log_q,
    before_end,
    log_weights,
    power,
    num_steps,
    ess_threshold,
    resample_each_token,
    evidence_threshold,
    present,
    keep_uniforms,
    uniforms,
    schemes,
    out_num_columns,
    out_cut_log_weights,
    out_ess,
    out_resample,
    out_all_zero,
    out_num_kept,
    out_ancestors,
    out_log_weights,
    out_log_evidence,
    num_particles,
    num_drafted,
    padded_particles: tl.constexpr,
    padded_columns: tl.constexpr,
):
    group = tl.program_id(0)
    particle = tl.arange(0, padded_particles)
    column = tl.arange(0, padded_columns)  # 0 is before the block
    here = particle < num_particles
    own = group * num_particles + particle
    start = tl.load(log_weights + own, mask=here, other=-float("inf"))
    is_present = tl.load(present + own, mask=here, other=0) != 0
    size = tl.sum(is_present.to(tl.int32), 0).to(tl.float64)
    own_steps = tl.load(num_steps + group).to(tl.int32)

    drafted = here[None, :] & (column > 0)[:, None] & (column <= num_drafted)[:, None]
    at = own[None, :] * num_drafted + column[:, None] - 1
    steps, is_open_here = _increments(log_p, log_q, before_end, tl.load(power + group), at, drafted)
    running = tl.cumsum(tl.where((column == 0)[:, None], start[None, :], steps), 0)

    # Relative to the largest weight, so that equal log-weights give equal weights of exactly 1.
    highest = tl.max(running, 1)
    dead = highest == -float("inf")
    relative = tl.exp(running - tl.where(dead, 0.0, highest)[:, None])
    sums = tl.sum(relative, 1)
    ess = sums * sums / tl.where(dead, 1.0, tl.sum(relative * relative, 1))
    total = tl.log(sums) + highest

    log_coin = tl.log(tl.load(keep_uniforms + group)) + tl.log(tl.load(evidence_threshold + group))
    covered = _covered(total, column, num_drafted, log_coin, own_steps)
    low = ess < tl.load(ess_threshold + group) * size
    low_after = low & (column > 0) & (column <= num_drafted)
    first_low = tl.min(tl.where(low_after, column, num_drafted + 1), 0)
    stops_early = tl.load(resample_each_token + group) != 0
    num_columns = tl.where(stops_early, tl.minimum(first_low, covered), covered)

    last = column == num_columns
    following = column == tl.minimum(num_columns + 1, num_drafted)
    all_zero = (_pick(dead.to(tl.int32), following) != 0) & (num_columns < own_steps)
    resample = _pick(low.to(tl.int32), last) != 0
    cut_log_weights = tl.sum(tl.where(last[:, None], running, 0.0), 0)
    kept = is_open_here & (column <= num_columns)[:, None]
    tl.store(out_num_columns + group, num_columns.to(tl.int64))
    tl.store(out_cut_log_weights + own, cut_log_weights, mask=here)
    tl.store(out_ess + group, _pick(ess, last))
    tl.store(out_resample + group, resample)
    tl.store(out_all_zero + group, all_zero)
    tl.store(out_num_kept + own, tl.sum(kept.to(tl.int64), 0), mask=here)

    weights = _normalized(tl.sum(tl.where(last[:, None], relative, 0.0), 0))
    numbers, scheme = uniforms + group * num_particles, tl.load(schemes + group)
    drawn = _drawn(weights, numbers, particle, num_particles, size, scheme)
    replaced = resample & is_present
    ancestors = tl.where(replaced, drawn, particle)
    banked = tl.where(resample, _pick(total, last) - tl.log(size), 0.0)
    tl.store(out_ancestors + own, ancestors.to(tl.int64), mask=here)
    tl.store(out_log_weights + own, tl.where(replaced, 0.0, cut_log_weights), mask=here)
    tl.store(out_log_evidence + group, banked)
