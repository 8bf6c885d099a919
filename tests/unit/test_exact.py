"""Exact multi-draft verification: the law of what a walk puts out, against p."""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from sglang_smc.smc.distribution import sample
from sglang_smc.smc.exact import _OFFSETS, _select, _selection_rule, verify

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
    """What a walk puts out, continued from p where it is short, has p's law: two tokens."""
    p, q, size = random_model(0), random_model(1), 10_000
    text, lengths = run_walks(p, q, num_chains=num_chains, num_steps=num_steps, size=size, seed=5)
    generator = torch.Generator().manual_seed(6)
    uniforms = torch.rand(size, generator=generator, dtype=torch.float64)
    second = torch.where(lengths >= 2, text[:, 1], sample(p[0, text[:, 0]].log(), uniforms))
    counts = torch.bincount(VOCAB * text[:, 0] + second, minlength=VOCAB**2).double()
    law = (p[0, 0].unsqueeze(1) * p[0]).flatten()
    assert chisquare(counts, law * size).pvalue > ALPHA


def one_chain_block(
    p: torch.Tensor, q: torch.Tensor, tokens: list[int], uniforms: list[float]
) -> int:
    """Sun et al.'s algorithm 2 for laws ``[K + 1, V]`` and ``[K, V]``: how many are accepted."""
    chance, accepted = 1.0, 0
    for step, token in enumerate(tokens):
        chance = min(1.0, chance * float(p[step, token] / q[step, token]))
        stop = chance
        if step + 1 < len(tokens):
            mass = float((chance * p[step + 1] - q[step + 1]).clamp_min(0).sum())
            stop = mass / (mass + 1 - chance) if chance < 1 else 1.0
        if uniforms[step] < stop:
            accepted = step + 1
    return accepted


def test_one_chain_is_block_verification() -> None:
    generator = torch.Generator().manual_seed(0)
    size, num_steps = 300, 4
    logits = torch.randn(2, size, num_steps + 1, VOCAB, generator=generator).double()
    p, q = torch.softmax(logits, -1)
    tokens = torch.randint(VOCAB, (size, num_steps), generator=generator)
    uniforms = torch.rand(size, num_steps, generator=generator, dtype=torch.float64)
    found = verify(
        tokens.unsqueeze(1),
        torch.zeros(size, 1, num_steps, dtype=torch.bool),
        p.unsqueeze(1).log(),
        q[:, :-1].unsqueeze(1).log(),
        uniforms.unsqueeze(1),
    )
    wanted = [
        one_chain_block(p[row], q[row], tokens[row].tolist(), uniforms[row].tolist())
        for row in range(size)
    ]
    assert found.num_columns.tolist() == wanted


def random_targets(seed: int, size: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets ``[size, V]`` of masses up to 1, half of them 1, and drafts of mass 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, size, num_tokens, generator=generator, dtype=torch.float64)
    p, q = torch.softmax(2 * logits, -1)
    q[:, 0] = 0  # a token that is never drafted
    mass = torch.rand(size, generator=generator, dtype=torch.float64)
    mass[::2] = 1
    return mass.unsqueeze(1) * p, q / q.sum(1, keepdim=True)


@pytest.mark.parametrize("num_siblings", [1, 2, 3])
def test_the_law_of_the_selection(num_siblings: int) -> None:
    """Over all draws and all places where tiers may begin, against the law that is claimed."""
    size, num_tokens = 20, 5
    target, q = random_targets(1, size, num_tokens)
    rule = _selection_rule(target, q, torch.full((size,), num_siblings), 4)
    law = torch.zeros_like(q)
    follows = torch.tensor([[True] * num_siblings + [False]]).expand(size, -1)
    rows = torch.arange(size)
    for draws in itertools.product(range(num_tokens), repeat=num_siblings):
        drawn = torch.tensor([*draws, 0])
        for place in range(_OFFSETS):
            uniforms = torch.full((size,), (place + 0.5) / _OFFSETS, dtype=torch.float64)
            chosen = _select(rule.levels[:, drawn], follows, uniforms)
            law[rows, drawn[chosen]] += q[:, list(draws)].prod(1) / _OFFSETS
    assert torch.allclose(rule.law, law)


@pytest.mark.parametrize("num_siblings", [1, 2, 4, 8])
def test_the_selection_is_near_the_best(num_siblings: int) -> None:
    """Against the bound of optimal transport, and against SpecInfer's one after another."""
    target, q = random_targets(2, 300, 64)
    rule = _selection_rule(target, q, torch.full((300,), num_siblings), 8)
    assert torch.allclose(rule.law.sum(1), torch.ones(300).double())
    accepted = torch.minimum(target, rule.law).sum(1)
    order = (target / q).argsort(1)
    forced, taken = q.gather(1, order).cumsum(1) ** num_siblings, target.gather(1, order).cumsum(1)
    best = 1 - (forced - taken).amax(1).clamp_min(0)
    assert (accepted <= best + 1e-9).all()
    assert (best - accepted).mean() < 0.01
    left, rejected = target, torch.ones(300).double()
    for _ in range(num_siblings):
        taken_now = torch.minimum(left, q).sum(1)
        left = (left - q).clamp_min(0) / (1 - taken_now).unsqueeze(1)
        rejected = rejected * (1 - taken_now)
    gain = (accepted - (1 - rejected)).mean()
    assert gain > 0.005 if num_siblings > 1 else gain.abs() < 1e-9


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


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a law that is all on one token."""
    return torch.nn.functional.one_hot(tokens, VOCAB).float().log()


def test_greedy_accepts_the_longest_agreeing_prefix() -> None:
    """p and q all on one token, as at temperature 0: no number matters."""
    drafted = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 2, 3]])
    wanted = torch.tensor([[1, 2, 3, 0], [1, 2, 0, 1], [1, 0, 3, 1], [1, 2, 3, 1]])
    log_p = one_hot(wanted).unsqueeze(1).expand(-1, 2, -1, -1)
    tokens = drafted.unsqueeze(1).expand(-1, 2, -1)
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        uniforms = torch.full(tokens.shape, uniform, dtype=torch.float64)
        found = verify(tokens, tokens < 0, log_p, one_hot(tokens), uniforms)
        assert found.num_columns.tolist() == [3, 2, 1, 0]
        assert found.next_probs.argmax(1).tolist() == [0, 0, 0, 1]
        assert (found.next_probs.amax(1) == 1).all()


def test_padding_does_not_matter() -> None:
    """Columns and chains that a group does not have may hold anything."""
    generator = torch.Generator().manual_seed(0)
    size, max_chains, max_steps = 40, 4, 5
    shape = (size, max_chains, max_steps)
    log_p, log_q = torch.randn(2, *shape[:2], max_steps + 1, VOCAB, generator=generator)
    # One column's laws are the same for all chains, so any may stand for its siblings.
    log_p, log_q = (
        laws[:, :1].log_softmax(-1).expand(-1, max_chains, -1, -1).clone()
        for laws in (log_p, log_q[:, :, :-1])
    )
    tokens = torch.randint(VOCAB, shape, generator=generator)
    ends = torch.rand(shape, generator=generator) < 0.05
    ends = ends[:, :1].expand(shape).clone()
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
    num_chains, num_steps = 1 + torch.arange(size) % max_chains, 1 + torch.arange(size) % max_steps
    arguments = [tokens, ends, log_p, log_q, uniforms]
    padded = [argument.clone() for argument in arguments]
    fills = (10**9, True, torch.nan, torch.nan, torch.nan)
    for row, (n, k) in enumerate(zip(num_chains.tolist(), num_steps.tolist(), strict=True)):
        for argument, fill in zip(padded, fills, strict=True):
            argument[row, n:] = fill
            argument[row, :, k + 1 if argument is padded[2] else k :] = fill
    found = verify(*padded, num_steps=num_steps, num_chains=num_chains)
    for row, (n, k) in enumerate(zip(num_chains.tolist(), num_steps.tolist(), strict=True)):
        own = [argument[row : row + 1, :n, :k] for argument in arguments]
        own[2] = log_p[row : row + 1, :n, : k + 1]
        alone = verify(*own)
        assert alone.num_columns == found.num_columns[row]
        assert alone.winner == found.winner[row]
        assert torch.allclose(alone.next_probs[0], found.next_probs[row], rtol=1e-12)
    assert (found.num_columns == num_steps).any()


def test_the_bonus_comes_behind_the_last_own_column() -> None:
    p = random_model(3)
    tokens = torch.zeros(2, 1, 3, dtype=torch.long)
    log_p = p[0, :4].log().expand(2, 1, -1, -1)
    found = verify(
        tokens,
        tokens > 0,
        log_p,
        log_p[:, :, :3],
        torch.zeros(2, 1, 3, dtype=torch.float64),
        num_steps=torch.tensor([1, 3]),
    )
    assert found.num_columns.tolist() == [1, 3]
    assert torch.allclose(found.next_probs, p[0, [1, 3]])
