"""Siblings and their noise, kernel against reference, bit for bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.kernels import agreement as kernel
from sglang_smc.smc import stratify as reference


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
    same_text = (family.unsqueeze(2) == family.unsqueeze(1)).to(device)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).to(device)
    tokens = torch.randint(vocab_size, shape, generator=generator).to(device) if draws else None
    before = same_text.clone()
    found = kernel.stratify(uniforms, same_text, tokens)
    expected = reference.stratify(uniforms, same_text, tokens)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(same_text, before), "the caller's siblings were changed"


def test_arguments_may_be_views(device: str) -> None:
    """The identity of all groups is one tensor; tokens are a column of a longer chain."""
    itself = torch.eye(3, dtype=torch.bool, device=device).expand(2, -1, -1)
    chains = torch.arange(24, device=device).view(2, 3, 4)
    uniforms = torch.rand(3, 2, dtype=torch.float64, device=device).t()
    found = kernel.stratify(uniforms, itself, chains[:, :, 1])
    assert torch.equal(found[0], uniforms)
    assert torch.equal(found[1], itself)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    num_groups=st.integers(1, 3),
    num_particles=st.sampled_from([1, 2, 3, 5, 8]),
    width=st.sampled_from([1, 7, 64, 65, 200]),
    seed=st.integers(0, 2**16),
)
def test_same_text(num_groups: int, num_particles: int, width: int, seed: int, device: str) -> None:
    """Texts that agree to the end, part at any token, are of unlike length, or may not share."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_groups, num_particles

    def draw(high: int, *more: int) -> torch.Tensor:
        return torch.randint(high, (*shape, *more), generator=generator)

    texts = draw(2**40, 2 + width)[:, :1].repeat(1, num_particles, 1)
    texts.scatter_(2, draw(2 + width, 1), draw(2, 1))
    lengths = (width - draw(3)).clamp_min(0)
    texts, lengths, may_stratify = (x.to(device) for x in (texts, lengths, draw(4) > 0))
    arguments = texts[:, :, 1:], lengths, may_stratify  # the ends of wider rows, as in a round
    found = kernel.same_text(*arguments)
    assert torch.equal(found, reference.same_text(*arguments))


def test_stale_tokens_beyond_a_text_do_not_tell_texts_apart(device: str) -> None:
    texts = torch.tensor([[[2, 5, 6, 7], [2, 5, 6, 8]]], device=device)
    lengths = torch.full((1, 2), 2, device=device)
    may_stratify = torch.ones(1, 2, dtype=torch.bool, device=device)
    assert kernel.same_text(texts, lengths, may_stratify).all()
    assert not kernel.same_text(texts, lengths + 1, may_stratify).all()
