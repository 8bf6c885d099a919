"""Weights at any scale, and laws of resampling; `trace_replay.py` weighs whole rounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.smc import weighing
from sglang_smc.smc.weighing import SCHEMES, normalized

INF = math.inf


@pytest.mark.parametrize("level", [0.0, -1e4, 745.3, 0.1])
def test_ess_of_equal_weights_is_exactly_n(level: float) -> None:
    """With any rounding, tau = 1 would resample equal weights."""
    for num_particles in (1, 2, 3, 7, 49, 4096):
        log_weights = torch.full((num_particles,), level, dtype=torch.float64)
        assert weighing.effective_sample_size(log_weights) == num_particles


@pytest.mark.parametrize("shift", [-3000.0, 0.0, 3000.0, -INF])
def test_weights_at_any_scale(shift: float) -> None:
    """Of a dead group all are zero, not NaN."""
    log_weights = torch.tensor([6.0, 2.0, 0.0, 0.0], dtype=torch.float64).log() + shift
    shares, ess = ([0.0] * 4, 0) if shift == -INF else ([0.75, 0.25, 0.0, 0.0], 64 / 40)
    assert weighing.effective_sample_size(log_weights).item() == pytest.approx(ess)
    assert normalized(log_weights).tolist() == pytest.approx(shares)
    mean = weighing.log_mean_exp(log_weights, torch.tensor(4)).item()
    assert mean == pytest.approx(math.log(2.0) + shift)


def test_long_texts_lose_no_increment_and_the_dead_stay_dead() -> None:
    """In float32, 1e8 + 1 is 1e8; `nan_to_num` by default would make a large number of -inf."""
    start = torch.tensor([1e8, -INF, 0.0], dtype=torch.float64)
    steps = torch.tensor([[1.0, 1.0, 1.0], [5.0, 700.0, INF], [-3e38, 3e38, -INF]])
    running = weighing.accumulate(start, steps)
    assert running.dtype == torch.float64
    assert running[:, -1].tolist() == [1e8 + 3, -INF, -INF]
    assert running[1].tolist() == [-INF] * 4


def ancestors_by(name: str, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Of ``[G, N]`` weights, all present."""
    scheme = torch.tensor([SCHEMES.index(name)])
    size = torch.tensor([weights.shape[1]])
    return weighing.ancestors_of(weights, uniforms, scheme, size)


uniform = st.one_of(
    st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, math.nextafter(1.0, 0.0)])
)
NUM_DRAWS = 8000
# Normalised; dyadic, uneven, with zeros, nearly dead, more than one whole share.
WEIGHTS = {
    "uneven": [0.05, 0.45, 0.2, 0.3],
    "zeros": [0.0, 0.26, 0.0, 0.64, 0.1],
    "one heavy": [0.91, 0.03, 0.03, 0.01, 0.01, 0.01],
    "equal": [1 / 7] * 7,
    "two": [0.7, 0.3],
    "whole shares": [0.5, 0.25, 0.25, 0.0],
    "faint": [1e-9, 1 - 2e-9, 1e-9],
}


@pytest.mark.parametrize("case", list(WEIGHTS))
@pytest.mark.parametrize("name", SCHEMES[:3])
def test_expected_offspring_is_n_w_and_no_count_strays(name: str, case: str) -> None:
    """z-test of each mean at 5 standard errors: error probability 6e-7 a particle.

    Of one that is floor or ceil of N w, the mean is its whole law.
    """
    weights = torch.tensor(WEIGHTS[case], dtype=torch.float64).expand(NUM_DRAWS, -1).contiguous()
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(weights.shape, generator=generator, dtype=torch.float64)
    ancestors = ancestors_by(name, weights, uniforms)
    counts = torch.zeros_like(weights).scatter_add(1, ancestors, torch.ones_like(weights))
    expected = len(WEIGHTS[case]) * weights[0]
    # Offspring that are 0 or 1 beyond the floor vary least; give the error that floor.
    fraction = expected - expected.floor()
    variance = torch.maximum(counts.var(0), fraction * (1 - fraction))
    error = (variance / NUM_DRAWS).sqrt() + 1e-9
    assert ((counts.mean(0) - expected).abs() < 5 * error).all()
    stray = 1e-9  # N w that misses a whole number by a rounding may go either way
    if name == "systematic":
        assert (counts <= (expected + stray).ceil()).all()
        assert (counts >= (expected - stray).floor()).all()
    if name == "stratified":
        assert ((counts - expected).abs() < 2).all()
    if name == "multinomial":
        by_law = expected * (1 - expected / len(expected))
        assert float(counts.var(0).sum()) == pytest.approx(float(by_law.sum()), rel=0.08, abs=1e-6)


@pytest.mark.parametrize("case", list(WEIGHTS))
def test_expected_weight_of_chopthins_offspring_is_n_w(case: str) -> None:
    """z-tests at 5 standard errors, as above, and of the mean weight, which is 1."""
    weights = torch.tensor(WEIGHTS[case], dtype=torch.float64).expand(NUM_DRAWS, -1).contiguous()
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(weights.shape, generator=generator, dtype=torch.float64)
    ancestors, log_weights = chopthin(weights.log() - 3.0, uniforms)
    offspring = log_weights.exp()
    sums = torch.zeros_like(weights).scatter_add(1, ancestors, offspring)
    size = weights.shape[1]
    least = offspring.min() * (size * weights[0] / offspring.min()).remainder(1).sqrt()
    error = torch.maximum(sums.std(0), least) / NUM_DRAWS**0.5 + 1e-9
    assert ((sums.mean(0) - size * weights[0]).abs() < 5 * error).all()


def chopthin(
    log_weights: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    everywhere = torch.ones_like(log_weights[:, 0], dtype=torch.bool)
    scheme = torch.full_like(everywhere, SCHEMES.index("chopthin"), dtype=torch.int64)
    all_of = torch.ones_like(log_weights, dtype=torch.bool)
    found = weighing.resample(log_weights, everywhere, all_of, uniforms, scheme)
    return found[0], found[1]


@settings(max_examples=80)
@given(st.data())
def test_chopthin_bounds_the_ratio_of_any_weights_and_leaves_others_alone(
    data: st.DataObject,
) -> None:
    """Who is neither thinned nor chopped keeps a weight; the effective sample size is N / 2."""
    size = data.draw(st.integers(1, 12))
    spread = data.draw(st.sampled_from([0.0, 0.5, 3.0, 60.0]))
    values = data.draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))
    dead = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    log_weights = torch.tensor([values], dtype=torch.float64) * spread
    log_weights[0, 1:] = log_weights[0, 1:].masked_fill(torch.tensor(dead)[1:], -INF)
    u = data.draw(st.floats(0, 0.999))  # a point that rounds up to a whole share skips a particle
    ancestors, after = chopthin(log_weights, torch.full_like(log_weights, u))
    assert float(after.amax() - after.amin()) <= math.log(2 / weighing.HALF_RATIO_INVERSE) + 1e-9
    assert weighing.effective_sample_size(after) >= size / 2
    shares, _ = weighing.chopped(normalized(log_weights), torch.tensor([size]))
    assert float(shares.sum()) == pytest.approx(size)
    kept = size * normalized(log_weights)
    whole = shares[0] == 1.0
    assert set(torch.nonzero(whole).flatten().tolist()) <= set(ancestors[0].tolist())
    of_whole = whole[ancestors[0]]
    expected = kept[0, ancestors[0]].log()[of_whole]
    torch.testing.assert_close(after[0][of_whole], expected, rtol=0, atol=1e-9)


log_weight = st.one_of(st.floats(-50, 50), st.just(-math.inf), st.sampled_from([0.0, 1.0]))


@settings(max_examples=80)
@given(st.data())
def test_any_weights_give_valid_ancestors_with_weight(data: st.DataObject) -> None:
    values = data.draw(st.lists(log_weight, min_size=1, max_size=12))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.floats(-50, 50))
    log_weights = torch.tensor([values], dtype=torch.float64)
    size = len(values)
    u = data.draw(st.lists(uniform, min_size=size, max_size=size))
    w = normalized(log_weights)
    for name in SCHEMES:
        ancestors = ancestors_by(name, w, torch.tensor([u], dtype=torch.float64))
        assert ancestors.shape == (1, size)
        assert (w.gather(1, ancestors) > 0).all(), name
        floor_ok = torch.bincount(ancestors[0], minlength=size) >= (size * w[0] - 1e-9).floor()
        assert floor_ok.all() or name != "systematic"
