"""What particles have in common, kernel against reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.kernels import agreement as kernel
from sglang_smc.smc import agreement

CASES = {"deadline": None, "max_examples": 40}


def random_present(num_groups: int, num_particles: int, generator: torch.Generator) -> torch.Tensor:
    """``[G, N]`` bool: particle 0 and some that follow it, not always all."""
    sizes = torch.randint(1, num_particles + 1, (num_groups, 1), generator=generator)
    return torch.arange(num_particles) < sizes


@settings(**CASES)
@given(
    num_groups=st.integers(1, 3),
    num_particles=st.sampled_from([1, 2, 3, 5, 8, 32]),
    width=st.integers(2, 150),
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
    num_groups=st.integers(1, 3),
    num_particles=st.integers(1, 9),
    width=st.integers(2, 150),
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
@given(num_groups=st.integers(1, 3), num_particles=st.integers(1, 9), seed=st.integers(0, 1000))
def test_num_distinct(device: str, num_groups: int, num_particles: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(num_particles, (num_groups, num_particles), generator=generator)
    present = random_present(num_groups, num_particles, generator)
    found = kernel.num_distinct(places.to(device), present.to(device)).tolist()
    assert found == agreement.num_distinct(places, present).tolist()
    rows = zip(places.tolist(), present.tolist(), strict=True)
    by_sets = [len({p for p, is_there in zip(*row, strict=True) if is_there}) for row in rows]
    assert found == by_sets
