"""Verification: the law of what comes out, by enumeration; drafted trees; what evidence keeps."""

import itertools
from typing import NamedTuple

import pytest
import torch

from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.trees import branch, log_divisors
from sglang_smc.smc.weighing import covered_columns

Prefix = tuple[int, ...]
END = 0  # the token that ends a text


class Case(NamedTuple):
    """Sizes of an enumeration, and what is special about its trees."""

    num_chains: int
    num_steps: int
    vocab_size: int
    noise: float  # of the draft
    short: float = 0.0  # share of prefixes at which a chain stops
    forbidden: float = 0.0  # share of tokens without mass, of p and of q apart
    ends: bool = False


class Language:
    """Next-token laws p and q of each prefix, and what a chain does there, all drawn at random."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.make = torch.Generator().manual_seed(seed)
        longest = range(case.num_steps + 1)
        self.laws = {p: self._laws(p) for n in longest for p in self._prefixes(n)}
        self.stops = {p: self._flags(case.short) for p in self.laws}

    def _prefixes(self, length: int) -> list[Prefix]:
        return list(itertools.product(range(self.case.vocab_size), repeat=length))

    def _flags(self, share: float) -> torch.Tensor:
        return torch.rand(self.case.num_chains, generator=self.make) < share

    def _laws(self, prefix: Prefix) -> torch.Tensor:
        size = self.case.vocab_size
        logits = torch.randn(2, size, generator=self.make, dtype=torch.float64) * 1.5
        logits[1] = logits[0] + self.case.noise * logits[1]
        banned = torch.rand(2, size, generator=self.make) < self.case.forbidden
        banned[:, 0] = False
        laws = logits.masked_fill(banned, -torch.inf).softmax(1)
        over = self.case.ends and END in prefix
        return torch.eye(size, dtype=torch.float64)[[END, END]] if over else laws

    def drafts(self) -> tuple[torch.Tensor, ...]:
        """Return all drafts: tokens, lengths and probability."""
        case = self.case
        found = []
        cells = [self._chains(chain) for chain in range(case.num_chains)]
        for chains in itertools.product(*cells):
            tokens, lengths, mass = zip(*chains, strict=True)
            found.append((tokens, lengths, float(torch.tensor(mass).prod())))
        tokens, lengths, mass = (torch.tensor(of) for of in zip(*found, strict=True))
        return tokens, lengths, mass.double()

    def _chains(self, chain: int) -> list[tuple[Prefix, int, float]]:
        """All that one chain can be: tokens, length, and its probability."""
        case = self.case
        found = [((), 0, 1.0)]
        for _ in range(case.num_steps):
            longer = []
            for tokens, length, mass in found:
                over = len(tokens) > length or (case.ends and END in tokens)
                if over or self.stops[tokens][chain]:
                    longer.append(((*tokens, 1), length, mass))
                else:
                    of_q = self.laws[tokens][1].tolist()
                    longer += [
                        ((*tokens, token), length + 1, mass * q)
                        for token, q in enumerate(of_q)
                        if q > 0
                    ]
            found = longer
        return found

    def along(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return log p and log q behind each prefix of ``tokens`` ``[G, N, K]``: two of V."""
        rows = [
            torch.stack([self.laws[tuple(chain[:n])] for n in range(len(chain) + 1)])
            for chain in tokens.flatten(0, 1).tolist()
        ]
        return torch.stack(rows).log()  # [G * N, K + 1, 2, V]


def law_of_verified(language: Language) -> tuple[torch.Tensor, torch.Tensor]:
    """The law of K + 1 tokens that come out, completed by p, and p's own, ``[V, V, ...]``."""
    tokens, lengths, mass = language.drafts()
    size, num_chains, num_steps = tokens.shape
    vocab_size = language.case.vocab_size
    log_laws = language.along(tokens)
    p = TokenDistribution.of_log_probs(log_laws[:, :, 0].flatten(0, 1))
    q = [TokenDistribution.of_log_probs(log_laws[:, at, 1]) for at in range(num_steps)]
    tree = verification.grow(tokens, lengths)
    down = verification.descend(tree, p, q)
    chances = verification.exits(down)
    assert torch.allclose(chances.sum((1, 2)), torch.ones(size).double())
    assert (down.shares.sum(2) < 1 + 1e-6).all()
    every = torch.arange(size * num_chains)
    found = torch.zeros(()).double()
    wanted = torch.ones(()).double()
    for column in range(num_steps + 1):
        behind = log_laws[:, column, 0].exp()  # [G * N, V]
        left = behind
        if column < num_steps:
            shares = down.shares[column]
            density = down.density[column].flatten(0, 1)
            fork = verification.forked(tree, shares, column)
            rows = verification.read(fork, every, p, q[column], column, num_steps + 1)
            left = verification.residual(rows, shares.flatten(), density).double()
            left = torch.where(fork.counts.view(-1, 1) > 0, left, behind)
        left = left / left.sum(1, keepdim=True).clamp_min(1e-30)
        out = (mass.unsqueeze(1) * chances[:, column]).view(-1, 1) * left  # [G * N, V]
        prefixes = [language.laws[of][0] for of in language._prefixes(column)]
        next_p = torch.stack(prefixes).view(*[vocab_size] * column, vocab_size)
        place = torch.zeros(size * num_chains, dtype=torch.int64)
        for step in range(column):
            place = place * vocab_size + tokens[:, :, step].flatten()
        now = torch.zeros(vocab_size**column, vocab_size).double().index_add(0, place, out)
        found = found.unsqueeze(-1) * next_p + now.view(next_p.shape)
        wanted = wanted.unsqueeze(-1) * next_p
    return found, wanted


CASES = {
    "one chain": Case(1, 4, 3, 1.0),
    "two chains": Case(2, 4, 2, 1.0),
    "three": Case(3, 2, 3, 1.5),
    "four": Case(4, 2, 2, 0.5),
    "four of four columns": Case(4, 3, 2, 1.0),
    "one column": Case(4, 1, 4, 3.0),
    "ends": Case(3, 3, 2, 1.0, ends=True),
    "zeros": Case(2, 2, 4, 1.0, forbidden=0.4),
    "ragged": Case(3, 3, 2, 1.0, short=0.3),
    "everything": Case(3, 3, 2, 1.5, short=0.2, forbidden=0.2, ends=True),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_comes_out_follows_p(name: str) -> None:
    """To single precision, whatever q and the shape of the tree."""
    for seed in range(3):
        found, wanted = law_of_verified(Language(CASES[name], seed))
        assert (found - wanted).abs().sum() < 1e-5, seed


def block_verification(p: list, q: list, tokens: list[int]) -> list[float]:
    """How often Sun et al.'s algorithm 2 accepts 0, 1, .. of the tokens, of laws by column."""
    chance = 1.0
    found = [1.0]
    reach = 1.0
    for step, token in enumerate(tokens):
        chance = min(1.0, chance * p[step][token] / q[step][token])
        stop = chance
        if step + 1 < len(tokens):
            after = zip(p[step + 1], q[step + 1], strict=True)
            mass = sum(max(0.0, chance * of_p - of_q) for of_p, of_q in after)
            stop = mass / (mass + 1 - chance) if chance < 1 else 1.0
        found.append(stop)
    for step in range(len(tokens), -1, -1):  # the longest that is accepted counts
        found[step], reach = reach * found[step], reach * (1 - found[step])
    return found


def laws_of(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[TokenDistribution, list]:
    """Of log p ``[G, N, K + 1, V]`` and log q ``[G, N, K, V]``."""
    every = [TokenDistribution.of_log_probs(of.flatten(0, 1)) for of in log_q.unbind(2)]
    return TokenDistribution.of_log_probs(log_p.flatten(0, 2)), every


@pytest.mark.parametrize(("spread", "num_chains"), [(0.0, 1), (1.0, 1), (1.0, 2)])
def test_one_chain_is_block_verification(spread: float, num_chains: int) -> None:
    """Sun et al.'s algorithm 2, however long the chain is and whatever a law forbids.

    A second chain without tokens changes nothing.
    """
    generator = torch.Generator().manual_seed(0)
    size = 60
    num_steps = 6
    vocab_size = 4
    logits = torch.randn(size, 1, num_steps + 1, vocab_size, generator=generator)
    others = logits + spread * torch.randn(logits.shape, generator=generator)
    logits[::3, ..., 0] = others[::3, ..., 1] = -torch.inf if spread else 0.0
    each = (law.expand(-1, num_chains, -1, -1) for law in (logits, others[:, :, :-1]))
    p, q = laws_of(*(law.log_softmax(-1) for law in each))
    numbers = torch.rand(num_steps, size, generator=generator, dtype=torch.float64)
    numbers = numbers.repeat_interleave(num_chains, 1)
    drawn = [law.sample(u)[0] for law, u in zip(q, numbers, strict=True)]
    tokens = torch.stack(drawn, 1).view(size, num_chains, num_steps)
    lengths = torch.arange(size) % (num_steps + 1)
    none = torch.zeros(size, num_chains - 1, dtype=torch.int64)
    tree = verification.grow(tokens, torch.cat([lengths.unsqueeze(1), none], 1))
    chances = verification.exits(verification.descend(tree, p, q))[:, :, 0]
    laws = logits[:, 0].double().softmax(-1), others[:, 0].double().softmax(-1)
    for row, length in enumerate(lengths.tolist()):
        of_row = (law[row].tolist() for law in laws)
        expected = block_verification(*of_row, tokens[row, 0, :length].tolist())
        assert chances[row, : length + 1].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    """Whatever the numbers, in single precision: no token of many is rounded away."""
    generator = torch.Generator().manual_seed(0)
    log_p = (torch.randn(40, 1, 4, 5000, generator=generator) * 3).log_softmax(-1)
    log_p = log_p.expand(-1, 3, -1, -1)
    tokens = torch.randint(5000, (40, 3, 3), generator=generator)
    lengths = torch.full((40, 3), 3)
    uniforms = torch.full((40,), 1 - 2.0**-53).double()
    found = verification.verify(tokens, lengths, *laws_of(log_p, log_p[:, :, :3]), uniforms)
    assert (found.num_columns == 3).all()


def test_a_uniform_stops_at_each_node_as_often_as_it_should() -> None:
    """Red for a layer or a chain that is counted from the other end."""
    language = Language(CASES["three"], seed=1)
    tokens, lengths, _ = language.drafts()
    log_laws = language.along(tokens[:40])
    p, q = laws_of(log_laws[:, :, 0].view(40, 3, 3, -1), log_laws[:, :-1, 1].view(40, 3, 2, -1))
    tree = verification.grow(tokens[:40], lengths[:40])
    layers = verification.descend(tree, p, q)
    places = (torch.arange(1000).double() + 0.5) / 1000
    stops = torch.zeros(40, 3, 3)
    for place in places:
        column, chain = verification.leave(layers, place.expand(40))
        stops[torch.arange(40), column, chain] += 1e-3
    assert torch.allclose(stops.double(), verification.exits(layers), atol=2e-3)


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
