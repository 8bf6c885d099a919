"""Blocks are weighed, cut and resampled as defined; laws of the resampling schemes."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from sglang_smc.smc import weighing
from sglang_smc.smc.weighing import (
    SCHEMES,
    accumulate,
    effective_sample_size,
    log_mean_exp,
    normalized,
    resize,
)

INF = math.inf
G, N, K = 1500, 4, 3


def choices(generator: torch.Generator, values: list, *shape: int) -> torch.Tensor:
    at = torch.randint(len(values), shape, generator=generator)
    return torch.tensor(values)[at]


def ess_of(weights: list[float]) -> float:
    """Return N exactly where all weigh the same."""
    highest = max(weights)
    shares = [math.exp(w - highest) for w in weights if w > -INF]
    return sum(shares) ** 2 / sum(share**2 for share in shares) if shares else 0.0


def log_total(weights: list[float]) -> float:
    return float(logsumexp(weights))


def definition(
    start: list[float],
    columns: list[list[float]],
    tau: float,
    resample_each_token: bool,
    threshold: float,
    coin: float,
) -> tuple[int, list[float], float, bool, bool]:
    """How one group is cut; ``columns`` hold an increment for each particle."""
    running = [start]
    for column in columns:
        added = [w + step for w, step in zip(running[-1], column, strict=True)]
        running.append([w if math.isfinite(w) else -INF for w in added])
    log_evidence = [log_total(weights) - log_total(start) for weights in running]
    covered = [j for j, log in enumerate(log_evidence) if coin * threshold < math.exp(log)]
    low = [ess_of(weights) < tau * len(start) for weights in running]
    last = max(covered, default=0)
    failing = [j for j in range(1, last + 1) if low[j]]
    stop = failing[0] if resample_each_token and failing else last
    dies = stop < len(columns) and max(running[stop + 1]) == -INF
    return stop, running[stop], ess_of(running[stop]), low[stop], dies


def test_blocks_are_weighed_cut_and_resampled_as_defined() -> None:
    """1,500 groups that differ in N, K, rules and fates; all numbers are dyadic, so none ties.

    What stands behind an end, beyond a group's own K or in an empty place is NaN and counts for
    nothing; NaN and infinity within a block kill.
    """
    generator = torch.Generator().manual_seed(0)
    present = torch.arange(N) < torch.randint(1, N + 1, (G, 1), generator=generator)
    num_steps = torch.randint(1, K + 1, (G,), generator=generator)
    kept_until = torch.randint(0, K + 1, (G, N), generator=generator).clamp_max(num_steps[:, None])
    kept_until[::2] = num_steps[::2, None].expand(-1, N)
    before_end = (torch.arange(K) < kept_until.unsqueeze(2)) & present.unsqueeze(2)
    increments = choices(generator, [0.0, 0.0, 0.25, 9.0, -0.5, -1.0, -INF], G, N, K).double()
    increments[::3] = increments[::3, :1]  # equal particles
    broken = choices(generator, [False] * 9 + [True], G, N, K)
    increments = torch.where(broken, choices(generator, [INF, math.nan, -INF], G, N, K), increments)
    weights = choices(generator, [0.0, 0.0, 1.5, -INF], G, N).double()
    weights[:, 0] = 0.0  # no group begins dead
    weights[::3] = 0.25
    weights = weights.masked_fill(~present, -INF)
    power = choices(generator, [0.5, 1.0, 2.0], G).double()
    log_q = choices(generator, [-1.0, -2.0], G, N, K).double()
    log_p = ((increments + log_q) / power.view(-1, 1, 1)).where(before_end, math.nan)
    rules = (
        choices(generator, [0.0, 0.5, 0.9, 1.0], G).double(),
        choices(generator, [False, True], G),
        choices(generator, [0.0, 0.5, 1.0, INF], G).double(),
    )
    coins = choices(generator, [0.0, 0.1, 0.3, 0.45, 0.97], G).double()
    uniforms = torch.rand(G, N, generator=generator, dtype=torch.float64)
    scheme = torch.randint(len(SCHEMES), (G,), generator=generator)
    found = weighing.reweight_and_resample(
        *(weights, log_p, log_q, before_end, power, num_steps, *rules, present),
        *(coins, uniforms, scheme, tuple(SCHEMES)),
    )
    steps = torch.where(before_end, increments, 0.0)
    stays = torch.arange(N)
    for g in range(G):
        size = int(present[g].sum())
        of_rules = [float(rule[g]) for rule in rules]
        stop, after, ess, resamples, dies = definition(
            weights[g, :size].tolist(),
            steps[g, :size, : num_steps[g]].t().tolist(),
            of_rules[0],
            bool(of_rules[1]),
            of_rules[2],
            float(coins[g]),
        )
        how = (int(found.num_columns[g]), bool(found.resampled[g]), bool(found.all_zero[g]))
        assert how == (stop, resamples, dies), g
        assert found.weighed[g].tolist() == pytest.approx(after + [-INF] * (N - size))
        assert float(found.ess[g]) == pytest.approx(ess)
        kept = kept_until[g].clamp_max(stop).where(present[g], 0)
        assert found.num_kept[g].tolist() == kept.tolist()
        if not resamples:
            assert torch.equal(found.ancestors[g], stays)
            assert torch.equal(found.log_weights[g], found.weighed[g])
            assert found.log_evidence[g] == 0
            continue
        alone = SCHEMES[list(SCHEMES)[scheme[g]]](
            normalized(found.weighed[[g], :size]), uniforms[[g], :size], torch.tensor([size])
        )
        assert found.ancestors[g].tolist() == [*alone[0].tolist(), *range(size, N)]
        assert found.log_weights[g].tolist() == [0.0] * size + [-INF] * (N - size)
        mean = log_total(after) - math.log(size)
        assert float(found.log_evidence[g]) == pytest.approx(mean, abs=1e-12)
    assert min(int(found.resampled.sum()), int(found.all_zero.sum())) > 50


@pytest.mark.parametrize("level", [0.0, -1e4, 745.3, 0.1])
def test_ess_of_equal_weights_is_exactly_n(level: float) -> None:
    """With any rounding, tau = 1 would resample equal weights."""
    for num_particles in (1, 2, 3, 7, 49, 4096):
        log_weights = torch.full((num_particles,), level, dtype=torch.float64)
        assert effective_sample_size(log_weights) == num_particles


@pytest.mark.parametrize("shift", [-3000.0, 0.0, 3000.0, -INF])
def test_weights_at_any_scale(shift: float) -> None:
    """Of a dead group all are zero, not NaN."""
    log_weights = torch.tensor([6.0, 2.0, 0.0, 0.0], dtype=torch.float64).log() + shift
    is_dead = shift == -INF
    shares = [0.0] * 4 if is_dead else [0.75, 0.25, 0.0, 0.0]
    assert effective_sample_size(log_weights).item() == pytest.approx(0 if is_dead else 64 / 40)
    assert normalized(log_weights).tolist() == pytest.approx(shares)
    assert log_mean_exp(log_weights).item() == pytest.approx(math.log(2.0) + shift)


def test_long_texts_lose_no_increment_and_the_dead_stay_dead() -> None:
    """In float32, 1e8 + 1 is 1e8; `nan_to_num` by default would make a large number of -inf."""
    start = torch.tensor([1e8, -INF, 0.0], dtype=torch.float64)
    steps = torch.tensor([[1.0, 1.0, 1.0], [5.0, 700.0, INF], [-3e38, 3e38, -INF]])
    running = accumulate(start, steps)
    assert running.dtype == torch.float64
    assert running[:, -1].tolist() == [1e8 + 3, -INF, -INF]
    assert running[1].tolist() == [-INF] * 4


@pytest.mark.parametrize("name", ["systematic", "stratified", "ssp", "residual"])
@pytest.mark.parametrize("num_particles", [1, 2, 8, 64])
def test_equal_weights_keep_every_particle_once(name: str, num_particles: int) -> None:
    """For N a power of two, where 1/N is exact; the low-variance schemes then do nothing."""
    w = torch.full((num_particles,), 1.0 / num_particles, dtype=torch.float64)
    u = torch.rand(num_particles, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert SCHEMES[name](w, u).sort().values.tolist() == list(range(num_particles))


def test_who_keeps_its_size_keeps_everything() -> None:
    """Where the size changes, the mean weight of the particles that were there is banked."""
    weights = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64).log().expand(3, -1)
    present = torch.tensor([True, True, False]).expand(3, -1)
    uniforms = torch.full((3, 3), 0.9, dtype=torch.float64)
    sizes = torch.tensor([2, 1, 3])
    ancestors, after, log_evidence = resize(weights, present, sizes, uniforms, "multinomial")
    assert ancestors.tolist() == [[0, 1, 2], [1, 1, 2], [1, 1, 1]]
    assert torch.equal(after[0], weights[0])
    assert log_evidence.exp().tolist() == pytest.approx([1.0, 2.0, 2.0])
    assert (after[1:] > -INF).tolist() == [[True, False, False], [True] * 3]


# --- Laws of the resampling schemes

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


@cache
def offspring(name: str, case: str) -> torch.Tensor:
    """Offspring counts of many independent draws, ``[NUM_DRAWS, N]``."""
    weights = torch.tensor(WEIGHTS[case], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_DRAWS, len(weights))
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    ancestors = SCHEMES[name](weights.expand(shape).contiguous(), u)
    return torch.zeros(shape).scatter_add(1, ancestors, torch.ones(shape)).double()


@pytest.mark.parametrize("case", list(WEIGHTS))
@pytest.mark.parametrize("name", list(SCHEMES))
def test_expected_offspring_is_n_w_and_no_count_strays(name: str, case: str) -> None:
    """z-test of each mean at 5 standard errors: error probability 6e-7 a particle.

    Of one that is floor or ceil of N w, the mean is its whole law.
    """
    expected = len(WEIGHTS[case]) * torch.tensor(WEIGHTS[case], dtype=torch.float64)
    counts = offspring(name, case)
    # Offspring that are 0 or 1 beyond the floor vary least; give the error that floor.
    fraction = expected - expected.floor()
    variance = torch.maximum(counts.var(0), fraction * (1 - fraction))
    error = (variance / NUM_DRAWS).sqrt() + 1e-9
    assert ((counts.mean(0) - expected).abs() < 5 * error).all()
    stray = 1e-9  # N w that misses a whole number by a rounding may go either way
    if name in ("systematic", "ssp"):
        assert (counts <= (expected + stray).ceil()).all()
    if name in ("systematic", "ssp", "residual"):
        assert (counts >= (expected - stray).floor()).all()
    if name == "stratified":
        assert ((counts - expected).abs() < 2).all()
    if name == "multinomial":
        by_law = expected * (1 - expected / len(expected))
        assert float(counts.var(0).sum()) == pytest.approx(float(by_law.sum()), rel=0.08, abs=1e-6)


log_weight = st.one_of(st.floats(-50, 50), st.just(-math.inf), st.sampled_from([0.0, 1.0]))
uniform = st.one_of(
    st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, math.nextafter(1.0, 0.0)])
)


@settings(max_examples=80)
@given(st.data())
def test_any_weights_give_valid_ancestors_with_weight(data: st.DataObject) -> None:
    values = data.draw(st.lists(log_weight, min_size=1, max_size=12))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.floats(-50, 50))
    log_weights = torch.tensor([values], dtype=torch.float64)
    size = len(values)
    u = torch.tensor([data.draw(st.lists(uniform, min_size=size, max_size=size))])
    w = normalized(log_weights)
    for name, scheme in SCHEMES.items():
        ancestors = scheme(w, u.double())
        assert ancestors.shape == (1, size)
        assert (w.gather(1, ancestors) > 0).all(), name
        floor_ok = torch.bincount(ancestors[0], minlength=size) >= (size * w[0] - 1e-9).floor()
        assert floor_ok.all() or name in ("multinomial", "stratified")
