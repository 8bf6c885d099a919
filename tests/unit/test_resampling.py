"""Resampling at its boundaries and to another size; `tests/property` has the schemes' laws."""

import math

import pytest
import torch

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.resizing import resize

LARGEST = math.nextafter(1.0, 0.0)
BOUNDARIES = torch.tensor([0.0, 5e-324, 0.5, LARGEST], dtype=torch.float64).view(-1, 1)


def weights_with_a_sum_below_one(num_particles: int) -> torch.Tensor:
    """Normalised weights whose float64 cumulative sum ends below 1."""
    generator = torch.Generator().manual_seed(num_particles)
    for _ in range(1000):
        w = torch.rand(num_particles, generator=generator, dtype=torch.float64)
        w = w / w.sum()
        if w.cumsum(-1)[-1] < 1.0:
            return w
    raise AssertionError("found none")


@pytest.mark.parametrize("num_particles", [3, 10, 100, 1024])
@pytest.mark.parametrize("name", list(SCHEMES))
def test_sums_that_end_below_one_never_overrun(name: str, num_particles: int) -> None:
    w = weights_with_a_sum_below_one(num_particles).repeat(4, 1)
    ancestors = SCHEMES[name](w, BOUNDARIES.expand_as(w))
    assert ancestors.dtype == torch.int64
    assert ancestors.shape == w.shape
    assert ancestors.min() >= 0 and ancestors.max() < num_particles


@pytest.mark.parametrize("name", list(SCHEMES))
def test_groups_are_drawn_each_for_itself_and_none_chooses_weight_zero(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(500, 33, generator=generator, dtype=torch.float64)
    w = w * (torch.rand(500, 33, generator=generator) < 0.3)
    w[:, 7] += 1e-3
    w = w / w.sum(-1, keepdim=True)
    u = torch.rand(500, 33, generator=generator, dtype=torch.float64)
    u[:40] = BOUNDARIES.repeat(10, 1)
    chosen = SCHEMES[name](w, u)
    assert (w.gather(-1, chosen) > 0).all()
    assert torch.equal(chosen[:20], torch.stack([SCHEMES[name](w[g], u[g]) for g in range(20)]))


@pytest.mark.parametrize("name", ["systematic", "stratified", "ssp", "residual"])
@pytest.mark.parametrize("num_particles", [1, 2, 8, 64])
def test_equal_weights_keep_every_particle_once(name: str, num_particles: int) -> None:
    """For N a power of two, where 1/N is exact; the low-variance schemes then do nothing."""
    w = torch.full((num_particles,), 1.0 / num_particles, dtype=torch.float64)
    u = torch.rand(num_particles, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert SCHEMES[name](w, u).sort().values.tolist() == list(range(num_particles))


def test_ancestors_by_hand() -> None:
    """A point on a border belongs to the particle that begins there."""
    w = torch.tensor([0.1, 0.3, 0.0, 0.6], dtype=torch.float64)
    assert SCHEMES["systematic"](w, torch.full_like(w, 0.5)).tolist() == [1, 1, 3, 3]
    w = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    u = torch.tensor([0.25, 0.5, 0.0], dtype=torch.float64)
    assert SCHEMES["multinomial"](w, u).tolist() == [1, 2, 0]
    assert all(name == scheme.__name__ for name, scheme in SCHEMES.items())


SIZE = 4_000
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.5, 0.0, 0.0], dtype=torch.float64)  # of four present


@pytest.mark.parametrize("method", list(SCHEMES))
@pytest.mark.parametrize("num_particles", [1, 2, 3, 5, 6])
def test_offspring_are_expected_in_proportion_to_weight(num_particles: int, method: str) -> None:
    """Of another size. Within 5 standard errors of a multinomial draw, which none exceeds."""
    uniforms = torch.rand(SIZE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    present = (torch.arange(6) < 4).expand(SIZE, -1)
    after = torch.full((SIZE,), num_particles)
    found = resize(WEIGHTS.log().expand(SIZE, -1), present, after, uniforms, method)
    drawn = found.ancestors[:, :num_particles]
    offspring = torch.stack([(drawn == n).sum(1) for n in range(6)], 1).double().mean(0)
    shares = WEIGHTS / WEIGHTS.sum()
    error = (num_particles * shares * (1 - shares) / SIZE).sqrt()
    assert ((offspring - num_particles * shares).abs() <= 5 * error + 1e-12).all()
    assert torch.allclose(found.log_evidence, torch.tensor(math.log(4 / 4)).double())
    assert found.present.sum(1).eq(num_particles).all()
    assert found.log_weights[:, :num_particles].eq(0).all()
    assert found.log_weights[:, num_particles:].eq(-torch.inf).all()
    assert found.ancestors[:, num_particles:].eq(torch.arange(num_particles, 6)).all()


def test_who_keeps_its_size_keeps_everything() -> None:
    """Where the size changes, the mean weight of the particles that were there is banked."""
    weights = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64).log().expand(3, -1)
    present = torch.tensor([True, True, False]).expand(3, -1)
    uniforms = torch.full((3, 3), 0.9, dtype=torch.float64)
    found = resize(weights, present, torch.tensor([2, 1, 3]), uniforms, "multinomial")
    assert found.ancestors.tolist() == [[0, 1, 2], [1, 1, 2], [1, 1, 1]]
    assert torch.equal(found.log_weights[0], weights[0])
    assert found.log_evidence.exp().tolist() == pytest.approx([1.0, 2.0, 2.0])
    assert found.present.tolist() == [[True, True, False], [True, False, False], [True] * 3]
