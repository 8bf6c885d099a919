"""A population of another size stands for the same weights."""

import math

import pytest
import torch

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.resizing import resize

SIZE = 20_000
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.5, 0.0, 0.0], dtype=torch.float64)  # of four present


@pytest.mark.parametrize("method", list(SCHEMES))
@pytest.mark.parametrize("num_particles", [1, 2, 3, 5, 6])
def test_offspring_are_expected_in_proportion_to_weight(num_particles: int, method: str) -> None:
    """Within 5 standard errors of a multinomial draw, which no scheme exceeds."""
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


def test_the_mean_weight_of_the_particles_that_were_there_is_banked() -> None:
    weights = torch.tensor([[1.0, 3.0, 0.0]], dtype=torch.float64).log()
    present = torch.tensor([[True, True, False]])
    uniforms = torch.rand(1, 3, dtype=torch.float64)
    for after in (1, 3):
        found = resize(weights, present, torch.tensor([after]), uniforms, "systematic")
        assert found.log_evidence.exp() == pytest.approx(2.0)


def test_who_keeps_its_size_keeps_everything() -> None:
    weights = torch.tensor([[1.0, 3.0, 0.0], [1.0, 3.0, 0.0]], dtype=torch.float64).log()
    present = torch.tensor([[True, True, False]] * 2)
    uniforms = torch.full((2, 3), 0.9, dtype=torch.float64)
    found = resize(weights, present, torch.tensor([2, 1]), uniforms, "multinomial")
    assert found.ancestors.tolist() == [[0, 1, 2], [1, 1, 2]]
    assert torch.equal(found.log_weights[0], weights[0])
    assert found.log_evidence[0] == 0
    assert found.present.tolist() == [[True, True, False], [True, False, False]]
