"""The law of complete texts in exact mode, across rounds, against enumeration.

Each seed has its own pair of models, decodes some hundred texts with it and gives the p-value of
one chi-square test. Where the output follows p, those p-values are uniform on [0, 1], and a
Kolmogorov-Smirnov test over all of them finds errors that no single one would show.

A sound `verify` fails here with probability below 0.004 over the choice of seeds, which are
fixed: 0.001 by the Kolmogorov-Smirnov test and 234 times 1e-5 by the bound on each.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from exact_tables import Verified, verify
from scipy.stats import chi2, kstest
from sorted_law import rules, sorted_law

from sglang_smc.tokens.distribution import sample

VOCAB, EOS, START = 4, 0, 4  # START stands for what comes before the text
MAX_LENGTH = 4
MAX_STEPS = 3
NUM_SEEDS = 13  # of each of 18 settings: 234, of which a few have but one likely text
TEXTS_PER_SEED = 500  # 117 000 texts in all
ALPHA, ALPHA_EACH = 1e-3, 1e-5

Verify = Callable[..., Verified]


class Setting(NamedTuple):
    num_chains: int
    temperature: float
    filtered: bool


SETTINGS = [
    Setting(*values) for values in itertools.product([1, 3, 8], [0.3, 1.0, 1.7], [False, True])
]


class Pair(NamedTuple):
    """Log-probabilities after the last two tokens, for each seed: ``[seeds, 5, 5, V]``."""

    log_p: torch.Tensor
    log_q: torch.Tensor


class Numbers(NamedTuple):
    """Where a decoder gets its uniforms: anew in each round, or stale, by position."""

    generator: torch.Generator
    by_position: torch.Tensor | None  # [2, G, N, positions]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def of_round(self, purpose: int, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Uniforms ``[rows, N, K]`` of a round that begins at ``starts`` ``[rows]``."""
        assert self.by_position is not None
        positions = starts.unsqueeze(1) + torch.arange(MAX_STEPS)
        table = self.by_position[purpose, rows]
        return table.gather(2, positions.unsqueeze(1).expand(-1, table.shape[1], -1))


def random_pair(seed: int, setting: Setting) -> Pair:
    """Two models for each seed; the draft's logits are the target's with noise."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_SEEDS, START + 1, START + 1, VOCAB)
    target = 0.7 * torch.randn(shape, generator=generator)
    draft = target + 0.7 * torch.randn(shape, generator=generator)
    filters = {"top_k": 3, "top_p": 0.9} if setting.filtered else {}
    asked = rules(setting.temperature, **filters)
    return Pair(sorted_law(target, asked), sorted_law(draft, asked))


class Drafts(NamedTuple):
    tokens: torch.Tensor
    ends: torch.Tensor
    log_p: torch.Tensor
    log_q: torch.Tensor


class Texts(NamedTuple):
    tokens: torch.Tensor  # [G, MAX_LENGTH], EOS behind the end
    lengths: torch.Tensor  # [G]
    done: torch.Tensor  # [G]

    def last(self, count: int) -> torch.Tensor:
        """The token ``count`` from the end, ``[G]``."""
        at = (self.lengths - count).unsqueeze(1)
        token = self.tokens.gather(1, at.clamp_min(0)).squeeze(1)
        return torch.where(at.squeeze(1) < 0, START, token)

    def append(self, token: torch.Tensor, where: torch.Tensor) -> "Texts":
        """Append one token to each text of ``where`` that is not done."""
        where = where & ~self.done
        at = self.lengths.clamp_max(MAX_LENGTH - 1).unsqueeze(1)
        new = torch.where(where, token, self.tokens.gather(1, at).squeeze(1))
        lengths = self.lengths + where
        done = self.done | (where & ((token == EOS) | (lengths == MAX_LENGTH)))
        return Texts(self.tokens.scatter(1, at, new.unsqueeze(1)), lengths, done)


def draft(pair: Pair, seeds: torch.Tensor, texts: Texts, uniforms: torch.Tensor) -> Drafts:
    """Draft and score chains ``[G, N, K]`` behind each text."""
    num_chains = uniforms.shape[1]
    before, last = (texts.last(count).unsqueeze(1).expand(-1, num_chains) for count in (2, 1))
    seeds = seeds.unsqueeze(1)
    tokens, log_p, log_q = [], [], []
    for step in range(MAX_STEPS):
        log_p.append(pair.log_p[seeds, before, last])
        log_q.append(pair.log_q[seeds, before, last])
        tokens.append(sample(log_q[-1], uniforms[:, :, step]))
        before, last = last, tokens[-1]
    log_p.append(pair.log_p[seeds, before, last])
    chains = torch.stack(tokens, 2)
    lengths = texts.lengths.view(-1, 1, 1) + 1 + torch.arange(MAX_STEPS)
    ends = (chains == EOS) | (lengths == MAX_LENGTH)
    return Drafts(chains, ends, torch.stack(log_p, 2), torch.stack(log_q, 2))


def decode(pair: Pair, num_chains: int, seed: int, check: Verify, *, stale: bool = False) -> Texts:
    """Decode all seeds' texts, round after round, until all are done."""
    seeds = torch.arange(NUM_SEEDS).repeat_interleave(TEXTS_PER_SEED)
    numbers = Numbers(torch.Generator().manual_seed(seed), None)
    table = numbers.draw(2, len(seeds), num_chains, 2 * MAX_LENGTH)
    none = torch.zeros_like(seeds)
    texts = Texts(none.unsqueeze(1).repeat(1, MAX_LENGTH), none, none.bool())
    while not texts.done.all():
        rows = (~texts.done).nonzero().squeeze(1)
        numbers = numbers._replace(by_position=table if stale else numbers.draw(*table.shape))
        longer = decode_round(
            pair,
            seeds[rows],
            Texts(*(part[rows] for part in texts)),
            [numbers.of_round(purpose, rows, texts.lengths[rows]) for purpose in (0, 1)],
            numbers.draw(len(rows)),
            check,
        )
        texts = Texts(
            *(old.index_copy(0, rows, new) for old, new in zip(texts, longer, strict=True))
        )
    return texts


def decode_round(
    pair: Pair,
    seeds: torch.Tensor,
    texts: Texts,
    uniforms: list[torch.Tensor],
    last_uniforms: torch.Tensor,
    check: Verify,
) -> Texts:
    """Draft, verify and draw the next token; rounds differ in how many columns they have."""
    drafts = draft(pair, seeds, texts, uniforms[0])
    num_steps = 1 + (texts.lengths + seeds) % MAX_STEPS
    found = check(*drafts, uniforms[1], num_steps=num_steps)
    won = drafts.tokens[torch.arange(len(seeds)), found.winner]
    for step in range(MAX_STEPS):
        texts = texts.append(won[:, step], step < found.num_columns)
    following = sample(found.next_probs.log(), last_uniforms)
    return texts.append(following, ~texts.done)


def enumerate_texts(log_p: torch.Tensor) -> torch.Tensor:
    """Probability of each text ``[V^4]`` under one model; EOS behind an end."""
    after = log_p.double().exp()
    after = after / after.sum(-1, keepdim=True)
    after[:, EOS] = torch.nn.functional.one_hot(torch.tensor(EOS), VOCAB).double()
    text = torch.cartesian_prod(*[torch.arange(VOCAB)] * MAX_LENGTH)  # [V^4, 4]
    history = torch.nn.functional.pad(text, (2, 0), value=START)
    columns = [after[tuple(history[:, at : at + 3].T)] for at in range(MAX_LENGTH)]
    return torch.stack(columns).prod(0)


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Chi-square against the law, with all bins that expect fewer than 5 in one."""
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed, wanted = (
        torch.cat([bins[common], bins[~common].sum().view(1)]) for bins in (counts, expected)
    )
    if wanted[-1] < 5:  # too few even together: they join the rarest of the others
        rarest = wanted[:-1].argmin()
        observed[rarest] += observed[-1]
        wanted[rarest] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) == 1:
        return None
    return float(chi2.sf(float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1))


def p_values(settings: list[Setting], check: Verify, *, stale: bool = False) -> list[float]:
    """One p-value for each setting's seed that has more than one likely text."""
    found = []
    for setting in settings:
        number = SETTINGS.index(setting)
        pair = random_pair(number, setting)
        texts = decode(pair, setting.num_chains, 1000 + number, check, stale=stale)
        place = VOCAB ** torch.arange(MAX_LENGTH - 1, -1, -1)
        bins = (texts.tokens * place).sum(1).view(NUM_SEEDS, TEXTS_PER_SEED)
        for seed in range(NUM_SEEDS):
            counts = torch.bincount(bins[seed], minlength=VOCAB**MAX_LENGTH).double()
            expected = enumerate_texts(pair.log_p[seed]) * TEXTS_PER_SEED
            found.append(p_value(counts, expected))
    return [value for value in found if value is not None]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_p_values_are_uniform() -> None:
    found = p_values(SETTINGS, verify)
    assert len(found) >= 200
    assert min(found) > ALPHA_EACH
    assert kstest(found, "uniform").pvalue > ALPHA


def another_target(tokens, ends, log_p, log_q, uniforms, **sizes) -> Verified:
    """Judge by a p that is flatter than the true one."""
    flat = torch.log_softmax(0.7 * log_p, -1)
    return verify(tokens, ends, flat, log_q, uniforms, **sizes)


def another_draft(tokens, ends, log_p, log_q, uniforms, **sizes) -> Verified:
    """Believe the tokens were drawn from a flatter q than they were."""
    flat = torch.log_softmax(0.7 * log_q, -1)
    return verify(tokens, ends, log_p, flat, uniforms, **sizes)


def no_residual(tokens, ends, log_p, log_q, uniforms, **sizes) -> Verified:
    """Draw the token that follows from p, not from what is left of it."""
    found = verify(tokens, ends, log_p, log_q, uniforms, **sizes)
    group = torch.arange(len(tokens))
    probs = log_p[group, found.winner, found.num_columns].double().exp()
    return found._replace(next_probs=probs)


def one_selection(tokens, ends, log_p, log_q, uniforms, **sizes) -> Verified:
    """Let tiers begin at one place always, which is not the law that the rule is given."""
    fixed = torch.cat([uniforms[:, :1], torch.zeros_like(uniforms[:, 1:])], 1)
    return verify(tokens, ends, log_p, log_q, fixed, **sizes)


POWER = [each for each in SETTINGS if each.num_chains == 3 and each.temperature > 0.3]


@pytest.mark.parametrize("wrong", [another_target, another_draft, no_residual, one_selection])
def test_wrong_verification_is_found(wrong: Verify) -> None:
    """The same statistics, on fewer texts, reject what is not exact."""
    assert kstest(p_values(POWER, wrong), "uniform").pvalue < ALPHA


@pytest.mark.slow
def test_stale_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that decided in one round must not decide in a later one: drafts behind the
    place where a round stops had a say in that, so they are not random any more.
    """
    monkeypatch.setattr(sys.modules[__name__], "TEXTS_PER_SEED", 4_000)
    alone = [setting for setting in SETTINGS if setting.num_chains == 1][2:3]
    assert min(p_values(alone, verify)) > ALPHA_EACH
    assert min(p_values(alone, verify, stale=True)) < ALPHA_EACH
