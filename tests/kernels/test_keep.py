"""Which block is kept, kernel against reference."""

import math
from typing import Any

import torch
from drawn import drawn

from sglang_smc.kernels.reweight import keep
from sglang_smc.smc import verification
from sglang_smc.smc.verification import Verified


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
    before_end = (ends.cumsum(2) == ends) & within & present.unsqueeze(2)
    nothing = torch.zeros(size, dtype=torch.int64)
    found = Verified(
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
        *(log_p, log_q, before_end, ends, present, num_steps),
        *(choices[torch.randint(4, (size,), generator=generator)], *uniforms[..., 0]),
    ]
    expected = verification.keep(found, *arguments)
    kept = keep(
        Verified(*(part.to(device) for part in found)), *(part.to(device) for part in arguments)
    )
    for name, mine, wanted in zip(kept._fields, kept, expected, strict=True):
        assert mine.dtype == wanted.dtype, name
        if name == "ess":
            assert torch.allclose(mine.cpu(), wanted, rtol=1e-12)
        else:
            assert torch.equal(mine.cpu(), wanted), name
