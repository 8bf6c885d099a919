"""Counter-based uniforms: their law, their independence, and that nothing else plays a part.

Seeds are fixed; a stated error probability is that of correct code failing, had they been drawn.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from sglang_smc.smc.randomness import Purpose, derive_seed, round_seeds, uniforms

INCREMENT = 0x9E3779B97F4A7C15


def mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64, as its authors print it, on unsigned numbers."""
    z = state + np.uint64(INCREMENT)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def unsigned(values: torch.Tensor) -> np.ndarray:
    return values.numpy().astype(np.int64).view(np.uint64)


def reference(
    seeds: torch.Tensor, positions: torch.Tensor, particles: torch.Tensor, purpose: Purpose
) -> np.ndarray:
    with np.errstate(over="ignore"):
        step = np.uint64(INCREMENT)
        state = mix(unsigned(seeds) ^ (np.uint64(int(purpose)) * step))
        state = mix(state ^ (unsigned(positions) * step))
        state = mix(state ^ (unsigned(particles) * step))
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def grid() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seeds = torch.tensor([0, 1, 7, 2**62, -1, -(2**63), 2**63 - 1]).view(-1, 1, 1)
    positions = torch.tensor([0, 1, 2, 1000, 2**31]).view(1, -1, 1)
    return seeds, positions, torch.arange(9).view(1, 1, -1)


def test_splitmix_of_the_reference_gives_its_published_numbers() -> None:
    """The first outputs of SplitMix64 from seed 0 (Vigna's splitmix64.c)."""
    with np.errstate(over="ignore"):
        first = mix(np.array([0], dtype=np.uint64))
        second = mix(np.array([INCREMENT], dtype=np.uint64))
    assert hex(int(first[0])) == "0xe220a8397b1dcdaf"
    assert hex(int(second[0])) == "0x6e789e6aa1b965f4"


@pytest.mark.parametrize("purpose", list(Purpose))
def test_equal_to_an_unsigned_implementation(purpose: Purpose) -> None:
    keys = grid()
    expected = reference(*torch.broadcast_tensors(*keys), purpose)
    assert np.array_equal(uniforms(*keys, purpose).numpy(), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_along_every_key(purpose: Purpose, axis: int) -> None:
    """Kolmogorov-Smirnov, error probability 1e-4 each."""
    keys = [torch.tensor([3])] * 3
    keys[axis] = torch.arange(50_000)
    u = uniforms(*keys, purpose)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert kstest(u.numpy(), "uniform").pvalue > 1e-4


def pair_p_value(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of pairs on an 8 by 8 grid."""
    cells = (first * 8).long() * 8 + (second * 8).long()
    return float(chisquare(torch.bincount(cells, minlength=64).numpy()).pvalue)


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)])
@pytest.mark.parametrize("along", [0, 1, 2])
def test_neighbours_in_any_key_are_independent(along: int, other: tuple[int, int, int]) -> None:
    """Error probability 1e-4 each."""
    keys = [torch.tensor([11])] * 3
    keys[along] = torch.arange(0, 80_000, 2)
    shifted = [key + shift for key, shift in zip(keys, other, strict=True)]
    first, second = uniforms(*keys, Purpose.DRAFT), uniforms(*shifted, Purpose.DRAFT)
    assert pair_p_value(first, second) > 1e-4


@pytest.mark.parametrize("pair", list(itertools.combinations(Purpose, 2)))
def test_purposes_are_independent(pair: tuple[Purpose, Purpose]) -> None:
    seeds, particles = torch.arange(200).view(-1, 1), torch.arange(200)
    first, second = (uniforms(seeds, torch.tensor(5), particles, p).flatten() for p in pair)
    assert pair_p_value(first, second) > 1e-4


def test_keys_do_not_stand_for_each_other() -> None:
    """(seed, position, particle) = (1, 2, 3) in all orders: six different numbers."""
    found = {
        float(uniforms(*(torch.tensor(key) for key in keys), Purpose.DRAFT))
        for keys in itertools.permutations((1, 2, 3))
    }
    assert len(found) == 6


def test_no_collisions_among_many_keys() -> None:
    u = uniforms(
        torch.arange(50).view(-1, 1, 1), torch.arange(100).view(-1, 1), torch.arange(16), 1
    )
    assert len(u.unique()) == u.numel()


def test_the_same_alone_and_in_a_batch() -> None:
    seeds, positions = torch.tensor([5, 8, 13, 21]), torch.tensor([3, 0, 70, 3])
    together = uniforms(seeds.view(-1, 1), positions.view(-1, 1), torch.arange(6), Purpose.BONUS)
    for group in range(4):
        alone = uniforms(seeds[group], positions[group], torch.arange(6), Purpose.BONUS)
        assert torch.equal(together[group], alone)


def test_the_global_generator_plays_no_part() -> None:
    keys = grid()
    torch.manual_seed(0)
    first, state = uniforms(*keys, Purpose.SELECT), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, uniforms(*keys, Purpose.SELECT))
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


def test_derived_seeds_differ_by_every_key_and_their_order() -> None:
    keys = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2, 1), (1, 2)]
    seeds = {derive_seed(seed, *key) for seed in (0, 1, -1, 2**63) for key in keys}
    assert len(seeds) == 4 * len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_derived_seeds_are_reproducible_and_take_any_integer() -> None:
    assert derive_seed(42, 7) == derive_seed(42, 7)
    assert derive_seed(-1) == derive_seed(2**64 - 1)


def test_rounds_have_seeds_of_their_own() -> None:
    """Numbers that decided where a round stops are not met again by the next one."""
    seeds, starts = torch.arange(300).view(-1, 1), torch.arange(300)
    found = round_seeds(seeds, starts)
    assert len(found.unique()) == found.numel()
    assert torch.equal(found, round_seeds(seeds, starts)), "and are the same each time"


def test_the_same_position_in_two_rounds_has_independent_numbers() -> None:
    """The second round begins one token later. Error probability 1e-4 each."""
    seeds, position = torch.arange(40_000), torch.tensor(9)
    first, second = (
        uniforms(round_seeds(seeds, torch.full_like(seeds, start)), position, position, purpose)
        for start, purpose in ((7, Purpose.DRAFT), (8, Purpose.DRAFT))
    )
    assert pair_p_value(first, second) > 1e-4
    assert kstest(second.numpy(), "uniform").pvalue > 1e-4


def test_seeds_and_starts_do_not_stand_for_each_other() -> None:
    one, two = torch.tensor([1]), torch.tensor([2])
    assert round_seeds(one, two) != round_seeds(two, one)
