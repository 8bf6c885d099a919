"""Siblings share their noise evenly, and each still draws from its own law."""

import pytest
import torch
from scipy.stats import kstest

from sglang_smc.smc.stratify import equal_texts, same_text, still_same, stratified, stratify
from sglang_smc.tokens.distribution import sample

SIZE = 20_000


def noise(num_particles: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SIZE, num_particles, generator=generator, dtype=torch.float64)


def families(*of: int) -> torch.Tensor:
    """Siblings of particles by their family's number, ``[SIZE, N, N]``."""
    family = torch.tensor(of)
    return (family.unsqueeze(0) == family.unsqueeze(1)).expand(SIZE, -1, -1)


def test_the_same_text_is_the_same_tokens_up_to_the_same_length() -> None:
    """Stale tokens count neither for equality nor against it."""
    tokens = torch.tensor([[[1, 2, 9], [1, 2, 7], [1, 2, 9], [1, 9, 9], [1, 2, 9]]])
    lengths = torch.tensor([[2, 2, 3, 1, 0]])
    expected = torch.eye(5, dtype=torch.bool)
    expected[0, 1] = expected[1, 0] = True
    assert torch.equal(equal_texts(tokens, lengths)[0], expected)


def test_texts_that_are_all_empty_are_the_same() -> None:
    assert equal_texts(torch.tensor([[[3], [4]]]), torch.zeros(1, 2, dtype=torch.int64)).all()


def test_siblings_have_one_anchor_and_one_tail_and_may_share() -> None:
    texts = torch.tensor([[[7, 4], [7, 4], [8, 4], [7, 5], [7, 4]]])
    lengths = torch.ones(1, 5, dtype=torch.int64)
    may_stratify = torch.tensor([[True, True, True, True, False]])
    expected = torch.eye(5, dtype=torch.bool)
    expected[0, 1] = expected[1, 0] = True
    assert torch.equal(same_text(texts, lengths, may_stratify)[0], expected)


def test_siblings_remain_so_as_long_as_they_draw_the_same() -> None:
    pairs = torch.tensor([[[1, 1, 0], [1, 1, 0], [0, 0, 1]]], dtype=torch.bool)
    same = still_same(pairs, torch.tensor([[4, 4, 4]]))
    assert torch.equal(same, pairs), "strangers do not become siblings by one token"
    assert torch.equal(still_same(pairs, torch.tensor([[4, 5, 4]]))[0], torch.eye(3).bool())


def test_alone_a_particle_keeps_its_uniform() -> None:
    """Bit for bit: what a request draws with N = 1 does not depend on this module."""
    u = noise(3)
    assert torch.equal(stratified(u, families(0, 1, 2)), u)
    mixed = stratified(u, families(0, 1, 0))
    assert torch.equal(mixed[:, 1], u[:, 1])
    assert torch.equal(mixed[:, 0], u[:, 0]), "the eldest keeps its own, too"


@pytest.mark.parametrize("of", [(0, 0), (0, 0, 0, 0, 0), (0, 1, 0, 1, 1, 2)])
def test_every_particle_still_has_a_uniform(of: tuple[int, ...]) -> None:
    """Kolmogorov-Smirnov, error probability 1e-4 each; a shift without wrapping would fail."""
    spread = stratified(noise(len(of)), families(*of))
    assert spread.min() >= 0 and spread.max() < 1
    for particle in range(len(of)):
        assert kstest(spread[:, particle].numpy(), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("count", [2, 3, 8])
def test_siblings_lie_in_one_stratum_each(count: int) -> None:
    """Whatever stands between them; with independent uniforms two would often share one."""
    of = [7 if place % 2 else 0 for place in range(2 * count)]
    spread = stratified(noise(2 * count), families(*of))[:, ::2]
    strata = (spread * count).long().sort(1).values
    assert torch.equal(strata, torch.arange(count).expand_as(strata))


def test_families_are_independent() -> None:
    """Correlation of two families below 4.5 standard errors (error probability 7e-6)."""
    spread = stratified(noise(4), families(0, 0, 1, 1))
    pair = torch.stack([spread[:, 0], spread[:, 2]])
    assert abs(torch.corrcoef(pair)[0, 1]) < 4.5 / SIZE**0.5


@pytest.mark.parametrize("count", [3, 8])
def test_siblings_draw_a_token_as_often_as_they_must_give_or_take_one(count: int) -> None:
    """Tokens are intervals of the circle, so counts are floor or ceil of m q(x)."""
    q = torch.tensor([0.4, 0.05, 0.3, 0.0, 0.25], dtype=torch.float64)
    spread = stratified(noise(count), families(*[0] * count))
    tokens = sample(q.log().expand(SIZE, count, 5), spread)
    drawn = torch.nn.functional.one_hot(tokens, 5).sum(1).double()
    assert (drawn >= (count * q - 1e-9).floor()).all()
    assert (drawn <= (count * q + 1e-9).ceil()).all()
    assert torch.allclose(drawn.mean(0), count * q, atol=4.5 * 0.5 / SIZE**0.5)


def test_noise_is_spread_among_those_that_remain_siblings() -> None:
    """Tokens part same_text before the noise is shared, not after."""
    u = torch.tensor([[0.2, 0.7, 0.9]], dtype=torch.float64)
    pairs = torch.ones(1, 3, 3, dtype=torch.bool)
    parted, remaining = stratify(u, pairs, torch.tensor([[4, 5, 4]]))
    assert torch.allclose(parted, torch.tensor([[0.2, 0.7, 0.7]], dtype=torch.float64))
    assert torch.equal(remaining, still_same(pairs, torch.tensor([[4, 5, 4]])))
    together, same = stratify(u, pairs)
    assert torch.equal(together, stratified(u, pairs))
    assert torch.equal(same, pairs)
