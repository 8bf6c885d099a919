"""Each resampling scheme at its boundaries; `tests/property/test_resampling.py` has the laws."""

import math

import pytest
import torch

from sglang_smc.smc.resampling import SCHEMES

LARGEST = math.nextafter(1.0, 0.0)
BOUNDARY_UNIFORMS = [0.0, 5e-324, 0.5, LARGEST]


def offspring(ancestors: torch.Tensor) -> torch.Tensor:
    """How many copies each particle has, ``[..., N]`` to ``[..., N]``."""
    counts = torch.zeros_like(ancestors)
    return counts.scatter_add(-1, ancestors, torch.ones_like(ancestors))


def weights_with_a_sum_below_one(num_particles: int) -> torch.Tensor:
    """Normalised weights whose float64 cumulative sum ends below 1."""
    generator = torch.Generator().manual_seed(num_particles)
    for _ in range(1000):
        w = torch.rand(num_particles, generator=generator, dtype=torch.float64)
        w = w / w.sum()
        if w.cumsum(-1)[-1] < 1.0:
            return w
    raise AssertionError("found none")


@pytest.mark.parametrize("uniform", BOUNDARY_UNIFORMS)
@pytest.mark.parametrize("num_particles", [3, 10, 100, 1024, 4096])
@pytest.mark.parametrize("name", list(SCHEMES))
def test_sums_that_end_below_one_never_overrun(
    name: str, num_particles: int, uniform: float
) -> None:
    w = weights_with_a_sum_below_one(num_particles)
    assert w.cumsum(-1)[-1] < 1.0, "precondition"
    ancestors = SCHEMES[name](w, torch.full_like(w, uniform))
    assert ancestors.dtype == torch.int64
    assert ancestors.shape == w.shape
    assert ancestors.min() >= 0 and ancestors.max() < num_particles


@pytest.mark.parametrize("uniform", BOUNDARY_UNIFORMS)
@pytest.mark.parametrize("name", list(SCHEMES))
def test_particles_of_weight_zero_are_never_chosen(name: str, uniform: float) -> None:
    """At the front, in the middle, in a row and at the end."""
    w = torch.tensor(
        [
            [0.0, 0.0, 0.3, 0.0, 0.7, 0.0],
            [0.5, 0.0, 0.0, 0.0, 0.0, 0.5],
            [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
            [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.1, 0.2, 0.3, 0.4, 0.0],
            [1 / 3, 0.0, 1 / 3, 0.0, 1 / 3, 0.0],
        ],
        dtype=torch.float64,
    )
    chosen = SCHEMES[name](w, torch.full_like(w, uniform))
    assert (w.gather(-1, chosen) > 0).all()


@pytest.mark.parametrize("name", list(SCHEMES))
def test_particles_of_weight_zero_are_never_chosen_among_many(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(500, 33, generator=generator, dtype=torch.float64)
    w = w * (torch.rand(500, 33, generator=generator) < 0.3)
    w[:, 7] += 1e-3
    w = w / w.sum(-1, keepdim=True)
    u = torch.rand(500, 33, generator=generator, dtype=torch.float64)
    assert (w.gather(-1, SCHEMES[name](w, u)) > 0).all()


@pytest.mark.parametrize("uniform", BOUNDARY_UNIFORMS)
@pytest.mark.parametrize("name", list(SCHEMES))
def test_one_particle_is_its_own_ancestor(name: str, uniform: float) -> None:
    w = torch.ones(1, dtype=torch.float64)
    assert SCHEMES[name](w, torch.full_like(w, uniform)).tolist() == [0]


@pytest.mark.parametrize("name", list(SCHEMES))
def test_a_particle_with_all_the_weight_fills_every_slot(name: str) -> None:
    w = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert SCHEMES[name](w, torch.rand(4, dtype=torch.float64)).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("name", list(SCHEMES))
def test_groups_do_not_influence_each_other(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    w, u = torch.rand(2, 20, 7, generator=generator, dtype=torch.float64)
    w = w / w.sum(-1, keepdim=True)
    alone = [SCHEMES[name](w[group], u[group]) for group in range(20)]
    assert torch.equal(SCHEMES[name](w, u), torch.stack(alone))


@pytest.mark.parametrize("name", ["systematic", "stratified", "ssp", "residual"])
@pytest.mark.parametrize("num_particles", [1, 2, 4, 8, 64])
def test_equal_weights_keep_every_particle_once(name: str, num_particles: int) -> None:
    """For N a power of two, where 1/N is exact; the low-variance schemes then do nothing."""
    w = torch.full((num_particles,), 1.0 / num_particles, dtype=torch.float64)
    u = torch.rand(num_particles, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert offspring(SCHEMES[name](w, u)).tolist() == [1] * num_particles


def test_systematic_by_hand() -> None:
    """Points .125, .375, .625, .875 against cumulative .1, .4, .4, 1."""
    w = torch.tensor([0.1, 0.3, 0.0, 0.6], dtype=torch.float64)
    assert SCHEMES["systematic"](w, torch.full_like(w, 0.5)).tolist() == [1, 1, 3, 3]


def test_a_point_on_a_border_belongs_to_the_particle_that_begins_there() -> None:
    w = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    u = torch.tensor([0.25, 0.5, 0.0], dtype=torch.float64)
    assert SCHEMES["multinomial"](w, u).tolist() == [1, 2, 0]


def test_residual_keeps_floor_n_w_copies() -> None:
    w = torch.tensor([0.55, 0.30, 0.15], dtype=torch.float64)  # N w = 1.65, .9, .45
    for uniform in (0.0, 0.4, 0.9):
        ancestors = SCHEMES["residual"](w, torch.full_like(w, uniform))
        assert offspring(ancestors)[0] >= 1


def test_schemes_are_in_the_dictionary_under_their_own_names() -> None:
    assert {name: scheme.__name__ for name, scheme in SCHEMES.items()} == {
        name: name for name in ("systematic", "stratified", "multinomial", "residual", "ssp")
    }
