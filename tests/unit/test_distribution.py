"""From logits to p and q: temperature, SGLang's filters, masks, and exact draws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ALL, SamplingRules, rules, sorted_law
from torch import Tensor

from sglang_smc.ops.cpu_ops import SharedRows
from sglang_smc.smc import distribution, filters
from sglang_smc.smc.distribution import TokenDistribution, sample
from sglang_smc.smc.edits import restrict
from sglang_smc.smc.filters import EXTENT, NUM_CELLS, NUM_KEYS, keep_tokens

INF = math.inf
LARGEST = math.nextafter(1.0, 0.0)
ROUNDING = 1e-6  # of a mass: within it of top-p, either side is right


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def law_of(logits: torch.Tensor, asked: SamplingRules) -> torch.Tensor:
    """Of rows ``[M, V]``, or ``[G, M, V]``, under rules ``[G]``."""
    rows = logits.view(len(asked.top_k), -1, logits.shape[-1])
    law = TokenDistribution.of(rows, asked.temperature, asked.greedy, asked[1:4])
    return law.log_probs().view_as(logits)


@pytest.mark.parametrize(
    ("asked", "num_kept"),
    [
        (rules(top_p=0.24), 1),
        (rules(top_p=0.25), 2),  # SGLang keeps the token that begins where top_p is reached
        (rules(top_p=0.5), 3),
        (rules(top_k=3), 3),
        (rules(top_k=4), 4),
        (rules(top_k=1 << 40), 4),
        (rules(min_p=1.0), 4),  # the most probable are not below themselves
        (rules(), 4),
    ],
)
def test_filters_at_their_thresholds(asked: SamplingRules, num_kept: int) -> None:
    """Four equal tokens have probability .25 exactly."""
    found = law_of(torch.zeros(1, 4), asked)
    assert (found > -INF).sum() == num_kept
    assert torch.allclose(found.exp().sum(), torch.tensor(1.0))


def test_logits_of_any_type_need_no_filter_to_become_a_law() -> None:
    logits = drawn(50, 9).bfloat16()
    logits[:, 4] = -INF
    quick = TokenDistribution(logits, torch.tensor([0.8])).log_probs()
    assert torch.equal(quick, law_of(logits, rules(temperature=0.8)))
    assert quick.dtype == torch.float32
    assert torch.allclose(quick, torch.log_softmax(logits.float() / 0.8, -1), atol=1e-6)


def test_draws_in_parts_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw keeps its own group's temperature and greediness, draws of one row as well."""
    heat = torch.tensor([0.5, 2.0, 1.0])
    greedy = torch.tensor([False, False, True])
    logits = drawn(12, 40)
    uniforms = torch.linspace(0.01, 0.99, 12).double()
    rows = torch.tensor([2, 0, 2, 2, 5, 7, 5, 4, 9, 8, 8, 11])  # of groups of four
    law = TokenDistribution(logits[rows], heat, greedy=greedy)
    once = law.sample(uniforms)
    monkeypatch.setattr(distribution, "MOST_ENTRIES", 3 * 40)
    by_rows = {"scores": logits, "rows": rows}
    for same in (law, law._replace(**by_rows), SharedRows(*law)._replace(**by_rows)):
        assert all(map(torch.equal, once, same.sample(uniforms)))
        assert torch.equal(once[1], same.score(once[0]))


@pytest.mark.parametrize("size", [6, 700])
def test_evenly_spread_uniforms_draw_each_token_by_its_probability(size: int) -> None:
    """To one draw, which the law of random ones follows from."""
    log_p = drawn(size).double().masked_fill(torch.arange(size) % 3 == 1, -INF).log_softmax(-1)
    num_draws = 4000
    uniforms = (torch.arange(num_draws).double() + 0.5) / num_draws
    row = torch.zeros(num_draws, dtype=torch.int64)
    tokens = sample(log_p.unsqueeze(0), uniforms, row)
    assert sample(log_p.unsqueeze(0), uniforms[-1:], row[:1]) == tokens[-1], "alone as in a batch"
    counts = torch.bincount(tokens, minlength=size)
    assert (counts - log_p.exp() * num_draws).abs().max() <= 1.0
    assert (tokens.diff() >= 0).all()
    assert (log_p[tokens] > -INF).all()


SPARSE = [[0.0, 0.0, 0.5, 0.5, 0.0], [0.5, 0.0, 0.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0, 0.0]]
LARGE = drawn(1, 128_256, seed=5) * 4  # exponentials of whose log-probabilities do not sum to one
LARGE[:, :300] = LARGE[:, -300:] = -INF


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.25, 0.5, LARGEST])
@pytest.mark.parametrize("log_p", [torch.tensor(SPARSE).log(), LARGE.log_softmax(-1)])
def test_sample_never_draws_a_token_of_probability_zero(log_p: Tensor, uniform: float) -> None:
    row = torch.arange(len(log_p))
    tokens = sample(log_p, torch.full((len(log_p),), uniform, dtype=torch.float64), row)
    assert (log_p[row, tokens] > -INF).all()


# --- Filters, against a sort of all probabilities


def ordered(
    logits: torch.Tensor, temperature: float, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids in the order in which filters keep tokens, their probabilities, the mass before each."""
    ids = key.sort(stable=True).indices
    probs = (logits.double() / temperature).softmax(-1)[ids]
    return ids, probs, probs.cumsum(0) - probs


asked_of = st.tuples(
    st.sampled_from([0.1, 0.6, 1.0, 3.0, 40.0]),
    st.sampled_from([ALL, 2, 7, 50, 299, 300]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.03, 0.7, 1.0]),
)


@settings(max_examples=60)
@given(asked=asked_of, forbidden=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 2**16))
def test_logits_further_apart_than_keys_are_kept_as_by_a_sort(
    asked: tuple[float, int, float, float], forbidden: float, seed: int
) -> None:
    """Exact ties among them, and as few as one of 300 tokens."""
    generator = torch.Generator().manual_seed(seed)
    temperature = asked[0]
    of_row = rules(*asked)
    places = torch.randint(300, (300,), generator=generator)
    logits = places * (3 * temperature * EXTENT / NUM_KEYS)  # equal, or further apart than keys
    banned = torch.rand(300, generator=generator) < forbidden
    banned[int(torch.randint(300, (), generator=generator))] = False
    logits = logits.masked_fill(banned, -INF)
    found = ~keep_tokens(logits.unsqueeze(0), *of_row[:4]).dropped(logits.unsqueeze(0))[0] & ~banned
    expected = sorted_law(logits, SamplingRules(*(rule[0] for rule in of_row))) > -INF
    ids, _, mass_before = ordered(logits, temperature, -logits)
    sure = ids[(mass_before - asked[2]).abs() >= ROUNDING]
    assert torch.equal(found[sure], (expected & ~banned)[sure])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("top_k", "top_p"), [(5000, 1.0), (ALL, 0.9), (3000, 0.95), (9, 0.999)])
def test_dense_rows_are_kept_by_rank_and_mass_to_a_cell(
    top_k: int, top_p: float, seed: int
) -> None:
    """20 000 float32 logits, several of a cell: of that one where the row is cut, the lowest ids.

    The number of tokens is exact, and so is the mass, but that tokens of one cell have their mean.
    """
    logits = drawn(1, 20_000, seed=seed)
    asked = rules(0.7, top_k, top_p)
    kept = keep_tokens(logits, *asked[:4])
    found = ~kept.dropped(logits)[0]
    unit = filters.unit_of(asked.temperature, asked.top_p, 20_000)
    key = filters.keys_of(logits, (logits.amax(1) * unit).floor(), unit)[0]
    ids, probs, mass_before = ordered(logits[0], 0.7, key)
    count = int(found.sum())
    width = 1 / (float(unit) * NUM_CELLS)
    assert found[ids[:count]].all(), "keys first, then ids"
    assert logits[0, found].min() > logits[0, ~found].max() - width
    assert float(kept.above - kept.lowest) == width < 3 * 0.7 * EXTENT / NUM_KEYS
    of_last = (key == key[ids[count - 1]]).sum() * probs[count - 1]
    error = float(of_last) * width / 0.7 + ROUNDING
    assert count <= top_k and mass_before[count - 1] <= top_p + error
    assert count == top_k or mass_before[count] > top_p - error


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e3, 1e30])
def test_no_temperature_is_too_low_or_too_high_for_the_order(temperature: float) -> None:
    """Top-k keeps the largest, where all have one probability, and as many where one has it all."""
    logits = drawn(3, 5000, seed=1) * 4
    found = ~keep_tokens(logits, *rules(temperature, top_k=5)[:4]).dropped(logits)
    assert (found.sum(1) == 5).all()
    assert found.gather(1, logits.argmax(1, keepdim=True)).all()
    if temperature > 1:
        assert torch.equal(found, logits >= logits.topk(5).values[:, 4:])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_law_within_a_mask_and_its_mass(temperature: float) -> None:
    logits = drawn(4, 9)
    allowed = torch.ones(4, 9, dtype=torch.bool)
    allowed[0, 2:] = False
    allowed[1, ::2] = False
    allowed[2] = False
    heat = torch.full((4,), temperature)
    left, log_mass = restrict(logits, allowed, heat)
    p = (logits / temperature).softmax(-1)
    mass = (p * allowed).sum(-1)
    assert torch.allclose(log_mass.exp(), mass, atol=1e-6)
    assert log_mass[3] == 0.0 and log_mass[2] == -INF
    law = TokenDistribution(left, heat, log_mass=log_mass)
    assert torch.allclose(law.log_probs()[:2].exp(), (p * allowed / mass.unsqueeze(1))[:2])
    assert torch.allclose(law.log_probs()[2].exp(), p[2]), "something can be drawn"
    scores = (law.score(torch.tensor([1, 1, 1, 1])) + log_mass).exp()
    assert torch.allclose(scores, torch.tensor([p[0, 1], p[1, 1], 0.0, p[3, 1]]), atol=1e-6)


def test_a_target_that_rounding_carries_to_the_total_finds_the_last_token_of_mass() -> None:
    through = torch.tensor([[0.25, 1.0, 1.0], [0.5, 0.5, 1.0]])
    assert distribution._find(through, torch.tensor([1.0, 1.0])).tolist() == [1, 2]
