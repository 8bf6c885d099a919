"""Counter-based uniforms: their definition, their law, and how siblings share them.

Seeds are fixed; a stated error probability is that of correct code failing, had they been drawn.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from sglang_smc.ops import cpu_ops
from sglang_smc.smc import randomness
from sglang_smc.smc.randomness import Mix, Purpose, derive_seed, round_seeds, stratified, uniforms

INCREMENT = 0x9E3779B97F4A7C15


def mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64, as its authors print it, on unsigned numbers."""
    z = state + np.uint64(INCREMENT)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def unsigned(values: torch.Tensor) -> np.ndarray:
    return values.numpy().astype(np.int64).view(np.uint64)


@pytest.mark.parametrize("of_package", [randomness.mix, cpu_ops.mix])
def test_numbers_and_seeds_are_those_of_an_unsigned_implementation(of_package: Mix) -> None:
    """Of each key alone: neither the rest of a batch nor torch's generator plays a part.

    No two purposes share a number. SplitMix64's first outputs from seed 0 are those that its
    authors publish.
    """
    assert len(Purpose) == len(Purpose.__members__)
    step = np.uint64(INCREMENT)
    with np.errstate(over="ignore"):
        first = mix(np.array([0, INCREMENT], dtype=np.uint64))
    assert first.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    seeds = torch.tensor([0, 1, 7, 2**62, -1, -(2**63), 2**63 - 1]).view(-1, 1, 1)
    positions = torch.tensor([0, 1, 2, 1000, 2**31]).view(1, -1, 1)
    particles = torch.arange(9).view(1, 1, -1)
    with np.errstate(over="ignore"):
        for purpose in Purpose:
            state = mix(unsigned(seeds) ^ (np.uint64(int(purpose)) * step))
            state = mix(mix(state ^ (unsigned(positions) * step)) ^ (unsigned(particles) * step))
            expected = (state >> np.uint64(11)).astype(np.float64) / 2.0**53
            found = uniforms(seeds, positions, particles, purpose, of_package)
            assert np.array_equal(found.numpy(), expected)
        of_rounds = mix(mix(unsigned(seeds)) ^ (unsigned(positions) * step))
        found = round_seeds(seeds, positions, of_package)
        assert np.array_equal(unsigned(found), of_rounds)
        for seed, *keys in ((0,), (-1,), (2**64 - 1, 0), (2**63, 1, 2), (5, 2, 1), (5, -3)):
            state = np.array([seed % 2**64], dtype=np.uint64)
            for key in keys:
                state = mix(state ^ (np.array([key % 2**64], dtype=np.uint64) * step))
            assert derive_seed(seed, *keys) == int(mix(state)[0] >> np.uint64(1))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_along_every_key(axis: int) -> None:
    """Kolmogorov-Smirnov of each purpose, error probability 1e-5 each."""
    keys = [torch.tensor([3])] * 3
    keys[axis] = torch.arange(20_000)
    for purpose in Purpose:
        u = uniforms(*keys, purpose)
        assert u.min() >= 0.0 and u.max() < 1.0
        assert kstest(u.numpy(), "uniform").pvalue > 1e-5


def neighbours(along: int, shift: tuple[int, int, int]) -> list[torch.Tensor]:
    keys = [torch.tensor([11])] * 3
    keys[along] = torch.arange(0, 80_000, 2)
    others = [key + by for key, by in zip(keys, shift, strict=True)]
    return [uniforms(*these, Purpose.DRAFT) for these in (keys, others)]


def pairs() -> Iterator[list[torch.Tensor]]:
    """Keys that differ by one, two purposes, and a position in two rounds that overlap."""
    shifts = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)
    yield from itertools.starmap(neighbours, itertools.product(range(3), shifts))
    seeds = torch.arange(200).view(-1, 1)
    particles = torch.arange(200)
    at = torch.tensor(5)
    of_purposes = [uniforms(seeds, at, particles, one).flatten() for one in Purpose]
    yield from map(list, itertools.combinations(of_purposes, 2))
    seeds = torch.arange(40_000)
    of_rounds = [round_seeds(seeds, torch.full_like(seeds, start)) for start in (4, 5)]
    yield [uniforms(own, at, at, Purpose.DRAFT) for own in of_rounds]


def test_neighbours_in_any_key_are_independent() -> None:
    """Chi-square of pairs on an 8 by 8 grid, error probability 1e-5 each."""
    for first, second in pairs():
        cells = (first * 8).long() * 8 + (second * 8).long()
        assert chisquare(torch.bincount(cells, minlength=64).numpy()).pvalue > 1e-5


# Siblings: particles whose whole text is the same.

SIZE = 10_000


@pytest.mark.parametrize("of", [(0, 0), (0,) * 5, (0, 1, 0, 1, 1, 2), (0, 7) * 8])
def test_siblings_lie_in_one_stratum_each_and_still_have_a_uniform(of: tuple[int, ...]) -> None:
    """Kolmogorov-Smirnov, error probability 1e-5 each; a shift without wrapping would fail.

    Alone a particle keeps its uniform bit for bit, and so does the eldest; two families are
    independent: correlation below 4.5 standard errors (error probability 7e-6).
    """
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(SIZE, len(of), generator=generator, dtype=torch.float64)
    family = torch.tensor(of)
    siblings = family.unsqueeze(0) == family.unsqueeze(1)
    spread = stratified(u, siblings.expand(SIZE, -1, -1))
    assert spread.min() >= 0 and spread.max() < 1
    for family in set(of):
        own = [place for place, other in enumerate(of) if other == family]
        assert torch.equal(spread[:, own[0]], u[:, own[0]])
        strata = (spread[:, own] * len(own)).long().sort(1).values
        assert torch.equal(strata, torch.arange(len(own)).expand_as(strata))
        assert all(kstest(spread[:, one].numpy(), "uniform").pvalue > 1e-5 for one in own)
        others = [place for place, other in enumerate(of) if other != family]
        if others:
            pair = torch.stack([spread[:, own[-1]], spread[:, others[-1]]])
            assert abs(torch.corrcoef(pair)[0, 1]) < 4.5 / SIZE**0.5
