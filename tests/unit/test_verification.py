"""Verification: laws of what a walk puts out, how it selects, and what evidence keeps."""

import pytest
import torch
from exact_tables import verify
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.ops.interface import TORCH
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.trees import branch, log_divisors
from sglang_smc.smc.verification import OFFSETS, selection_rule
from sglang_smc.smc.weighing import covered_columns

VOCAB = 4


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


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_one_chain_is_block_verification(spread: float) -> None:
    """By the walk and at once; whatever ends it, its number of columns, and what a law forbids."""
    generator = torch.Generator().manual_seed(0)
    size, num_steps = 400, 6
    logits = torch.randn(size, num_steps + 1, VOCAB, generator=generator)
    others = logits + spread * torch.randn(logits.shape, generator=generator)
    logits[::3, :, 0] = others[::3, :, 1] = -torch.inf if spread else 0.0
    log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1)
    p = TokenDistribution.of_log_probs(log_p.flatten(0, 1))
    q = [TokenDistribution.of_log_probs(of) for of in log_q.unbind(1)[:-1]]
    numbers = torch.rand(2, size, num_steps, generator=generator, dtype=torch.float64)
    drawn = [law.sample(u)[0] for law, u in zip(q, numbers[0].unbind(1), strict=True)]
    tokens = torch.stack(drawn, 1).unsqueeze(1)
    ends = torch.rand(tokens.shape, generator=generator) < 0.1
    columns = torch.arange(size) % (num_steps + 1)
    given = tokens, ends, p, q, numbers[1].unsqueeze(1)
    found, wanted = (
        verification.verify_one(*given, columns),
        verification.verify(TORCH.begin_walk, TORCH.walk_on, *given, num_steps=columns),
    )
    for name in ("num_columns", "winner", "rejects"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    left = wanted.rejects
    assert torch.allclose(found.residuals[left], wanted.residuals[left], rtol=0, atol=1e-6)
    for row, count in enumerate(columns.tolist()):
        length = [*ends[row, 0, :count].tolist(), True].index(True) + 1  # up to the first end
        block = tokens[row, 0, : min(length, count)].tolist(), numbers[1, row].tolist()
        assert one_chain_block(log_p[row].exp(), log_q[row].exp(), *block) == found.num_columns[row]


def output_law(p: torch.Tensor, q: torch.Tensor, chance: float, num_siblings: int) -> torch.Tensor:
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
    chains = verification.Chains(tokens, torch.zeros_like(tokens).bool(), uniforms, one)
    walk = verification.begin_walk(chains, num_siblings * one, VOCAB)
    walk = walk._replace(chance=torch.full((size,), chance, dtype=torch.float64))
    log_p, log_q = (law.log().expand(size, -1) for law in (p, q))
    found = verification.walk_on(walk, chains, log_p, log_q, 0)
    # With coins of 0 all is accepted that can be: then its chance is in `chance`.
    token = tokens[torch.arange(size), found.found.winner, 0]
    accepted = torch.where(found.found.num_columns == 1, found.chance, 0.0)
    weight = q[tokens[:, :, 0]].prod(1) / OFFSETS
    put_out = torch.zeros(VOCAB, dtype=torch.float64).index_add(0, token, weight * accepted)
    return put_out + found.found.residuals[0]


@settings(max_examples=30)
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
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, VOCAB, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    q[seed % VOCAB] = 0  # never drafted
    q = q / q.sum()
    with pytest.MonkeyPatch.context() as patch:
        if num_bins is not None:
            any_bins = torch.randint(num_bins, (VOCAB,), generator=generator)
            patch.setattr(verification, "bins_of", lambda log_p, *_: any_bins.expand_as(log_p))
        put_out = output_law(p, q, chance, num_siblings)
    assert torch.allclose(put_out, chance * p, rtol=0, atol=1e-9)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    """Whatever the numbers, in single precision: no token of many is rounded away."""
    generator = torch.Generator().manual_seed(0)
    log_p = (torch.randn(40, 1, 4, 5000, generator=generator) * 3).log_softmax(-1)
    log_p = log_p.expand(-1, 3, -1, -1)
    tokens = torch.randint(5000, (40, 3, 3), generator=generator)
    uniforms = torch.full(tokens.shape, 1 - 2.0**-53, dtype=torch.float64)
    found = verify(tokens, tokens < 0, log_p, log_p[:, :, :3], uniforms)
    assert (found.num_columns == 3).all()


def seats(q: list[float], num_chains: int, ahead: int) -> list[int]:
    """Return the tokens of so many chains, each given to the largest q / max(1, s * seats)."""
    stride = 2.6 * (1 + 2 / ahead) if ahead else 1e6
    given: list[int] = []

    def quotient(token: int) -> float:
        return q[token] / max(1.0, stride * given.count(token))

    for _ in range(num_chains):
        given.append(max(range(len(q)), key=quotient))
    return sorted(given)


@pytest.mark.parametrize(("num_chains", "vocab_size"), [(1, 5), (4, 3), (6, 40)])
def test_chains_of_one_text_divide_its_likeliest_tokens(num_chains: int, vocab_size: int) -> None:
    """Red if a token has a chain too many or too few, texts share chains, or last ones repeat."""
    make = torch.Generator().manual_seed(7)
    for ahead in [0, 1, 2, 3, 8] * 10:
        text = torch.randint(0, 3, (num_chains,), generator=make)
        logits = 2.0 * torch.randn(3, vocab_size, generator=make, dtype=torch.float64)
        logits[:, 1] = -torch.inf
        same_text = (text.unsqueeze(0) == text.unsqueeze(1)).unsqueeze(0)
        scores = (logits[text] + 5.0).unsqueeze(0)
        divisors = log_divisors(torch.tensor([ahead]), num_chains)
        tokens = branch(scores, same_text, divisors)[0]
        for of in range(3):
            here = tokens[text == of]
            assert sorted(here.tolist()) == seats(logits[of].exp().tolist(), len(here), ahead)
            assert ahead or len(set(here.tolist())) == min(len(here), vocab_size - 1)


# --- How near the selection of one of several siblings is to the best


def law_of_tokens(target: torch.Tensor, draft: torch.Tensor, num_siblings: int) -> torch.Tensor:
    """The law ``[size, V]`` of a rule with a bin for each token: the finest there is."""
    ratio, order = (target / draft).sort(1)
    masses = (of.gather(1, order) for of in (target, draft))
    of_groups = torch.full((len(target),), num_siblings)
    rule = selection_rule(ratio, *masses, of_groups, num_siblings + 1)
    return rule.density.gather(1, order.argsort(1)) * draft


def best(target: torch.Tensor, draft: torch.Tensor, num_siblings: int) -> torch.Tensor:
    """What optimal transport accepts of the target, ``[size]``."""
    order = (target / draft).argsort(1)
    forced, taken = (of.gather(1, order).cumsum(1) for of in (draft, target))
    return 1 - (forced**num_siblings - taken).amax(1).clamp_min(0)


def law_of_bins(target: torch.Tensor, draft: torch.Tensor, num_siblings: int) -> torch.Tensor:
    """The law that `exact` selects by, ``[size, V]``."""
    size, none = len(target), torch.zeros(len(target), dtype=torch.int64)
    chains = verification.Chains(*(none.view(-1, 1, 1).expand(-1, num_siblings, 1),) * 3, none)
    mass = target.sum(1)
    walk = verification.begin_walk(chains, torch.full((size,), num_siblings), 1)._replace(
        chance=mass
    )
    return verification._fork(walk, (target / mass.unsqueeze(1)).log(), draft.log())[3]


@pytest.mark.parametrize("num_siblings", [1, 2, 4, 8])
@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_the_selection_is_near_the_best(noise: float, num_siblings: int) -> None:
    """Against the bound of optimal transport, and a bin for each token, which gains 0.001 at most.

    A draft like the target, and one that has little to do with it, where SpecInfer's selection of
    one after another accepts less; one token is never drafted.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40, 2000, generator=generator, dtype=torch.float64)
    of_draft = logits + noise * torch.randn(logits.shape, generator=generator)
    of_draft[:, 0] = -torch.inf
    q = of_draft.softmax(1)
    mass = torch.linspace(0.1, 1.0, 40, dtype=torch.float64).sqrt().unsqueeze(1)
    target = mass * torch.softmax(logits, 1)
    law = law_of_bins(target, q, num_siblings)
    assert torch.allclose(law.sum(1), torch.ones(40).double())
    of_tokens = law_of_tokens(target, q, num_siblings)
    accepted, finest = (torch.minimum(target, one).sum(1) for one in (law, of_tokens))
    bound = best(target, q, num_siblings)
    assert (accepted <= bound + 1e-9).all()
    assert (bound - accepted).mean() < 0.01
    assert (finest - accepted).mean() < 0.0012
    left, rejected = target, torch.ones(40).double()
    for _ in range(num_siblings):
        taken_now = torch.minimum(left, q).sum(1)
        left = (left - q).clamp_min(0) / (1 - taken_now).unsqueeze(1)
        rejected = rejected * (1 - taken_now)
    gain = (accepted - (1 - rejected)).mean()
    assert gain.abs() < 1e-9 if num_siblings == 1 else gain > 0.003 or noise < 1


@pytest.mark.parametrize("num_siblings", [4, 8])
def test_rounding_chooses_no_rule(num_siblings: int) -> None:
    """Masses that differ by their last bit, as sums in another order do: the levels stay.

    The target's mass is 1, so that a cut behind all tokens gains nothing but rounding.
    """
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, 40, 200, generator=generator, dtype=torch.float64)
    target, q = logits.softmax(1), (logits + 0.3 * noise).softmax(1)
    ratio, order = (target / q).sort(1)
    target, q = (of.gather(1, order) for of in (target, q))
    count = torch.full((40,), num_siblings)
    levels = [
        selection_rule(ratio, target * (1 + bit * 2**-52), q, count, num_siblings + 1).levels
        for bit in (-1, 0, 1)
    ]
    assert torch.equal(levels[0], levels[1]) and torch.equal(levels[1], levels[2])


def test_laws_in_single_precision_are_laws() -> None:
    """What decides is consistent: the law has mass 1 by the q that tokens are drawn from."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50_000, generator=generator) * 3
    log_p, log_q = logits.log_softmax(1), (logits + torch.randn(logits.shape, generator=generator))
    walk_law = law_of_bins(log_p.exp(), log_q.softmax(1), 8)
    assert walk_law.dtype == torch.float32
    assert (walk_law.double().sum(1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("num_particles", [1, 3])
def test_no_whole_block_is_kept_more_often_than_p_has_it(num_particles: int) -> None:
    """c = 1, by enumeration of all chains, of which one is drawn by weight."""
    generator = torch.Generator().manual_seed(0)
    laws = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    # Of p and q: row 0 begins, rows 1 to 3 follow a token; nine blocks of two.
    firsts = laws[:, 0].repeat_interleave(3, 1)
    p, q = blocks = firsts * laws[:, 1:].flatten(1)
    chains = torch.cartesian_prod(*[torch.arange(9)] * num_particles).view(-1, num_particles)
    gained = [(of[0] / of[1]).log()[chains] for of in (torch.ones(2, 9), firsts, blocks)]
    coins = (torch.arange(200).double() + 0.5).repeat(len(chains)) / 200
    ones = torch.ones_like(coins)
    running = torch.stack(gained, 1).repeat_interleave(200, 0)
    kept = covered_columns(running, ones, 2 * ones.long(), coins) == 2
    drawn = q[chains].prod(1, keepdim=True) * gained[-1].softmax(1)
    found, everything = (
        torch.zeros(9).double().index_add(0, chains.flatten(), (drawn * share).flatten())
        for share in (kept.view(-1, 200).double().mean(1, keepdim=True), 1.0)
    )
    assert (found <= p + 1 / 200).all()
    assert (everything > p + 0.05).any(), "the test could not tell them apart"
