"""Counter-based uniforms, kernel against reference, bit for bit."""

import pytest
import torch

from sglang_smc.kernels import randomness as kernel
from sglang_smc.smc import randomness as reference
from sglang_smc.smc.randomness import Purpose

SEEDS = [0, 1, 2**62, -1, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("shape", [(6, 1), (6, 5), (6, 3, 1), (6, 32, 7)])
def test_uniforms(purpose: Purpose, shape: tuple[int, ...], device: str) -> None:
    """Extreme seeds, 64-bit positions; more numbers than a program draws."""
    generator = torch.Generator().manual_seed(len(shape))
    positions = torch.randint(-(2**40), 2**40, shape, generator=generator).to(device)
    seeds = torch.tensor(SEEDS, device=device)
    columns = (1,) * (len(shape) - 2)
    expected = reference.uniforms(
        seeds.view(-1, 1, *columns),
        positions,
        torch.arange(shape[1], device=device).view(-1, *columns),
        purpose,
    )
    assert torch.equal(kernel.uniforms(seeds, positions, purpose), expected)
    one = positions[:, :1].expand_as(positions)  # without a copy
    assert torch.equal(
        kernel.uniforms(seeds, one, purpose), kernel.uniforms(seeds, one + 0, purpose)
    )


def test_round_seeds(device: str) -> None:
    """More groups than a program takes; no two seeds alike."""
    seeds = torch.tensor(SEEDS, device=device).repeat(60)
    starts = torch.arange(len(seeds), device=device)
    found = kernel.round_seeds(seeds, starts)
    assert torch.equal(found, reference.round_seeds(seeds, starts))
    assert len(set(found.tolist())) == len(seeds)
