"""What particles have in common, and siblings' noise, kernel against reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.kernels import agreement as kernel
from sglang_smc.smc import agreement, stratify

CASES: dict[str, Any] = {
    "deadline": None,
    "max_examples": 10,
    "derandomize": True,
    "database": None,
}


def random_present(num_groups: int, num_particles: int, generator: torch.Generator) -> torch.Tensor:
    """``[G, N]`` bool: particle 0 and some that follow it, not always all."""
    sizes = torch.randint(1, num_particles + 1, (num_groups, 1), generator=generator)
    return torch.arange(num_particles) < sizes


@settings(**CASES)
@given(
    num_groups=st.sampled_from([1, 4]),
    num_particles=st.sampled_from([1, 2, 3, 8]),
    width=st.sampled_from([2, 63, 64, 65, 150]),
    p_dead=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_narrow(
    device: str, num_groups: int, num_particles: int, width: int, p_dead: float, seed: int
) -> None:
    """Texts with a token changed here or there, dead particles, drawn ones and heaviest ones."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_groups, num_particles, width
    texts = (torch.rand(shape, generator=generator) < 1.5 / width).long()
    present = random_present(num_groups, num_particles, generator)
    lengths = torch.randint(width // 2, width, shape[:2], generator=generator) * present
    log_weights = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
    dead = torch.rand(shape[:2], generator=generator) < p_dead
    arguments = (
        log_weights.masked_fill(dead | ~present, -torch.inf),
        texts,
        lengths,
        torch.randint(width, (num_groups,), generator=generator),
        present,
        torch.rand(num_groups, generator=generator, dtype=torch.float64),
        torch.rand(num_groups, generator=generator) < 0.3,
    )
    found = kernel.narrow(*(argument.to(device) for argument in arguments))
    for one, other in zip(found, agreement.narrow(*arguments), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)


@settings(**CASES)
@given(
    num_groups=st.sampled_from([1, 4]),
    num_particles=st.sampled_from([1, 2, 3, 8, 9]),
    width=st.sampled_from([2, 63, 64, 65, 150]),
    seed=st.integers(0, 1000),
)
def test_common_tail(
    device: str, num_groups: int, num_particles: int, width: int, seed: int
) -> None:
    """Texts that agree for long: each is a copy of one, with a token changed here or there."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_groups, num_particles, width
    original = torch.randint(9, (num_groups, 1, width), generator=generator).expand(shape)
    changed = torch.rand(shape, generator=generator) < 0.8 / (num_particles * width)
    wide = torch.zeros(num_groups, num_particles, width + 2, dtype=torch.int64)
    wide[:, :, 2:] = torch.where(changed, 9, original)
    lengths = torch.randint(width // 2, width, shape[:2], generator=generator)
    arguments = wide[:, :, 2:], lengths, random_present(num_groups, num_particles, generator)
    found = kernel.common_tail(*(argument.to(device) for argument in arguments))
    assert found.tolist() == agreement.common_tail(*arguments).tolist()


@pytest.mark.parametrize(
    ("texts", "lengths", "present", "expected"),
    [
        ([[7, 1, 2, 3]], [3], [True], 3),
        ([[7, 1, 2, 3], [7, 1, 2, 4]], [3, 3], [True, True], 2),
        ([[7, 1, 2, 3], [7, 1, 2, 3]], [3, 1], [True, True], 1),
        ([[7, 1, 2], [7, 1, 2]], [0, 2], [True, True], 0),
        ([[7, 1, 2], [7, 3, 2]], [2, 2], [True, True], 0),
        ([[7, 1, 2], [8, 1, 2]], [2, 2], [True, True], 0),
        ([[7, 1, 2, 3], [7, 1, 2, 4], [9, 9, 9, 9]], [3, 3, 0], [True, True, False], 2),
    ],
)
def test_common_tail_of_few_tokens(
    device: str,
    texts: list[list[int]],
    lengths: list[int],
    present: list[bool],
    expected: int,
) -> None:
    """Behind the token before; an absent particle has no say, by its tokens or its length."""
    arguments = tuple(torch.tensor([values]) for values in (texts, lengths, present))
    assert agreement.common_tail(*arguments).tolist() == [expected]
    assert kernel.common_tail(*(one.to(device) for one in arguments)).tolist() == [expected]


@settings(**CASES)
@given(
    num_groups=st.sampled_from([1, 4]), num_particles=st.integers(1, 9), seed=st.integers(0, 1000)
)
def test_num_distinct(device: str, num_groups: int, num_particles: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(num_particles, (num_groups, num_particles), generator=generator)
    present = random_present(num_groups, num_particles, generator)
    found = kernel.num_distinct(places.to(device), present.to(device)).tolist()
    assert found == agreement.num_distinct(places, present).tolist()
    rows = zip(places.tolist(), present.tolist(), strict=True)
    by_sets = [len({p for p, is_there in zip(*row, strict=True) if is_there}) for row in rows]
    assert found == by_sets


@settings(**CASES)
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
    expected = stratify.stratify(uniforms, same_text, tokens)
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


@settings(**CASES)
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
    assert torch.equal(found, stratify.same_text(*arguments))


def test_stale_tokens_beyond_a_text_do_not_tell_texts_apart(device: str) -> None:
    texts = torch.tensor([[[2, 5, 6, 7], [2, 5, 6, 8]]], device=device)
    lengths = torch.full((1, 2), 2, device=device)
    may_stratify = torch.ones(1, 2, dtype=torch.bool, device=device)
    assert kernel.same_text(texts, lengths, may_stratify).all()
    assert not kernel.same_text(texts, lengths + 1, may_stratify).all()
