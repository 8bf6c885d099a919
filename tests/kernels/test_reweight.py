"""From scored drafts to ancestors, and to the block that is kept, kernel against reference."""

import math
from typing import Any

import torch
from drawn import assert_same, drawn

from sglang_smc.kernels import reweight as kernel
from sglang_smc.smc import verification, weighing
from sglang_smc.smc.weighing import SCHEMES

INF = math.inf
ALL = tuple(SCHEMES)


def any_of(values: list[float], shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    picked = torch.randint(len(values), shape, generator=generator)
    return torch.tensor(values, dtype=torch.float64)[picked]


@drawn(
    24,
    num_groups=[1, 2, 3, 4, 5],
    num_particles=[1, 2, 3, 5, 8, 32],
    num_steps=[1, 2, 3, 4, 7],
    spread=[0.0, 0.1, 1.0, 20.0],
    p_dead=[0.0, 0.2, 0.9, 1.0],
    scheme=[*ALL, "each another"],
    noise=[None, None, 0.0, math.nextafter(1.0, 0.0)],
)
def test_random_groups(c: Any, device: str) -> None:
    """Of any size and K, particles that have ended or died, rules of every kind, extreme noise.

    No decision lies on a threshold but by equal weights, whose effective sample size is exact. So
    integers and flags are equal: no point of these cases lies within rounding of a share.
    """
    generator = torch.Generator().manual_seed(c.seed)
    shape = num_groups, num_particles, num_steps = c.num_groups, c.num_particles, c.num_steps
    column, particle = torch.arange(num_steps), torch.arange(num_particles)
    sizes = torch.randint(1, num_particles + 1, (num_groups,), generator=generator)
    steps = torch.randint(1, num_steps + 1, (num_groups,), generator=generator)
    opened = torch.randint(num_steps + 1, shape[:2], generator=generator).unsqueeze(2)
    present = particle < sizes.unsqueeze(1)
    log_p, log_q = (torch.randn(shape, generator=generator) * c.spread - 2 for _ in range(2))
    broken, broken_draft = (
        torch.rand(shape, generator=generator) < p for p in (c.p_dead, c.p_dead / 4)
    )
    killers = any_of([-INF, -INF, INF, math.nan], shape, generator).float()
    started = torch.randn(shape[:2], generator=generator, dtype=torch.float64) * c.spread
    noise = torch.rand(shape[:2], generator=generator, dtype=torch.float64)
    schemes = torch.arange(num_groups) % len(ALL)
    if c.scheme in ALL:
        schemes.fill_(ALL.index(c.scheme))
    arguments = (
        started.masked_fill(~present, -INF),
        torch.where(broken, killers, log_p),
        torch.where(broken_draft, killers, log_q),
        (column < opened) & (column < steps.view(-1, 1, 1)) & present.unsqueeze(2),
        any_of([1.0, 1.0, 2.0, 0.5], (num_groups,), generator),
        steps,
        any_of([0.0, 0.37, 0.71, 1.0, INF], (num_groups,), generator),
        torch.rand(num_groups, generator=generator) < 0.5,
        any_of([0.0, 0.3, 1.0, INF], (num_groups,), generator),
        present,
        torch.rand(num_groups, generator=generator, dtype=torch.float64),
        noise if c.noise is None else torch.full_like(noise, c.noise),
        schemes,
        ALL,
    )
    run = kernel.reweight_and_resample, weighing.reweight_and_resample
    assert_same(*run, arguments, device, rounding=1e-12)


@drawn(12, num_chains=[1, 2, 3, 8], max_steps=[1, 3, 8], spread=[0.0, 0.3, 3.0])
def test_what_is_kept(c: Any, device: str) -> None:
    """Dead chains, broken ones, absent ones and ends; thresholds from 0 to infinity.

    Uniforms are one number of each group's row, without a copy.
    """
    generator = torch.Generator().manual_seed(c.seed)
    shape = size, num_chains, max_steps = 8, c.num_chains, c.max_steps
    log_q = torch.randn(shape, generator=generator) - 2
    log_p = torch.randn(*shape[:2], max_steps + 1, generator=generator) * c.spread
    log_p[..., :-1] += log_q
    log_p[torch.rand(log_p.shape, generator=generator) < 0.1] = -torch.inf
    log_p[torch.rand(log_p.shape, generator=generator) < 0.02] = math.nan
    num_steps = torch.randint(1, max_steps + 1, (size,), generator=generator)
    present = torch.arange(num_chains) < torch.randint(
        1, num_chains + 1, (size, 1), generator=generator
    )
    ends = torch.rand(shape, generator=generator) < 0.15
    within = torch.arange(max_steps) < num_steps.view(-1, 1, 1)
    up_to_end = (ends.cumsum(2) == ends) & within & present.unsqueeze(2)
    nothing = torch.zeros(size, dtype=torch.int64)
    found = verification.Verified(
        num_columns=torch.randint(0, max_steps + 1, (size,), generator=generator).minimum(
            num_steps
        ),
        winner=torch.randint(0, num_chains, (size,), generator=generator),
        rejects=torch.rand(size, generator=generator) < 0.5,
        left=nothing,
        residuals=torch.zeros(size, 1),
    )
    choices = torch.tensor([0.0, 0.2, 1.0, math.inf], dtype=torch.float64)
    uniforms = torch.rand(2, size, 3, generator=generator, dtype=torch.float64)
    arguments = [
        *(found, log_p, log_q, up_to_end, ends, present, num_steps),
        *(choices[torch.randint(4, (size,), generator=generator)], *uniforms[..., 0]),
    ]
    assert_same(kernel.keep, verification.keep, arguments, device, rounding=1e-12)
