"""From scored drafts to ancestors, and to the block that is kept, kernel against reference."""

import math

import torch
from drawn import Case, assert_same, drawn

from sglang_smc.kernels import reweight as kernel
from sglang_smc.smc import verification, weighing
from sglang_smc.smc.weighing import SCHEMES

INF = math.inf


def any_of(c: Case, values: list[float], *shape: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[c.whole(0, len(values), *shape)]


def block_of(c: Case, steps: torch.Tensor, **others: torch.Tensor) -> weighing.Block:
    """A block with rules of every kind; others are its fields of particles."""
    size = len(steps)
    return weighing.Block(
        power=any_of(c, [1.0, 1.0, 2.0, 0.5], size),
        num_steps=steps,
        ess_threshold=any_of(c, [0.0, 0.37, 0.71, 1.0, INF], size),
        resample_each_token=c.flags(0.5, size),
        evidence_threshold=any_of(c, [0.0, 0.3, 1.0, INF], size),
        scheme=torch.arange(size) % len(SCHEMES),
        keep_uniforms=c.uniforms(size),
        **others,
    )


@drawn(
    24,
    num_groups=[1, 2, 3, 4, 5],
    num_particles=[1, 2, 3, 5, 8, 32],
    num_steps=[1, 2, 3, 4, 7],
    spread=[0.0, 0.1, 1.0, 20.0],
    p_dead=[0.0, 0.2, 0.9, 1.0],
    scheme=[*SCHEMES, "each another"],
    noise=[None, None, 0.0, math.nextafter(1.0, 0.0)],
)
def test_random_groups(c: Case, device: str) -> None:
    """Of any size and K, particles that have ended or died, rules of every kind, extreme noise.

    No decision lies on a threshold but by equal weights, whose effective sample size is exact. So
    integers and flags are equal: no point of these cases lies within rounding of a share. Chopthin
    sums its shares, which round otherwise in a kernel; its noise is never extreme.
    """
    shape = size, num_particles, num_steps = c.num_groups, c.num_particles, c.num_steps
    present = c.first_of(size, num_particles)
    steps = c.whole(1, num_steps + 1, size)
    drafted = torch.minimum(steps.unsqueeze(1), c.whole(0, num_steps + 1, *shape[:2]))
    # At the total's end lies a share that rounds to nothing, if weights differ that much.
    spread = c.spread if c.noise is None else min(c.spread, 1.0)
    log_p, log_q = (c.normal(*shape) * spread - 2 for _ in range(2))
    killers = any_of(c, [-INF, -INF, INF, math.nan], *shape).float()
    noise = c.uniforms(*shape[:2])
    block = block_of(
        c,
        steps,
        log_weights=(c.normal(*shape[:2]).double() * spread).masked_fill(~present, -INF),
        log_p=torch.where(c.flags(c.p_dead, *shape), killers, log_p),
        log_q=torch.where(c.flags(c.p_dead / 4, *shape), killers, log_q),
        up_to_end=(torch.arange(num_steps) < drafted.unsqueeze(2)) & present.unsqueeze(2),
        present=present,
        uniforms=noise if c.noise is None else torch.full_like(noise, c.noise),
    )
    if c.scheme in SCHEMES:
        block.scheme.fill_(SCHEMES.index(c.scheme))
    is_chopped = (block.scheme == SCHEMES.index("chopthin")).unsqueeze(1)
    block = block._replace(uniforms=torch.where(is_chopped, noise, block.uniforms))
    run = kernel.reweight_and_resample, weighing.reweight_and_resample
    assert_same(*run, [block], device, rounding=1e-12)


@drawn(
    12,
    num_groups=[1, 2, 5],
    num_particles=[1, 2, 3, 8, 32],
    spread=[0.0, 1.0, 20.0],
    p_dead=[0.0, 0.2, 1.0],
)
def test_weights_that_gain(c: Case, device: str) -> None:
    """Groups in which some or all particles die, or that are absent."""
    shape = c.num_groups, c.num_particles
    present = c.first_of(*shape)
    killers = any_of(c, [-INF, INF, math.nan], *shape)
    arguments = [
        (c.normal(*shape).double() * c.spread).masked_fill(~present, -INF),
        torch.where(c.flags(c.p_dead, *shape), killers, c.normal(*shape).double() * c.spread),
        present,
        any_of(c, [0.0, 0.37, 0.71, 1.0, INF], c.num_groups),
        c.uniforms(*shape),
        torch.arange(c.num_groups) % len(SCHEMES),
    ]
    run = kernel.resample_by_weights, weighing.resample_by_weights
    assert_same(*run, arguments, device, rounding=1e-12)


@drawn(12, num_chains=[1, 2, 3, 8], max_steps=[1, 3, 8], spread=[0.0, 0.3, 3.0])
def test_what_is_kept(c: Case, device: str) -> None:
    """Dead chains, broken ones, absent ones and ends; thresholds from 0 to infinity."""
    shape = size, num_chains, max_steps = 8, c.num_chains, c.max_steps
    log_q = c.normal(*shape) - 2
    log_p = c.normal(*shape[:2], max_steps + 1) * c.spread
    log_p[..., :-1] += log_q
    log_p[c.flags(0.1, *log_p.shape)] = -torch.inf
    log_p[c.flags(0.02, *log_p.shape)] = math.nan
    num_steps = c.whole(1, max_steps + 1, size)
    present = c.first_of(size, num_chains)
    ends = c.flags(0.15, *shape)
    within = torch.arange(max_steps) < num_steps.view(-1, 1, 1)
    up_to_end = (ends.cumsum(2) == ends) & within & present.unsqueeze(2)
    found = verification.Verified(
        num_columns=c.whole(0, max_steps + 1, size).minimum(num_steps),
        winner=c.whole(0, num_chains, size),
        rejects=c.flags(0.5, size),
        left=torch.zeros(size, dtype=torch.int64),
        residuals=torch.zeros(size, 1),
    )
    block = block_of(
        c,
        num_steps,
        log_weights=c.normal(*shape[:2]).double(),
        log_p=log_p[..., :-1],
        log_q=log_q,
        up_to_end=up_to_end,
        present=present,
        uniforms=c.uniforms(*shape[:2]),
    )
    arguments = [found, block, ends]
    assert_same(kernel.keep, verification.keep, arguments, device, rounding=1e-12)
