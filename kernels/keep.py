"""Choose which block of a round is kept: by its evidence, or by exact verification."""

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.reweight import _ancestors, _covered, _normalized, _pick
from sglang_smc.smc.verification import Kept, Verified


def keep(
    found: Verified,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    before_end: torch.Tensor,
    ends: torch.Tensor,
    present: torch.Tensor,
    num_steps: torch.Tensor,
    evidence_threshold: torch.Tensor,
    keep_uniforms: torch.Tensor,
    uniforms: torch.Tensor,
) -> Kept:
    """Keep the columns that the evidence covers, or that exact verification accepts, in one launch.

    Reference: `sglang_smc.smc.verification.keep`, same arguments, the uniforms of any stride.
    Numbers agree to rounding (1e-12), and so do the decisions, unless one of them is within
    rounding of its threshold.
    """
    kept = Kept(
        num_columns=torch.empty_like(found.num_columns),
        winner=torch.empty_like(found.winner),
        by_block=torch.empty_like(found.rejects),
        rejects=torch.empty_like(found.rejects),
        row=torch.empty_like(found.winner),
        ess=torch.empty_like(found.winner, dtype=torch.float64),
    )
    drafts = log_p, log_q, before_end, ends, present, num_steps, evidence_threshold
    _keep[(len(log_p),)](
        *(argument.contiguous() for argument in drafts),
        keep_uniforms,
        uniforms,
        keep_uniforms.stride(0),
        uniforms.stride(0),
        found.num_columns,
        found.winner,
        found.rejects,
        *kept,
        *log_q.shape[1:],
        padded_particles=triton.next_power_of_2(log_q.shape[1]),
        padded_columns=triton.next_power_of_2(log_q.shape[2] + 1),
    )
    return kept


@triton.jit
def _keep(
    log_p,
    log_q,
    before_end,
    ends,
    present,
    num_steps,
    evidence_threshold,
    keep_uniforms,
    uniforms,
    keep_stride,
    stride,
    found_columns,
    found_winner,
    found_rejects,
    out_num_columns,
    out_winner,
    out_by_block,
    out_rejects,
    out_row,
    out_ess,
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
    is_present = tl.load(present + own, mask=here, other=0) != 0
    own_steps = tl.load(num_steps + group).to(tl.int32)

    # The same as `reweight._reweight`, from equal weights.
    drafted = here[None, :] & (column > 0)[:, None] & (column <= num_drafted)[:, None]
    before = column[:, None] - 1
    at = own[None, :] * num_drafted + before
    is_open = tl.load(before_end + at, mask=drafted, other=0) != 0
    scored = tl.load(log_p + own[None, :] * (num_drafted + 1) + before, mask=is_open, other=0.0)
    steps = scored.to(tl.float64) - tl.load(log_q + at, mask=is_open, other=0.0).to(tl.float64)
    steps = tl.where((steps != steps) | (steps == float("inf")), -float("inf"), steps)
    start = tl.where(is_present, 0.0, -float("inf")).to(tl.float64)
    running = tl.cumsum(tl.where((column == 0)[:, None], start[None, :], steps), 0)
    highest = tl.max(running, 1)
    relative = tl.exp(running - tl.where(highest == -float("inf"), 0.0, highest)[:, None])
    sums = tl.sum(relative, 1)
    total = tl.log(sums) + highest
    threshold = tl.load(evidence_threshold + group)
    log_coin = tl.log(tl.load(keep_uniforms + group * keep_stride)) + tl.log(threshold)
    covered = _covered(total, column, num_drafted, log_coin, own_steps)
    weights = _normalized(tl.sum(tl.where((column == covered)[:, None], relative, 0.0), 0))
    point = tl.load(uniforms + group * stride) + tl.zeros([padded_particles], dtype=tl.float64)
    drawn = tl.max(_ancestors(weights, point, particle), 0)

    # A sequence that has ended counts as reaching all columns.
    verified = tl.load(found_columns + group).to(tl.int32)
    verified_chain = tl.load(found_winner + group).to(tl.int32)
    of_found = (group * num_particles + verified_chain) * num_drafted + column
    ended = tl.load(ends + of_found, mask=column < verified, other=0).to(tl.int32)
    reached = tl.where(tl.max(ended, 0) != 0, own_steps, verified)
    by_block = covered > reached
    of_drawn = (particle == drawn)[None, :] & (column <= covered)[:, None] & is_open
    kept = tl.sum(tl.sum(of_drawn.to(tl.int32), 0), 0)
    num_columns = tl.where(by_block, kept, verified)
    winner = tl.where(by_block, drawn, verified_chain)
    last = column == num_drafted
    squares = _pick(tl.sum(relative * relative, 1), last)
    ess = _pick(sums, last) * _pick(sums, last) / tl.where(squares > 0, squares, 1.0)
    row = (group * num_particles + winner).to(tl.int64) * (num_drafted + 1) + num_columns
    tl.store(out_num_columns + group, num_columns.to(tl.int64))
    tl.store(out_winner + group, winner.to(tl.int64))
    tl.store(out_by_block + group, by_block)
    tl.store(out_rejects + group, (tl.load(found_rejects + group) != 0) & (~by_block))
    tl.store(out_row + group, row)
    size = tl.sum(is_present.to(tl.int32), 0).to(tl.float64)
    tl.store(out_ess + group, tl.where(threshold < float("inf"), ess, size))
