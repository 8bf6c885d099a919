"""Rejection control: proper weights for every c, and its two ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_smc.smc.rejection_control import Split, control, split

VOCAB = 5
CONSTANTS = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]


def random_laws(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a p and a q, ``[*shape, V]`` float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, *shape, VOCAB, generator=generator, dtype=torch.float64)
    log_p, log_q = torch.log_softmax(1.5 * logits, -1)
    return log_p, log_q


def weights(parts: Split, log_p: torch.Tensor) -> torch.Tensor:
    """Weight of each token ``[..., V]``; 0 where the proposal is 0."""
    proposal = parts.kept + parts.replaced
    return torch.where(proposal > 0, log_p.exp() / proposal, 0.0)


def mean_weight(parts: Split, log_p: torch.Tensor) -> torch.Tensor:
    return ((parts.kept + parts.replaced) * weights(parts, log_p)).sum(-1)


def variance(parts: Split, log_p: torch.Tensor) -> torch.Tensor:
    spread = (weights(parts, log_p) - mean_weight(parts, log_p).unsqueeze(-1)) ** 2
    return ((parts.kept + parts.replaced) * spread).sum(-1)


@pytest.mark.parametrize("c", CONSTANTS)
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_weighted_proposal_is_p(c: float, scale: float) -> None:
    """sum over x of proposal(x) weight(x) f(x) = sum p f for every f, that is, token by token."""
    log_p, log_q = random_laws(0, 50)
    log_p = log_p + torch.tensor(scale).log()
    parts = split(log_p, log_q, c)
    proposal = parts.kept + parts.replaced
    assert torch.allclose(proposal.sum(-1), torch.ones(50).double())
    assert torch.allclose(proposal * weights(parts, log_p), log_p.exp())
    assert torch.allclose(mean_weight(parts, log_p), torch.tensor(scale).double())


def test_c_of_one_is_speculative_sampling() -> None:
    log_p, log_q = random_laws(1, 200)
    log_p[:, 0], log_q[:, 1] = -torch.inf, -torch.inf
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    parts = split(log_p, log_q, 1.0)
    assert torch.allclose(parts.kept + parts.replaced, log_p.exp(), atol=1e-15)
    tokens = torch.multinomial(log_q.exp(), 1, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(2, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    done = control(tokens[:, 0], log_p, log_q, 1.0, *uniforms)
    assert done.log_weights.abs().max() < 1e-12
    assert 0 < done.kept.sum() < 200


def test_c_of_zero_keeps_all_and_weighs() -> None:
    log_p, log_q = random_laws(2, 100)
    log_p[:, 3] = -torch.inf
    tokens = torch.arange(100) % VOCAB
    uniforms = torch.full((100,), 1 - 2.0**-53, dtype=torch.float64)
    done = control(tokens, log_p, log_q, 0.0, uniforms, uniforms)
    assert done.kept.all()
    assert (done.tokens == tokens).all()
    ratio = (log_p - log_q).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert torch.allclose(done.log_weights, ratio)
    assert (done.log_weights[tokens == 3] == -torch.inf).all()


def test_variance_falls_with_c() -> None:
    log_p, log_q = random_laws(3, 500)
    spread = torch.stack([variance(split(log_p, log_q, c), log_p) for c in CONSTANTS])
    assert (spread.diff(dim=0) <= 1e-12).all()
    assert (spread[-1] < 1e-24).all()


@pytest.mark.parametrize("c", [0.0, 0.4, 1.0])
def test_drawn_tokens_follow_the_proposal(c: float) -> None:
    size = 40_000
    log_p, log_q = random_laws(4)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.multinomial(log_q.exp(), size, replacement=True, generator=generator)
    uniforms = torch.rand(2, size, generator=generator, dtype=torch.float64)
    p, q = log_p.expand(size, -1), log_q.expand(size, -1)
    done = control(tokens, p, q, torch.full((size,), c), uniforms[0], uniforms[1])
    parts = split(log_p, log_q, c)
    proposal = parts.kept + parts.replaced
    counts = torch.bincount(done.tokens, minlength=VOCAB).double()
    assert chisquare(counts, proposal * size).pvalue > 1e-4
    assert torch.allclose(done.log_weights.exp(), weights(parts, log_p)[done.tokens])
    assert float(done.kept.double().mean()) == pytest.approx(float(parts.kept.sum()), abs=0.02)


def test_disjoint_supports() -> None:
    """With c = 1 all drafts are replaced by draws from p; with c = 0 all die."""
    log_p = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).log()
    log_q = torch.tensor([[0.0, 0.0, 0.5, 0.5]], dtype=torch.float64).log()
    token, uniform = torch.tensor([2]), torch.tensor([0.7], dtype=torch.float64)
    replaced = control(token, log_p, log_q, 1.0, uniform, uniform)
    assert (replaced.tokens.item(), replaced.kept.item()) == (1, False)
    assert replaced.log_weights.item() == 0
    dead = control(token, log_p, log_q, 0.0, uniform, uniform)
    assert (dead.tokens.item(), dead.kept.item()) == (2, True)
    assert dead.log_weights.item() == -torch.inf


def test_equal_laws_leave_nothing_to_replace() -> None:
    log_p, _ = random_laws(6, 20)
    for c in CONSTANTS:
        parts = split(log_p, log_p, c)
        assert torch.allclose(parts.kept, log_p.exp())
        assert parts.replaced.abs().max() < 1e-15


LAW = st.lists(st.sampled_from([0.0, 1e-12, 0.01, 0.3, 1.0, 7.0]), min_size=3, max_size=3)


@settings(max_examples=300, deadline=None)
@given(p=LAW, q=LAW.filter(any), c=st.floats(0, 1), uniforms=st.tuples(*[st.floats(0, 0.999)] * 2))
def test_any_laws(p: list[float], q: list[float], c: float, uniforms: tuple[float, float]) -> None:
    """Any masses, zeros among them: a proposal that sums to 1, no NaN, p where q reaches."""
    target, draft = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    draft = draft / draft.sum()
    parts = split(target.log(), draft.log(), c)
    proposal = parts.kept + parts.replaced
    assert float(proposal.sum()) == pytest.approx(1.0)
    assert (parts.kept >= 0).all()
    assert (parts.replaced >= 0).all()
    assert (parts.kept <= draft * (1 + 1e-12)).all()
    weighted = proposal * weights(parts, target.log())
    assert torch.allclose(weighted[draft > 0], target[draft > 0])
    token = int(draft.argmax())
    numbers = [torch.tensor(uniform, dtype=torch.float64) for uniform in uniforms]
    done = control(torch.tensor(token), target.log(), draft.log(), c, *numbers)
    assert proposal[done.tokens] > 0
    assert not done.log_weights.isnan()
