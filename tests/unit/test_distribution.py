"""From logits to p and q: SGLang's filter rules in numpy, and exact draws at the boundaries."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from sorted_law import rules, sorted_law

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.tokens.distribution import (
    FilterKinds,
    SamplingRules,
    TokenDistribution,
    log_probs,
    sample,
    sample_and_score,
    score_tokens,
    token_log_probs,
)

LARGEST = math.nextafter(1.0, 0.0)


def law_of(logits: torch.Tensor, asked: SamplingRules) -> torch.Tensor:
    """Log-probabilities ``[M, V]``, or ``[G, M, V]``, under rules ``[G]``."""
    kinds, rows = (
        FilterKinds(True, True),
        logits.view(len(asked.top_k), -1, logits.shape[-1]),
    )
    return TokenDistribution.of(TORCH, rows, asked, kinds).log_probs(TORCH).view_as(logits)


def sglang_probs(logits: np.ndarray, asked: SamplingRules) -> np.ndarray:
    """The weights that `top_k_top_p_min_p_sampling_from_probs_torch` draws from, normalised."""
    temperature, top_k, top_p, min_p, _ = (float(rule) for rule in asked)
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    kept = ranked.copy()
    kept[np.arange(len(kept)) >= top_k] = 0.0
    if top_p < 1.0:  # else rounding alone could cut
        kept[(np.cumsum(ranked) - ranked) > top_p] = 0.0
    kept[kept < kept[0] * min_p] = 0.0
    result = np.zeros_like(kept)
    result[order] = kept
    return result / result.sum()


FILTERS = [
    rules(),
    rules(top_k=1),
    rules(top_k=3),
    rules(top_p=0.8),
    rules(top_p=1e-6),
    rules(min_p=0.2),
    rules(min_p=1.0),
    rules(temperature=0.3),
    rules(temperature=2.5, top_k=5, top_p=0.7, min_p=0.1),
    rules(temperature=1.5, top_k=2, top_p=0.95),
    rules(temperature=0.7, top_p=0.9, min_p=0.3),
]


@pytest.mark.parametrize(
    "asked", FILTERS, ids=lambda asked: "-".join(f"{float(x):g}" for x in asked)
)
def test_filters_are_those_of_sglangs_sampler(asked: SamplingRules) -> None:
    logits = torch.randn(200, 12, generator=torch.Generator().manual_seed(0)) * 2
    found = law_of(logits, asked).exp().numpy()
    expected = np.stack([sglang_probs(row, asked) for row in logits.numpy()])
    assert np.array_equal(found > 0, expected > 0), "another set of tokens is kept"
    assert np.allclose(found, expected, atol=1e-6)
    assert np.allclose(sorted_law(logits, asked).exp().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "num_kept"),
    [
        (rules(top_p=0.24), 1),
        (rules(top_p=0.25), 2),  # SGLang keeps the token that begins where top_p is reached
        (rules(top_p=0.5), 3),
        (rules(top_k=3), 3),
        (rules(top_k=4), 4),
        (rules(min_p=1.0), 4),  # the most probable are not below themselves
    ],
)
def test_filters_at_their_thresholds(asked: SamplingRules, num_kept: int) -> None:
    """Four equal tokens have probability .25 exactly."""
    found = law_of(torch.zeros(1, 4), asked)
    assert (found > -torch.inf).sum() == num_kept
    assert torch.allclose(found.exp().sum(), torch.tensor(1.0))


def test_top_k_one_is_argmax_and_the_first_of_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 1e-3]])
    assert torch.equal(logits.argmax(-1), torch.tensor([1, 0, 3])), "precondition"
    found = law_of(logits, rules(top_k=1))
    assert found.argmax(-1).tolist() == [1, 0, 3]
    assert found.max(-1).values.tolist() == [0.0, 0.0, 0.0], "log-probability exactly 0"
    assert (found > -torch.inf).sum() == 3


def test_the_unfiltered_way_equals_the_filtered_one_with_open_filters() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    logits[:, 4] = -torch.inf
    quick = log_probs(logits, torch.tensor([0.8]))
    assert torch.equal(quick, law_of(logits, rules(temperature=0.8)))


@pytest.mark.parametrize("asked", FILTERS, ids=str)
def test_forbidden_tokens_stay_forbidden_and_the_rest_is_normalised(asked: SamplingRules) -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(2))
    logits[:, ::2] = -torch.inf
    found = law_of(logits, asked)
    assert (found[:, ::2] == -torch.inf).all()
    assert torch.allclose(found.exp().sum(-1), torch.ones(50), atol=1e-6)
    assert not found.isnan().any()


def test_each_row_has_its_own_rules() -> None:
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(3))
    own = rules(0.5, top_k=2), rules(2.0, top_p=0.7, min_p=0.1)
    together = law_of(logits, SamplingRules(*map(torch.cat, zip(*own, strict=True))))
    for group in range(2):
        assert torch.equal(together[group], law_of(logits[group], own[group]))


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    found = log_probs(logits, torch.tensor([3.0]))
    assert found.dtype == torch.float32
    assert torch.allclose(found, torch.log_softmax(logits.float() / 3, -1), atol=1e-6)


def test_sample_follows_the_law() -> None:
    """Chi-square, error probability 1e-4."""
    probs = torch.tensor([0.05, 0.0, 0.4, 0.25, 0.0, 0.3], dtype=torch.float64)
    size = 50_000
    u = torch.rand(size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    counts = torch.bincount(sample(probs.log().expand(size, 6), u), minlength=6)
    assert counts[1] == counts[4] == 0
    alive = probs > 0
    assert chisquare(counts[alive], probs[alive] / probs[alive].sum() * size).pvalue > 1e-4


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.25, 0.5, LARGEST])
def test_sample_never_draws_a_token_of_probability_zero(uniform: float) -> None:
    """Zeros at the front, at the end, in the middle, and everywhere but one place."""
    probs = torch.tensor(
        [
            [0.0, 0.0, 0.5, 0.5, 0.0],
            [0.5, 0.0, 0.0, 0.0, 0.5],
            [0.0, 0.0, 0.0, 1.0, 0.0],
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 1.0],
        ]
    )
    tokens = sample(probs.log(), torch.full((5,), uniform, dtype=torch.float64))
    assert (probs.gather(1, tokens.unsqueeze(1)) > 0).all()


def test_sample_at_the_borders_of_the_tokens() -> None:
    log_p = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).log().expand(6, 3)
    u = [0.0, 0.25 - 1e-9, 0.25 + 1e-9, 0.5 - 1e-9, 0.5 + 1e-9, LARGEST]
    tokens = sample(log_p, torch.tensor(u, dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_sample_from_a_large_vocabulary_stays_inside_it(uniform: float) -> None:
    """128k float32 log-probabilities whose exponentials do not sum to one."""
    logits = torch.randn(2, 128_256, generator=torch.Generator().manual_seed(5)) * 4
    logits[:, -300:] = -torch.inf  # padding of the vocabulary
    logits[:, :300] = -torch.inf
    log_p = log_probs(logits, torch.ones(1))
    tokens = sample(log_p, torch.full((2,), uniform, dtype=torch.float64))
    assert ((tokens >= 300) & (tokens < 128_256 - 300)).all()
    assert (token_log_probs(log_p, tokens) > -torch.inf).all()


def test_sample_from_a_large_vocabulary_follows_the_law() -> None:
    """Tokens pooled by 16 bands of the vocabulary; chi-square, error probability 1e-4."""
    logits = torch.randn(128_000, generator=torch.Generator().manual_seed(6))
    log_p = torch.log_softmax(logits, -1).expand(160, -1)
    u = torch.rand(160, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found = torch.bincount(sample(log_p, u) // 8000, minlength=16)
    expected = log_p[0].double().exp().view(16, 8000).sum(1)
    assert chisquare(found, expected / expected.sum() * 160).pvalue > 1e-4


def test_the_draws_of_a_uniform_do_not_depend_on_the_batch() -> None:
    log_p = torch.log_softmax(torch.randn(7, 50, generator=torch.Generator().manual_seed(8)), -1)
    u = torch.rand(7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert sample(log_p, u).tolist() == [int(sample(log_p[i], u[i])) for i in range(7)]


def test_token_log_probs_picks_the_token_of_each_row() -> None:
    log_p = torch.arange(24.0).view(2, 3, 4)
    tokens = torch.tensor([[0, 3, 1], [2, 2, 0]])
    assert token_log_probs(log_p, tokens).tolist() == [[0, 7, 9], [14, 18, 20]]


def test_draws_without_filters_choose_their_rows_and_score_what_they_drew() -> None:
    """Temperatures and uniforms belong to the draws, not to the rows they come from."""
    logits = torch.tensor([[1.0, 2.0, 4.0], [3.0, -math.inf, 0.0]])
    rows, temperature = torch.tensor([1, 0, 1]), torch.tensor([2.0, 0.5, 1.0])
    noise = torch.tensor([LARGEST, 0.0, 0.5], dtype=torch.float64)
    tokens, scores = sample_and_score(logits, temperature, noise, rows)
    assert tokens.tolist() == [2, 0, 0]
    expected = torch.log_softmax(
        torch.stack([logits[1] / 2, logits[0] * 2, logits[1]]), dim=1
    ).gather(1, tokens.unsqueeze(1))
    assert torch.allclose(scores, expected.squeeze(1))
    assert torch.equal(score_tokens(logits, temperature, tokens, rows), scores)
    every = log_probs(logits, torch.tensor([0.5]))
    given = torch.tensor([2, 1])
    assert torch.equal(
        score_tokens(logits, torch.full((2,), 0.5), given), token_log_probs(every, given)
    )
