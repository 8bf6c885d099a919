"""A whole SMC run on tables of probabilities, many independent runs at once, beside its exact law.

The toy language is a Markov chain whose tables change with the position. A run is composed of the
pure functions alone, so that a law that fails here fails without a model, memory or scheduler.
"""

from typing import NamedTuple

import torch
from populations import texts_of

from sglang_smc.round.steps import still_open
from sglang_smc.smc import exact, mixed, rounds
from sglang_smc.smc.distribution import SamplingRules, log_probs, power_law, sample, token_log_probs
from sglang_smc.smc.randomness import Purpose, round_seeds, uniforms
from sglang_smc.smc.stratify import equal_texts, still_same, stratified
from sglang_smc.state.population import Population


class Pair(NamedTuple):
    """Log-probabilities ``[position, last token, next token]``; position 0 follows token 0."""

    target: torch.Tensor
    draft: torch.Tensor


class Setup(NamedTuple):
    """How to run it; the words are those of `SMCConfig`, the threshold that of the paper."""

    num_particles: int
    num_steps: int
    ess_threshold: float = 0.5
    resample_at: str = "block"
    resampling_method: str = "systematic"
    eos: int = -1  # no token
    max_lag: int = 1000
    evidence_threshold: float = 0.0
    power: float = 1.0
    mode: str = "smc"  # or "mixed", whose evidence threshold may be infinite: "exact"
    stratifies: bool = True  # as the package always does


class Runs(NamedTuple):
    outputs: torch.Tensor  # [G, L]; what follows an EOS is filled up with EOS
    log_evidence: torch.Tensor  # [G]
    num_resampled: int
    lowest_ess: float
    num_all_zero: int
    num_rounds: int  # of all runs together
    num_tokens: int  # that rounds made, of all runs together


def random_logits(length: int, vocab: int, spread: float, seed: int) -> torch.Tensor:
    """Normal logits ``[length, vocab, vocab]`` with standard deviation ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, vocab, vocab, generator=generator) * spread


def table(logits: torch.Tensor, *, temperature: float = 1.0, top_p: float = 1.0) -> torch.Tensor:
    """The package's own filters over a table of logits."""
    rules = SamplingRules(
        *(torch.tensor(value) for value in (temperature, logits.shape[-1], top_p, 0.0))
    )
    return log_probs(logits, rules)


def mild_pair(length: int = 6, vocab: int = 5, seed: int = 0) -> Pair:
    """A draft that is a perturbed target, on all tokens."""
    logits = random_logits(length, vocab, 1.0, seed)
    return Pair(table(logits), table(logits + random_logits(length, vocab, 0.7, seed + 1)))


def law(tables: list[torch.Tensor], eos: int = -1) -> torch.Tensor:
    """Probability of every output, ``[V] * L`` float64; ``tables[i]`` draws position i."""
    vocab = tables[0].shape[-1]
    joint = tables[0][0, 0].double().exp()
    for position, log_table in enumerate(tables[1:], start=1):
        step = log_table[position].double().exp()
        if eos >= 0:
            step[eos] = torch.eye(vocab, dtype=torch.float64)[eos]
        joint = joint.unsqueeze(-1) * step
    return joint / joint.sum()  # float32 tables miss 1 by a rounding


def target_law(pair: Pair, eos: int = -1) -> torch.Tensor:
    return law([pair.target] * len(pair.target), eos)


def power_sums(pair: Pair, power: float, eos: int = -1) -> torch.Tensor:
    """p(x)^power of every output, not normalised, in the shape of `law`."""
    return target_law(pair, eos).pow(power)


def frequencies(outputs: torch.Tensor, vocab: int) -> torch.Tensor:
    """Counts of every output, in the shape of `law`."""
    length = outputs.shape[1]
    index = (outputs * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    return torch.bincount(index, minlength=vocab**length).view([vocab] * length)


def simulate(pair: Pair, setup: Setup, num_runs: int, seed: int = 0) -> Runs:
    """Run SMC to the end in ``num_runs`` groups, each with a seed of its own."""
    seeds = seed * 1_000_003 + torch.arange(num_runs)
    population = _begin(pair, setup, seeds)
    num_resampled, num_all_zero, num_rounds, lowest_ess = 0, 0, 0, float("inf")
    while not bool(population.ended.all()):
        num_rounds += int((~population.ended.all(1)).sum())
        population, cut = _round(pair, setup, population, seeds)
        num_resampled += int(cut.resample.sum())
        num_all_zero += int(cut.all_zero.sum())
        lowest_ess = min(lowest_ess, float(cut.ess.min()))
    final = _collapse(population, torch.ones(num_runs, dtype=torch.bool), seeds)
    length = len(pair.target)
    beyond = torch.arange(length) >= final.lengths[:, :1]
    outputs = final.tokens[:, 0, :length].masked_fill(beyond, max(setup.eos, 0))
    num_tokens = int((final.lengths[:, 0] - 1).sum())
    counts = (num_resampled, lowest_ess, num_all_zero, num_rounds, num_tokens)
    return Runs(outputs, final.log_evidence, *counts)


def _begin(pair: Pair, setup: Setup, seeds: torch.Tensor) -> Population:
    """The first token comes from the target: one for all, or each its own for a power of p."""
    shape = (len(seeds), setup.num_particles)
    everywhere = torch.zeros(shape, dtype=torch.int64)
    first_law, log_sum = power_law(pair.target[0, 0], torch.tensor(setup.power))
    noise = _uniforms(seeds, everywhere, setup.num_particles, Purpose.BONUS)
    if setup.power == 1.0:
        noise = noise[:, :1].expand(shape)
    else:
        noise = stratified(noise, torch.ones(*shape, setup.num_particles, dtype=torch.bool))
    first = sample(first_law.expand(*shape, -1), noise)
    tokens = torch.zeros(*shape, len(pair.target) + 1, dtype=torch.int64)
    tokens[..., 0] = first
    return Population(
        texts=texts_of(tokens, everywhere, everywhere),  # position 0 follows token 0
        lengths=everywhere + 1,
        ended=first == setup.eos,
        log_weights=torch.zeros(shape, dtype=torch.float64),
        num_emitted=torch.zeros_like(seeds),
        log_evidence=log_sum.double().expand(len(seeds)),
        present=torch.ones(shape, dtype=torch.bool),
        roots=torch.arange(setup.num_particles).expand(shape),
        unread=torch.zeros_like(seeds, dtype=torch.bool),
    )


class _Drafts(NamedTuple):
    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K, V]
    log_p: torch.Tensor  # [G, N, K + 1, V]
    ends: torch.Tensor  # [G, N, K]
    before_end: torch.Tensor  # [G, N, K]

    @property
    def gained(self) -> tuple[torch.Tensor, torch.Tensor]:
        """log p and log q of the drafted tokens."""
        log_p = token_log_probs(self.log_p[:, :, :-1], self.tokens)
        return log_p, token_log_probs(self.log_q, self.tokens)


def _round(
    pair: Pair, setup: Setup, before: Population, seeds: torch.Tensor
) -> tuple[Population, rounds.BlockCut]:
    seeds = round_seeds(seeds, before.output_lengths.amax(1))
    drafts = _propose(pair, setup, before, seeds)
    weighs = setup.mode == "smc"
    decide = _weigh if weighs else _verify
    cut, num_kept, step, next_log_p = decide(setup, before, drafts, seeds)
    kept = torch.arange(setup.num_steps) < num_kept.unsqueeze(2)
    population = before.append(drafts.tokens, num_kept)._replace(
        ended=before.ended | (drafts.ends & kept).any(2)
    )
    population = _descend(population, step)
    population = _add_bonus(setup, population, next_log_p, seeds, len(pair.target))
    forced = (population.lengths.amax(1) - 1) % setup.max_lag == 0
    return _collapse(population, forced & ~population.ended.all(1) & weighs, seeds), cut


def _propose(pair: Pair, setup: Setup, before: Population, seeds: torch.Tensor) -> _Drafts:
    length = len(pair.target)
    tokens, drawn, laws = before.last_tokens, [before.last_tokens], []
    same_text = _same_text(setup, before)
    for step in range(setup.num_steps):
        positions = before.output_lengths + step
        laws.append(pair.draft[positions.clamp_max(length - 1), tokens])
        noise = _uniforms(seeds, positions, setup.num_particles, Purpose.DRAFT)
        tokens = sample(laws[-1], stratified(noise, same_text))
        same_text = still_same(same_text, tokens)
        drawn.append(tokens)
    chain = torch.stack(drawn, dim=2)
    positions = before.output_lengths.unsqueeze(2) + torch.arange(setup.num_steps + 1)
    ends = (chain[..., 1:] == setup.eos) | (positions[..., :-1] + 1 >= length)
    return _Drafts(
        tokens=chain[..., 1:],
        log_q=torch.stack(laws, dim=2),
        log_p=pair.target[positions.clamp_max(length - 1), chain],
        ends=ends,
        before_end=still_open(ends) & ~before.ended.unsqueeze(2),
    )


Decision = tuple[rounds.BlockCut, torch.Tensor, rounds.Resampled, torch.Tensor]


def _weigh(setup: Setup, before: Population, drafts: _Drafts, seeds: torch.Tensor) -> Decision:
    size = len(seeds)
    log_p, log_q = drafts.gained
    cut = rounds.cut(
        before.log_weights,
        torch.where(drafts.before_end, log_p.double() * setup.power - log_q, 0.0),
        rounds.WeightRules(
            num_steps=torch.full((size,), setup.num_steps),
            ess_threshold=torch.full((size,), setup.ess_threshold, dtype=torch.float64),
            at_token=torch.full((size,), setup.resample_at == "token"),
            evidence_threshold=torch.full((size,), setup.evidence_threshold, dtype=torch.float64),
        ),
        before.present,
        _coins(before, seeds),
    )
    in_cut = torch.arange(setup.num_steps) < cut.num_columns.view(-1, 1, 1)
    num_kept = (drafts.before_end & in_cut).sum(2)
    where = (before.output_lengths + num_kept).amax(1, keepdim=True)
    step = rounds.resample(
        cut.log_weights,
        cut.resample,
        before.present,
        _uniforms(seeds, where, setup.num_particles, Purpose.RESAMPLE),
        setup.resampling_method,
    )
    group = torch.arange(size).unsqueeze(1)
    next_log_p = drafts.log_p[group, step.ancestors, cut.num_columns.unsqueeze(1)]
    return cut, num_kept, step, next_log_p


def _verify(setup: Setup, before: Population, drafts: _Drafts, seeds: torch.Tensor) -> Decision:
    """All particles have one text, and go on with one."""
    positions = before.output_lengths.unsqueeze(2) + torch.arange(setup.num_steps)
    particle = torch.arange(setup.num_particles).unsqueeze(1)
    accept = uniforms(seeds.view(-1, 1, 1), positions, particle, Purpose.ACCEPT)
    found = exact.verify(drafts.tokens, drafts.ends, drafts.log_p, drafts.log_q, accept)
    log_p, log_q = drafts.gained
    num_steps = torch.full((len(seeds),), setup.num_steps)
    block = mixed.judge(
        log_p - log_q,
        drafts.before_end,
        before.present,
        num_steps,
        torch.full((len(seeds),), setup.evidence_threshold, dtype=torch.float64),
        _coins(before, seeds),
        _uniforms(seeds, positions[:, :1, 0], setup.num_particles, Purpose.RESAMPLE)[:, 0],
    )
    kept, _ = mixed.longer(block, found, drafts.log_p, drafts.ends, num_steps)
    never = torch.zeros(len(seeds), dtype=torch.bool)
    unchanged = rounds.Resampled(
        kept.winner.unsqueeze(1).expand_as(before.lengths),
        before.log_weights,
        torch.zeros_like(before.log_evidence),
    )
    return (
        rounds.BlockCut(kept.num_columns, before.log_weights, block.ess, never, never),
        kept.num_columns.unsqueeze(1).where(~before.ended, 0),
        unchanged,
        kept.next_probs.log().unsqueeze(1).expand(-1, setup.num_particles, -1),
    )


def _add_bonus(
    setup: Setup, population: Population, log_p: torch.Tensor, seeds: torch.Tensor, length: int
) -> Population:
    positions = population.output_lengths
    log_p, log_sum = power_law(log_p, torch.tensor(setup.power))
    noise = _uniforms(seeds, positions, setup.num_particles, Purpose.BONUS)
    spread = stratified(noise, _same_text(setup, population))
    tokens = sample(log_p, spread if setup.mode == "smc" else noise[:, :1].expand_as(noise))
    live = ~population.ended
    ends = (tokens == setup.eos) | (positions + 1 >= length)
    return population.append(tokens.unsqueeze(2), live.long())._replace(
        ended=population.ended | (live & ends),
        log_weights=population.log_weights + torch.where(live, log_sum, 0.0),
    )


def _same_text(setup: Setup, population: Population) -> torch.Tensor:
    itself = torch.eye(setup.num_particles, dtype=torch.bool)
    if setup.mode != "smc" or not setup.stratifies:
        return itself.expand(len(population.lengths), -1, -1)
    return itself | equal_texts(population.tokens, population.lengths)


def _collapse(population: Population, where: torch.Tensor, seeds: torch.Tensor) -> Population:
    positions = population.output_lengths.amax(1)
    u = uniforms(seeds, positions, torch.zeros_like(positions), Purpose.SELECT)
    never = torch.zeros_like(where)
    step = rounds.collapse(population.log_weights, where, population.present, u, never)
    return _descend(population, step)


def _descend(population: Population, step: rounds.Resampled) -> Population:
    return population.descend(step.ancestors)._replace(
        log_weights=step.log_weights, log_evidence=population.log_evidence + step.log_evidence
    )


def _coins(population: Population, seeds: torch.Tensor) -> torch.Tensor:
    start = population.output_lengths.amax(1)
    return uniforms(seeds, start, torch.zeros_like(start), Purpose.KEEP)


def _uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, num_particles: int, purpose: Purpose
) -> torch.Tensor:
    return uniforms(seeds.unsqueeze(1), positions, torch.arange(num_particles), purpose)
