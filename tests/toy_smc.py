"""A whole SMC run on tables of probabilities, many independent runs at once, beside its exact law.

The toy language is a Markov chain whose tables change with the position. A run is composed of the
pure functions alone, so that a law that fails here fails without a model, memory or scheduler.
"""

from typing import NamedTuple

import torch

from sglang_smc.particles import Population
from sglang_smc.smc import rounds
from sglang_smc.smc.proposal import SamplingRules, log_probs, sample, token_log_probs
from sglang_smc.smc.randomness import Purpose, uniforms


class Pair(NamedTuple):
    """Log-probabilities ``[position, last token, next token]``; position 0 follows token 0."""

    target: torch.Tensor
    draft: torch.Tensor


class Setup(NamedTuple):
    """How to run it; the words are those of `SMCConfig`."""

    num_particles: int
    num_steps: int
    ess_threshold: float = 0.5
    resample_at: str = "block"
    resampling_method: str = "systematic"
    eos: int = -1  # no token
    max_lag: int = 1000


class Runs(NamedTuple):
    outputs: torch.Tensor  # [G, L]; what follows an EOS is filled up with EOS
    log_evidence: torch.Tensor  # [G]
    num_resampled: int
    lowest_ess: float
    num_all_zero: int


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


def frequencies(outputs: torch.Tensor, vocab: int) -> torch.Tensor:
    """Counts of every output, in the shape of `law`."""
    length = outputs.shape[1]
    index = (outputs * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    return torch.bincount(index, minlength=vocab**length).view([vocab] * length)


def simulate(pair: Pair, setup: Setup, num_runs: int, seed: int = 0) -> Runs:
    """Run SMC to the end in ``num_runs`` groups, each with a seed of its own."""
    seeds = seed * 1_000_003 + torch.arange(num_runs)
    population = _begin(pair, setup, seeds)
    num_resampled, num_all_zero, lowest_ess = 0, 0, float("inf")
    while not bool(population.ended.all()):
        population, cut = _round(pair, setup, population, seeds)
        num_resampled += int(cut.resample.sum())
        num_all_zero += int(cut.all_zero.sum())
        lowest_ess = min(lowest_ess, float(cut.ess.min()))
    final = _collapse(population, torch.ones(num_runs, dtype=torch.bool), seeds)
    length = len(pair.target)
    column = torch.arange(length - 1)
    tail = final.tokens[:, 0, : length - 1].masked_fill(
        column >= final.lengths[:, :1], max(setup.eos, 0)
    )
    outputs = torch.cat([final.anchor.unsqueeze(1), tail], dim=1)
    return Runs(outputs, final.log_evidence, num_resampled, lowest_ess, num_all_zero)


def _begin(pair: Pair, setup: Setup, seeds: torch.Tensor) -> Population:
    """The first token comes from the target and is common to all particles."""
    shape = (len(seeds), setup.num_particles)
    zero = torch.zeros_like(seeds)
    first = sample(
        pair.target[0, 0].expand(len(seeds), -1), uniforms(seeds, zero, zero, Purpose.BONUS)
    )
    return Population(
        tokens=torch.zeros(*shape, len(pair.target) + 1, dtype=torch.int64),
        lengths=torch.zeros(shape, dtype=torch.int64),
        ended=(first == setup.eos).unsqueeze(1).expand(shape),
        log_weights=torch.zeros(shape, dtype=torch.float64),
        anchor=first,
        num_emitted=torch.ones_like(seeds),
        log_evidence=torch.zeros(len(seeds), dtype=torch.float64),
    )


def _round(
    pair: Pair, setup: Setup, before: Population, seeds: torch.Tensor
) -> tuple[Population, rounds.Cut]:
    length = len(pair.target)
    drafts, log_q = _propose(pair, setup, before, seeds)
    chain = torch.cat([before.last_tokens.unsqueeze(2), drafts], dim=2)
    column = torch.arange(setup.num_steps + 1)
    positions = before.output_lengths.unsqueeze(2) + column
    log_p = pair.target[positions.clamp_max(length - 1), chain]  # [G, N, K + 1, V]
    ends = (drafts == setup.eos) | (positions[..., :-1] + 1 >= length)
    is_open = rounds.still_open(ends) & ~before.ended.unsqueeze(2)
    gained = token_log_probs(log_p[:, :, :-1], drafts) - log_q
    cut = rounds.cut(
        before.log_weights,
        torch.where(is_open, gained, 0.0),
        ess_threshold=setup.ess_threshold,
        resample_at=setup.resample_at,
    )
    kept = is_open & (column[:-1] < cut.num_columns.view(-1, 1, 1))
    population = before.append(drafts, kept.sum(2))._replace(
        ended=before.ended | (ends & kept).any(2), log_weights=cut.log_weights
    )
    where = population.output_lengths.amax(1, keepdim=True)
    step = rounds.resample(
        population.log_weights,
        cut.resample,
        _uniforms(seeds, where, setup.num_particles, Purpose.RESAMPLE),
        setup.resampling_method,
    )
    population = _descend(population, step)
    group = torch.arange(len(seeds)).unsqueeze(1)
    next_log_p = log_p[group, step.ancestors, cut.num_columns.unsqueeze(1)]
    population = _add_bonus(setup, population, next_log_p, seeds, length)
    forced = population.lengths.amax(1) % setup.max_lag == 0
    return _collapse(population, forced & ~population.ended.all(1), seeds), cut


def _propose(
    pair: Pair, setup: Setup, population: Population, seeds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, drawn, log_q = population.last_tokens, [], []
    for step in range(setup.num_steps):
        positions = population.output_lengths + step
        log_table = pair.draft[positions.clamp_max(len(pair.draft) - 1), tokens]
        tokens = sample(log_table, _uniforms(seeds, positions, setup.num_particles, Purpose.DRAFT))
        drawn.append(tokens)
        log_q.append(token_log_probs(log_table, tokens))
    return torch.stack(drawn, dim=2), torch.stack(log_q, dim=2)


def _add_bonus(
    setup: Setup, population: Population, log_p: torch.Tensor, seeds: torch.Tensor, length: int
) -> Population:
    positions = population.output_lengths
    tokens = sample(log_p, _uniforms(seeds, positions, setup.num_particles, Purpose.BONUS))
    live = ~population.ended
    ends = (tokens == setup.eos) | (positions + 1 >= length)
    return population.append(tokens.unsqueeze(2), live.long())._replace(
        ended=population.ended | (live & ends)
    )


def _collapse(population: Population, where: torch.Tensor, seeds: torch.Tensor) -> Population:
    positions = population.output_lengths.amax(1)
    u = uniforms(seeds, positions, torch.zeros_like(positions), Purpose.SELECT)
    return _descend(population, rounds.collapse(population.log_weights, where, u, "sample"))


def _descend(population: Population, step: rounds.Resampled) -> Population:
    return population.descend(step.ancestors)._replace(
        log_weights=step.log_weights, log_evidence=population.log_evidence + step.log_evidence
    )


def _uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, num_particles: int, purpose: Purpose
) -> torch.Tensor:
    return uniforms(seeds.unsqueeze(1), positions, torch.arange(num_particles), purpose)
