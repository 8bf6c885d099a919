"""Weights in log space: exactness for equal weights, and what -inf, +inf and NaN become."""

import math

import pytest
import torch

from sglang_smc.smc.weights import accumulate, effective_sample_size, log_mean_exp, normalized

INF = math.inf


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("level", [0.0, -1e4, 745.3, 0.1])
@pytest.mark.parametrize("num_particles", [1, 2, 3, 7, 49, 4096])
def test_ess_of_equal_weights_is_exactly_n(num_particles: int, level: float) -> None:
    """With any rounding, tau = 1 would resample equal weights."""
    log_weights = torch.full((num_particles,), level, dtype=torch.float64)
    assert effective_sample_size(log_weights) == num_particles


def test_ess_follows_kongs_formula() -> None:
    w = weights(1.0, 2.0, 3.0, 10.0)
    assert effective_sample_size(w.log()).item() == pytest.approx(16**2 / 114)


def test_ess_ignores_the_scale_of_the_weights() -> None:
    log_weights = weights(0.0, -1.0, -5.0)
    shifted = torch.stack([log_weights - 2000, log_weights + 2000])
    assert torch.allclose(effective_sample_size(shifted), effective_sample_size(log_weights))


def test_ess_counts_the_living() -> None:
    table = torch.stack([weights(0, -INF, 0, -INF), weights(-INF, -INF, -INF, -3)])
    assert effective_sample_size(table).tolist() == [2.0, 1.0]


def test_a_dead_group_has_ess_zero_and_weights_zero_not_nan() -> None:
    dead = weights(-INF, -INF, -INF)
    assert effective_sample_size(dead) == 0
    assert normalized(dead).tolist() == [0.0, 0.0, 0.0]
    assert log_mean_exp(dead) == -INF


def test_normalized_weights_sum_to_one_at_any_scale() -> None:
    log_weights = torch.stack([weights(-3000, -3001, -INF), weights(3000, 2999, -INF)])
    w = normalized(log_weights)
    assert torch.allclose(w.sum(-1), weights(1.0, 1.0), atol=1e-15)
    assert torch.allclose(w[..., 0] / w[..., 1], weights(math.e, math.e))
    assert w[..., 2].tolist() == [0.0, 0.0]


def test_log_mean_exp_divides_by_the_number_of_all_particles_dead_ones_too() -> None:
    assert log_mean_exp(weights(math.log(6.0), -INF, -INF)).item() == pytest.approx(math.log(2.0))


def test_accumulate_keeps_the_start_and_adds_column_after_column() -> None:
    running = accumulate(weights(1.0, -2.0), torch.tensor([[0.5, 0.25], [1.0, -1.0]]))
    assert running.tolist() == [[1.0, 1.5, 1.75], [-2.0, -1.0, -2.0]]


def test_accumulate_adds_float32_increments_in_float64() -> None:
    """In float32, 1e8 + 1 is 1e8: a long text would lose its increments."""
    running = accumulate(weights(1e8), torch.ones(1, 3))
    assert running.dtype == torch.float64
    assert running[0, -1] == 1e8 + 3


@pytest.mark.parametrize("poison", [math.nan, -INF])
def test_accumulate_kills_a_particle_at_the_column_of_nan_or_minus_infinity(poison: float) -> None:
    running = accumulate(weights(0.0, 0.0), torch.tensor([[1.0, poison, 2.0], [1.0, 1.0, 1.0]]))
    assert running.tolist() == [[0.0, 1.0, -INF, -INF], [0.0, 1.0, 2.0, 3.0]]


def test_a_dead_particle_stays_dead() -> None:
    assert accumulate(weights(-INF), torch.tensor([[5.0, 700.0]])).tolist() == [[-INF] * 3]


def test_huge_finite_increments_stay_as_they_are() -> None:
    """`nan_to_num` by default would turn -inf into a large number: a resurrection."""
    running = accumulate(weights(0.0), torch.tensor([[-3e38, 3e38, -INF]]))
    assert running[0, 3] == -INF
    assert not running.isnan().any()


@pytest.mark.parametrize(
    ("start", "increments"), [(-INF, [INF]), (0.0, [-INF, INF]), (0.0, [INF, -INF])]
)
def test_infinities_that_meet_make_a_dead_particle_not_nan(
    start: float, increments: list[float]
) -> None:
    """One NaN weight would make its group's ESS and all its normalised weights NaN."""
    assert accumulate(weights(start), torch.tensor([increments]))[0, -1] == -INF
