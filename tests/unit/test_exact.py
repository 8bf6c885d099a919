"""Exact multi-draft verification: the law of what a walk puts out, against p."""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from sglang_smc.smc.exact import verify
from sglang_smc.smc.proposal import sample

ALPHA = 1e-4
VOCAB = 4


def random_model(seed: int, peak: float = 1.5) -> torch.Tensor:
    """Next-token probabilities after the last two tokens, ``[V, V, V]``."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    return torch.softmax(peak * logits, -1)


def run_walks(
    p: torch.Tensor, q: torch.Tensor, *, num_chains: int, num_steps: int, size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft, verify and draw the next token; returns ``[size, K + 1]`` tokens and lengths."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    before = torch.zeros(size, num_chains, dtype=torch.long)
    last = torch.zeros_like(before)
    tokens, log_q, log_p = [], [], []
    for _ in range(num_steps):
        log_p.append(p[before, last].log())
        log_q.append(q[before, last].log())
        drawn = sample(log_q[-1], uniform(size, num_chains))
        tokens.append(drawn)
        before, last = last, drawn
    log_p.append(p[before, last].log())
    chains = torch.stack(tokens, 2)
    found = verify(
        chains,
        torch.zeros_like(chains, dtype=torch.bool),
        torch.stack(log_p, 2),
        torch.stack(log_q, 2),
        uniform(size, num_chains, num_steps),
    )
    text = chains[torch.arange(size), found.winner]  # [size, K]
    following = sample(found.next_probs.log(), uniform(size))
    text = torch.cat([text, following.unsqueeze(1)], 1)
    text[torch.arange(size), found.num_columns] = following
    return text, found.num_columns + 1


@pytest.mark.parametrize("num_chains", [1, 2, 3, 8])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_output_follows_p(num_chains: int, num_steps: int) -> None:
    """Every prefix of what a walk puts out has p's law: chi-square of the first two tokens."""
    p, q = random_model(0), random_model(1)
    text, lengths = run_walks(p, q, num_chains=num_chains, num_steps=num_steps, size=60_000, seed=5)
    first = torch.bincount(text[:, 0], minlength=VOCAB).double()
    assert chisquare(first, p[0, 0] * len(text)).pvalue > ALPHA
    two = text[lengths >= 2]
    # Given the first token, whether there is a second may depend on it, its law may not.
    for token in range(VOCAB):
        seconds = two[two[:, 0] == token][:, 1]
        counts = torch.bincount(seconds, minlength=VOCAB).double()
        assert chisquare(counts, p[0, token] * len(seconds)).pvalue > ALPHA


def test_more_chains_accept_more() -> None:
    p, q = random_model(0), random_model(1)
    accept = [
        run_walks(p, q, num_chains=n, num_steps=4, size=4000, seed=1)[1].double().mean()
        for n in (1, 2, 4, 8)
    ]
    assert all(later > earlier + 0.05 for earlier, later in itertools.pairwise(accept))


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    p = random_model(3)
    _, lengths = run_walks(p, p, num_chains=2, num_steps=4, size=2000, seed=2)
    assert (lengths == 5).all()


def test_disjoint_supports_reject_all_and_draw_from_p() -> None:
    p, q = torch.zeros(VOCAB, VOCAB, VOCAB).double(), torch.zeros(VOCAB, VOCAB, VOCAB).double()
    p[..., 0], p[..., 1], q[..., 2], q[..., 3] = 0.25, 0.75, 0.5, 0.5
    text, lengths = run_walks(p, q, num_chains=4, num_steps=3, size=8000, seed=3)
    assert (lengths == 1).all()
    counts = torch.bincount(text[:, 0], minlength=VOCAB)
    assert counts[2:].sum() == 0
    assert chisquare(counts[:2].double(), torch.tensor([2000.0, 6000.0])).pvalue > ALPHA


def test_the_walk_ends_with_an_end() -> None:
    """Nothing is accepted behind a token that ends the text, however well it would fit."""
    tokens = torch.tensor([[[2, 1, 3]]])
    ends = tokens == 1
    log_p = torch.full((1, 1, 4, VOCAB), 0.25).log()
    log_q = torch.full((1, 1, 3, VOCAB), 0.25).log()
    found = verify(tokens, ends, log_p, log_q, torch.zeros(1, 1, 3, dtype=torch.float64))
    assert found.num_columns.tolist() == [2]
