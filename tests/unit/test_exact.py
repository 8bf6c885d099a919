"""Exact multi-draft verification: the distribution of what a walk puts out, against p."""

import itertools

import pytest
import torch
from exact_tables import verify
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_smc.smc import exact
from sglang_smc.smc.selection import OFFSETS
from sglang_smc.tokens.distribution import sample

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


def banned(model: torch.Tensor, *tokens: int) -> torch.Tensor:
    model = model.clone()
    model[..., list(tokens)] = 0
    return model / model.sum(-1, keepdim=True)


PAIRS = {
    "unlike": (random_model(0), random_model(1)),
    "alike, with tokens that one of them lacks": (
        banned(random_model(2, 0.7), 1),
        banned(random_model(2, 1.0), 3),
    ),
    "with nothing in common": (banned(random_model(3), 2, 3), banned(random_model(4), 0, 1)),
}


@pytest.mark.parametrize(
    ("pair", "num_chains", "num_steps"),
    [
        ("unlike", 1, 1),
        *((pair, 3, 3) for pair in PAIRS),
        ("unlike", 8, 3),
    ],
)
def test_output_follows_p(pair: str, num_chains: int, num_steps: int) -> None:
    """What a walk puts out, continued from p where it is short, has p's law: three tokens."""
    (p, q), size = PAIRS[pair], 6000
    text, lengths = run_walks(p, q, num_chains=num_chains, num_steps=num_steps, size=size, seed=5)
    uniforms = torch.rand(2, size, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    tokens = [text[:, 0]]
    for place in (1, 2):
        before = tokens[-2] if place > 1 else torch.zeros_like(tokens[0])
        own = sample(p[before, tokens[-1]].log(), uniforms[place - 1])
        given = text[:, min(place, num_steps)]
        tokens.append(torch.where(lengths > place, given, own))
    expected = (p[0, 0].view(-1, 1, 1) * p[0].unsqueeze(2) * p).flatten() * size
    cells = (tokens[0] * VOCAB + tokens[1]) * VOCAB + tokens[2]
    counts = torch.bincount(cells, minlength=VOCAB**3).double()
    assert not counts[expected == 0].any()
    common = expected > 5
    merged = torch.where(common, torch.arange(VOCAB**3), int(common.long().argmax()))
    observed, wanted = (
        torch.zeros_like(of).index_add(0, merged, of)[common] for of in (counts, expected)
    )
    assert chisquare(observed, wanted).pvalue > ALPHA
    if pair == "with nothing in common":
        assert (lengths == 1).all()


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


def expected_output(
    p: torch.Tensor, q: torch.Tensor, chance: float, num_siblings: int
) -> torch.Tensor:
    """What one column puts out, ``[V]``, over all draws and all places where tiers may begin.

    The chance that a token is selected and accepted, and what is left of p, which the path's
    chance bounds: accepted and left are exactly that much of p.
    """
    draws = torch.cartesian_prod(*[torch.arange(VOCAB)] * num_siblings).view(-1, num_siblings)
    tokens = draws.repeat_interleave(OFFSETS, 0).unsqueeze(2)  # [G, N, 1]
    size = len(tokens)
    place = (torch.arange(OFFSETS).double() + 0.5) / OFFSETS
    uniforms = torch.zeros(size, num_siblings, 1, dtype=torch.float64)
    if num_siblings > 1:
        uniforms[:, 1, 0] = place.repeat(len(draws))
    one = torch.ones(size, dtype=torch.int64)
    chains = exact.Chains(tokens, torch.zeros_like(tokens).bool(), uniforms, one)
    walk = exact.begin_walk(chains, num_siblings * one, VOCAB)
    walk = walk._replace(chance=torch.full((size,), chance, dtype=torch.float64))
    log_p, log_q = (law.log().expand(size, -1) for law in (p, q))
    found = exact.walk_on(walk, chains, log_p, log_q, 0)
    # With coins of 0 all is accepted that can be: then its chance is in `chance`.
    token = tokens[torch.arange(size), found.found.winner, 0]
    accepted = torch.where(found.found.num_columns == 1, found.chance, 0.0)
    weight = q[tokens[:, :, 0]].prod(1) / OFFSETS
    put_out = torch.zeros(VOCAB, dtype=torch.float64).index_add(0, token, weight * accepted)
    return put_out + found.found.residuals[0]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    num_siblings=st.integers(1, 3),
    chance=st.sampled_from([1.0, 0.9, 0.3, 1e-3]),
    num_bins=st.sampled_from([None, 1, 2, 128]),
    seed=st.integers(0, 2**16),
)
def test_a_column_is_exact_with_any_bins(
    num_siblings: int, chance: float, num_bins: int | None, seed: int
) -> None:
    """To 1e-9, in double precision: bins decide how much is accepted, never the law."""
    p, q = random_model(seed)[0, 0], random_model(seed + 1)[0, 0]
    q[seed % VOCAB] = 0  # never drafted
    q = q / q.sum()
    generator = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        if num_bins is not None:
            any_bins = torch.randint(num_bins, (VOCAB,), generator=generator)
            patch.setattr(exact, "bins_of", lambda log_p, *_: any_bins.expand_as(log_p))
        put_out = expected_output(p, q, chance, num_siblings)
    assert torch.allclose(put_out, chance * p, rtol=0, atol=1e-9)


def test_more_chains_accept_more() -> None:
    p, q = random_model(0), random_model(1)
    accept = [
        run_walks(p, q, num_chains=n, num_steps=4, size=2500, seed=1)[1].double().mean()
        for n in (1, 2, 4, 8)
    ]
    assert all(later > earlier + 0.05 for earlier, later in itertools.pairwise(accept))


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    """Whatever the numbers, in single precision: no token of many is rounded away."""
    generator = torch.Generator().manual_seed(0)
    log_p = (torch.randn(40, 1, 4, 5000, generator=generator) * 3).log_softmax(-1)
    log_p = log_p.expand(-1, 3, -1, -1)
    tokens = torch.randint(5000, (40, 3, 3), generator=generator)
    uniforms = torch.full(tokens.shape, 1 - 2.0**-53, dtype=torch.float64)
    found = verify(tokens, tokens < 0, log_p, log_p[:, :, :3], uniforms)
    assert (found.num_columns == 3).all()


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
