"""What filters keep, against a sort of all probabilities."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sorted_law import ALL, rules, sorted_law

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.tokens.distribution import FilterKinds, SamplingRules, TokenDistribution, sample
from sglang_smc.tokens.filters import EXTENT, NUM_KEYS, KeptTokens, keep_tokens

KINDS = FilterKinds(filtered=True, greedy=True)
ROUNDING = 1e-6  # of a mass: within it of top-p, either side is right


class Ordered(NamedTuple):
    """The tokens of a row in the order in which filters keep them."""

    ids: torch.Tensor
    probs: torch.Tensor
    mass_before: torch.Tensor


def ordered(logits: torch.Tensor, temperature: float, key: torch.Tensor) -> Ordered:
    ids = key.sort(stable=True).indices
    probs = (logits.double() / temperature).softmax(-1)[ids]
    return Ordered(ids, probs, probs.cumsum(0) - probs)


def spaced(size: int, step: float, generator: torch.Generator) -> torch.Tensor:
    """Logits that are equal or lie further apart than ``step``, in any order."""
    places = torch.randint(size, (size,), generator=generator)
    return places * step * 1.5


asked_of = st.tuples(
    st.sampled_from([0.1, 0.6, 1.0, 3.0, 40.0]),
    st.sampled_from([ALL, 2, 7, 50, 299, 300]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.03, 0.7, 1.0]),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(asked=asked_of, forbidden=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 2**16))
def test_logits_further_apart_than_keys_are_kept_as_by_a_sort(
    asked: tuple[float, int, float, float], forbidden: float, seed: int
) -> None:
    """Exact ties among them, and as few as one of 300 tokens."""
    generator = torch.Generator().manual_seed(seed)
    temperature, of_row = asked[0], rules(*asked)
    logits = spaced(300, temperature * EXTENT / NUM_KEYS * 2, generator)
    banned = torch.rand(300, generator=generator) < forbidden
    banned[int(torch.randint(300, (), generator=generator))] = False
    logits = logits.masked_fill(banned, -torch.inf)
    found = ~keep_tokens(logits.unsqueeze(0), *of_row[:4]).dropped(logits.unsqueeze(0))[0] & ~banned
    expected = sorted_law(logits, SamplingRules(*(rule[0] for rule in of_row))) > -torch.inf
    row = ordered(logits, temperature, -logits)
    either = (row.mass_before - asked[2]).abs() < ROUNDING
    assert torch.equal(found[row.ids][~either], (expected & ~banned)[row.ids][~either])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("top_k", "top_p"), [(5000, 1.0), (ALL, 0.9), (3000, 0.95), (9, 0.999)])
def test_dense_logits_are_kept_by_rank_and_mass_within_a_key(
    top_k: int, top_p: float, seed: int
) -> None:
    """20 000 float32 logits, several of a key: of that one where the row is cut, the lowest ids.

    The number of tokens is exact, and so is the mass, but that tokens of one key have their mean.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 20_000, generator=generator)
    kept = keep_tokens(logits, *rules(0.7, top_k, top_p)[:4])
    found = ~kept.dropped(logits)[0]
    key = ((kept.peak - logits[0]) * kept.rate).floor()
    row = ordered(logits[0], 0.7, key)
    count = int(found.sum())
    assert found[row.ids[:count]].all(), "keys first, then ids"
    assert logits[0, found].min() > logits[0, ~found].max() - 1 / kept.rate
    of_last = (key == kept.key).sum() * row.probs[count - 1]
    error = float(of_last) / float(kept.rate) / 0.7 + ROUNDING
    assert count <= top_k and row.mass_before[count - 1] <= top_p + error
    assert count == top_k or row.mass_before[count] > top_p - error


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e3, 1e30])
def test_no_temperature_is_too_low_or_too_high_for_the_order(temperature: float) -> None:
    """Top-k keeps the largest, where all have one probability, and as many where one has it all."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 4
    found = ~keep_tokens(logits, *rules(temperature, top_k=5)[:4]).dropped(logits)
    assert (found.sum(1) == 5).all()
    likeliest = logits.argmax(1, keepdim=True)
    assert found.gather(1, likeliest).all()
    if temperature > 1:
        assert torch.equal(found, logits >= logits.topk(5).values[:, 4:])


def test_hundreds_of_equal_logits_at_the_cut_leave_those_of_the_lowest_ids() -> None:
    """As a head in bfloat16 makes them."""
    logits = (torch.randn(2, 30_000, generator=torch.Generator().manual_seed(2)) * 2).bfloat16()
    for asked in (rules(top_k=700), rules(top_p=0.8), rules(0.6, 20, 0.95)):
        found = ~keep_tokens(logits, *asked[:4]).dropped(logits)
        expected = sorted_law(logits, asked) > -torch.inf
        assert torch.equal(found, expected)
    assert (logits == logits[0, found[0]].min()).sum() > 1


OPEN = [rules(top_k=9), rules(top_k=1 << 40), rules(top_p=1.0), rules(min_p=0.0)]


@pytest.mark.parametrize("asked", OPEN, ids=str)
def test_open_filters_keep_all(asked: SamplingRules) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    assert not keep_tokens(logits, *asked[:4]).dropped(logits).any()


def test_forbidden_tokens_have_no_rank_and_are_not_drawn() -> None:
    """Even where their ids come first and the cut lies behind everything."""
    logits = torch.tensor([[-math.inf, -math.inf, 0.0, -90.0, -80.0, -100.0]])
    law = TokenDistribution.of(TORCH, logits.unsqueeze(0), rules(top_k=3), KINDS)
    found = law.log_probs(TORCH)[0]
    assert (found > -torch.inf).tolist() == [False, False, True, True, True, False]


def test_rows_without_a_law_are_not_cut_and_spoil_no_other() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4))
    logits[0, 3], logits[1, 39], logits[2] = math.nan, math.inf, -math.inf
    asked = rules(0.5, top_k=4, top_p=0.7, min_p=0.1)
    law = TokenDistribution.of(TORCH, logits.unsqueeze(0), asked, KINDS)
    found = law.log_probs(TORCH)
    assert found[:3].isnan().all()
    assert torch.allclose(found[3:], sorted_law(logits[3:], asked), atol=1e-6)


def test_groups_have_rules_of_their_own_and_draws_choose_rows() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(5))
    own = rules(0.5, top_k=3), rules(2.0, top_p=0.5), rules(top_k=1)
    law = TokenDistribution.of(
        TORCH, logits, SamplingRules(*map(torch.cat, zip(*own, strict=True))), KINDS
    )
    rows = torch.tensor([1, 1, 0, 3, 2, 2, 5, 5, 4])
    found = law.at(rows).log_probs(TORCH)
    for draw, row in enumerate(rows.tolist()):
        alone = sorted_law(logits.flatten(0, 1)[[row]], own[draw // 3])
        assert torch.allclose(found[[draw]], alone, atol=1e-6)


def test_draws_follow_the_filtered_law() -> None:
    """Token by token what inverting the sorted law's sums gives."""
    generator = torch.Generator().manual_seed(6)
    logits = spaced(64, 0.05, generator).expand(4000, -1)
    asked = rules(0.8, top_k=20, top_p=0.9)
    law = TokenDistribution.of(TORCH, logits.unsqueeze(0), asked, KINDS)
    u = torch.rand(4000, generator=generator, dtype=torch.float64)
    tokens, log_p = law.sample(TORCH, u)
    expected = sorted_law(logits, asked)
    assert torch.equal(tokens, sample(expected, u))
    assert torch.allclose(log_p, expected.gather(1, tokens.unsqueeze(1)).squeeze(1), atol=1e-5)
    assert len(tokens.unique()) > 5
    assert torch.allclose(law.score(TORCH, tokens), log_p)


def test_many_rows_are_worked_on_some_at_a_time() -> None:
    """What is kept of a row does not depend on the others."""
    logits = torch.randn(3000, 300, generator=torch.Generator().manual_seed(7))
    together = keep_tokens(logits, *rules(top_p=0.8)[:4])
    for rows in (slice(0, 1), slice(1020, 1030), slice(2999, 3000)):
        alone = keep_tokens(logits[rows], *rules(top_p=0.8)[:4])
        assert all(
            torch.equal(one, every[rows]) for one, every in zip(alone, together, strict=True)
        )
    assert isinstance(together, KeptTokens)
