"""Siblings and their noise, kernel against reference, bit for bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.kernels import siblings as kernel
from sglang_smc.smc import siblings as reference


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    num_groups=st.integers(1, 3),
    num_particles=st.sampled_from([1, 2, 3, 5, 8, 13, 32]),
    num_families=st.integers(1, 4),
    vocab_size=st.integers(1, 3),
    draws=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_spread(
    num_groups: int,
    num_particles: int,
    num_families: int,
    vocab_size: int,
    draws: bool,
    seed: int,
    device: str,
) -> None:
    """Families in any order; some part by their token, and the same token makes none."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_groups, num_particles
    family = torch.randint(num_families, shape, generator=generator)
    siblings = (family.unsqueeze(2) == family.unsqueeze(1)).to(device)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).to(device)
    tokens = torch.randint(vocab_size, shape, generator=generator).to(device) if draws else None
    before = siblings.clone()
    found = kernel.spread(uniforms, siblings, tokens)
    expected = reference.spread(uniforms, siblings, tokens)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(siblings, before), "the caller's siblings were changed"


def test_arguments_may_be_views(device: str) -> None:
    """The identity of all groups is one tensor; tokens are a column of a longer chain."""
    itself = torch.eye(3, dtype=torch.bool, device=device).expand(2, -1, -1)
    chains = torch.arange(24, device=device).view(2, 3, 4)
    uniforms = torch.rand(3, 2, dtype=torch.float64, device=device).t()
    found = kernel.spread(uniforms, itself, chains[:, :, 1])
    assert torch.equal(found[0], uniforms)
    assert torch.equal(found[1], itself)
