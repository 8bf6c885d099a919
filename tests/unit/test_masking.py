"""What a mask leaves of a law, and what that weighs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.tokens.distribution import TokenDistribution
from sglang_smc.tokens.masking import restrict, unpack


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_bits_are_unpacked_lowest_first(bits: list[bool]) -> None:
    words = [0] * -(-len(bits) // 32)
    for place, bit in enumerate(bits):
        words[place // 32] |= bit << place % 32
    signed = [word - (word >> 31 << 32) for word in words]
    packed = torch.tensor([signed, [-1] * len(words)], dtype=torch.int32)
    assert unpack(packed, len(bits)).tolist() == [bits, [True] * len(bits)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_law_within_a_mask_and_its_mass(temperature: float) -> None:
    """Together they are p of the tokens that are left, which is what a draft weighs."""
    generator = torch.Generator().manual_seed(0)
    logits, allowed = torch.randn(4, 9, generator=generator), torch.ones(4, 9, dtype=torch.bool)
    allowed[0, 2:], allowed[1, ::2], allowed[2] = False, False, False
    heat = torch.full((4,), temperature)
    left, log_mass = restrict(logits, allowed, heat)
    p = (logits / temperature).softmax(-1)
    mass = (p * allowed).sum(-1)
    assert torch.allclose(log_mass.exp(), mass, atol=1e-6)
    assert log_mass[3] == 0.0 and log_mass[2] == -torch.inf
    law = TokenDistribution(left, heat, log_mass=log_mass)
    assert torch.allclose(law.log_probs(TORCH)[:2].exp(), (p * allowed / mass.unsqueeze(1))[:2])
    assert torch.allclose(law.log_probs(TORCH)[2].exp(), p[2]), "something can be drawn"
    scores = law.score(TORCH, torch.tensor([1, 1, 1, 1])).exp()
    assert torch.allclose(scores, torch.tensor([p[0, 1], p[1, 1], 0.0, p[3, 1]]), atol=1e-6)


def test_masses_follow_the_rows_that_draws_use() -> None:
    law = TokenDistribution(
        torch.zeros(3, 2), torch.ones(1), log_mass=torch.tensor([-1.0, -2.0, -3.0])
    )
    rows = torch.tensor([2, 0])
    assert law._replace(rows=rows).log_masses().tolist() == [-3.0, -1.0]


def test_a_power_raises_the_mass_too() -> None:
    """(m p)^2 over its sum, and the sum: 0.04 + 0.09."""
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log()
    left, log_mass = restrict(logits, torch.tensor([[True, True, False]]), torch.ones(1))
    raised, log_sum = TokenDistribution(left, torch.ones(1), log_mass=log_mass).to_power(
        TORCH, torch.tensor([2.0])
    )
    assert log_sum.exp().item() == pytest.approx(0.13)
    assert raised.log_probs(TORCH).exp()[0].tolist() == pytest.approx([4 / 13, 9 / 13, 0.0])
