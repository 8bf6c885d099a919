"""Each loss against numbers worked out by hand, and what makes it a loss at all."""

import itertools
import math
from functools import partial

import pytest
import torch

from sglang_smc_tools.distill.losses import (
    LOSSES,
    Loss,
    chi2,
    forward_kl,
    rejection,
    rejection_of_all,
    reverse_kl,
)

P = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
Q = torch.tensor([0.25, 0.75], dtype=torch.float64).log()


def laws(rows: int, size: int, seed: int) -> torch.Tensor:
    """Log-probabilities ``[rows, size]`` float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator, dtype=torch.float64).log_softmax(-1)


def test_numbers_by_hand() -> None:
    """Red where p and q change places, or a factor is lost."""
    assert float(forward_kl(P, Q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert float(reverse_kl(P, Q)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert float(rejection(P, Q)) == pytest.approx(0.25)
    assert float(chi2(P, Q)) == pytest.approx(math.log(0.25 / 0.25 + 0.25 / 0.75))


@pytest.mark.parametrize("drafts", [2, 8])
def test_no_set_of_tokens_is_worse(drafts: int) -> None:
    """Red where tokens are sorted the other way, or by p - q."""
    p = laws(20, 5, 3)
    q = laws(20, 5, 4)
    sets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5)), dtype=torch.float64)
    worst = ((q.exp() @ sets.T) ** drafts - p.exp() @ sets.T).amax(1)
    assert torch.allclose(rejection_of_all(p, q, drafts), worst)
    assert torch.allclose(rejection_of_all(p, q, 1), rejection(p, q))


@pytest.mark.parametrize("loss", [*LOSSES.values(), partial(rejection_of_all, drafts=4)])
def test_zero_at_the_target_and_nowhere_below(loss: Loss) -> None:
    """Value and gradient, in logits: a draft that is the target's law stays so.

    Its law is exactly p here, since some losses have a kink, where rounding would choose a side.
    """
    p = laws(30, 7, 5)
    logits = p.clone().requires_grad_()
    law = logits.log_softmax(-1)
    value = loss(p, p + (law - law.detach()))
    value.sum().backward()
    assert logits.grad is not None
    assert value.abs().max() < 1e-12 and logits.grad.abs().max() < 1e-12
    other = laws(30, 7, 6).requires_grad_()
    before = loss(p, other.log_softmax(-1))
    (slope,) = torch.autograd.grad(before.sum(), other)
    after = loss(p, (other - 0.01 * slope).log_softmax(-1))
    assert before.min() >= 0
    assert (after <= before).all() and after.sum() < before.sum(), "descent leads to the target"


def test_chi2_stays_finite_where_q_misses_all() -> None:
    """Its gradient, too, is one of laws: no larger than 2 in sum."""
    p = torch.tensor([0.0, -80.0]).log_softmax(-1)
    logits = torch.tensor([-80.0, 0.0], requires_grad=True)
    value = chi2(p, logits.log_softmax(-1))
    value.backward()
    assert logits.grad is not None
    assert float(value) == pytest.approx(80.0) and float(logits.grad.abs().sum()) <= 2.0 + 1e-6
