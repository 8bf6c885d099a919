"""The draft's law mixed with n-gram matches: by hand, and at its edges."""

import math

import pytest
import torch

from sglang_smc.tokens.mixture import likeliest, mix

Q = [0.5, 0.25, 0.125, 0.125]


def mixed(
    q: list[float], tokens: list[int], weight: float, proposed: list[bool] | None = None
) -> torch.Tensor:
    law = mix(
        torch.tensor([q]).log(),
        torch.tensor([tokens]),
        torch.tensor([[True] * len(tokens) if proposed is None else proposed]),
        torch.tensor([weight]),
    )
    return law.exp()[0]


@pytest.mark.parametrize(
    ("tokens", "weight", "expected"),
    [
        ([1], 0.5, [0.25, 0.625, 0.0625, 0.0625]),
        ([3, 0], 0.5, [0.5, 0.125, 0.0625, 0.3125]),
        ([2], 1.0, [0.0, 0.0, 1.0, 0.0]),
        ([2, 3], 0.0, Q),
    ],
)
def test_a_mixture_by_hand(tokens: list[int], weight: float, expected: list[float]) -> None:
    """Red where the share is not divided among the tokens, or the rest not scaled down."""
    assert mixed(Q, tokens, weight).tolist() == pytest.approx(expected)


def test_a_token_that_the_draft_never_says_gets_its_share() -> None:
    assert mixed([0.5, 0.5, 0.0, 0.0], [2], 0.2).tolist() == pytest.approx([0.4, 0.4, 0.2, 0.0])


def test_what_is_not_proposed_gets_nothing_even_under_the_same_id() -> None:
    """Red where places that hold no token are written back over ones that do."""
    found = mixed(Q, [0, 1, 0, 1], 0.5, [False, True, False, False])
    assert found.tolist() == pytest.approx([0.25, 0.625, 0.0625, 0.0625])


def test_rows_that_propose_nothing_stay_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    log_q = torch.randn(3, 7, generator=generator).log_softmax(-1)
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    assert torch.equal(mix(log_q, tokens, nothing, torch.tensor([1.0, 0.5, 0.0])), log_q)
    all_of = ~nothing & torch.tensor([True, False])
    assert torch.equal(mix(log_q, tokens, all_of, torch.zeros(3)), log_q)


def test_a_row_that_is_no_law_stays_one_that_is_seen() -> None:
    """Red where a NaN of the draft would become a probability, and the fault go unseen."""
    log_q = torch.full((1, 3), math.nan)
    found = mix(log_q, torch.tensor([[1]]), torch.tensor([[True]]), torch.tensor([0.5]))
    assert found.isnan().all()
    assert likeliest(found).isnan().all()


def test_each_row_has_a_weight_of_its_own_and_all_are_laws() -> None:
    generator = torch.Generator().manual_seed(1)
    log_q = torch.randn(50, 30, generator=generator).log_softmax(-1)
    tokens = torch.stack([torch.randperm(30, generator=generator)[:8] for _ in range(50)])
    proposed = torch.rand(50, 8, generator=generator) < 0.5
    weights = torch.rand(50, generator=generator)
    found = mix(log_q, tokens, proposed, weights)
    assert torch.allclose(found.exp().sum(1), torch.ones(50), atol=1e-5)
    for row in range(50):
        chosen = tokens[row][proposed[row]]
        expected = log_q[row].exp()
        if len(chosen):
            expected = expected * (1 - weights[row])
            expected[chosen] += weights[row] / len(chosen)
        assert torch.allclose(found[row].exp(), expected, atol=1e-6)


def test_the_likeliest_token_takes_all_and_of_equals_the_first() -> None:
    found = likeliest(torch.tensor([[0.25, 0.5, 0.25], [0.4, 0.2, 0.4]]).log())
    assert found.tolist() == [[-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]
