"""Decide which draft tokens a round keeps, and what the next token is drawn from.

A *decider* is one way to do so: it takes a scored round, and returns a `Decision` and the next
token's distribution for each particle. `Weigh` is mode smc; `VerifyTogether` verifies the chains of
a group as one multi-draft (modes exact and auto); `VerifyEach` verifies each particle's own
chain (mode smc with verified proposals); `Plain` is for rounds without drafts, in every mode.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from sglang_smc.smc import verification, weighing
from sglang_smc.smc.distribution import TokenDistribution, of_each_draw
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Population
from sglang_smc.smc.weighing import Block, Decision, choose

Decided = tuple[Decision, TokenDistribution]
"""The tokens that a round keeps, and the distributions of G * N next tokens."""


class Drafts(NamedTuple):
    """Draft tokens and their log-probabilities."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens
    ends: torch.Tensor  # [G, N, K] bool: the sequence ends with this token
    up_to_end: torch.Tensor  # [G, N, K] bool: up to the particle's end, within its request's K
    q: list[TokenDistribution] | None  # of G * N draws each; kept where some group verifies
    coins: torch.Tensor | None = None  # [G] uniforms for the columns where fidelity is measured
    measured_q: TokenDistribution | None = None  # of G * N rows, in these columns


class Scored(NamedTuple):
    """A round's draft tokens, with what both models say of them: all that is decided on."""

    population: Population  # before the round
    drafts: Drafts
    p: TokenDistribution  # of G * N * (K + 1) draws
    log_p: torch.Tensor  # [G, N, K + 1] of the draft tokens; the last column is of token 0
    block: Block  # of them, with log p renormalised under masks
    weighs: torch.Tensor  # [G] bool: particles differ between rounds; else all are copies
    powered: bool  # some group samples from a power of p
    accept_uniforms: torch.Tensor | None = None  # [G, N], where some group verifies
    extends: torch.Tensor | None = None  # [G] bool, where some group has verified proposals
    greedy: torch.Tensor | None = None  # [G] bool: temperature 0, where some group drafts a tree
    is_tree: torch.Tensor | None = None  # [G] bool: drafts one, where others sample their chains


class Decider(ABC):
    """A way to decide."""

    weighs = True
    """Whether particles go on with weights of their own; else all become copies of one, which draw
    one bonus token."""

    extends = False
    """Whether particles keep unlike numbers of tokens, and their weights have the normaliser of the
    bonus token, which else is added when that is drawn."""

    @abstractmethod
    def __call__(self, scored: Scored, ops: Ops) -> Decided:
        """Return what all groups keep and draw from; those that decide otherwise are ignored."""

    def groups(self, scored: Scored) -> torch.Tensor:
        """Return the groups that it decides for, ``[G]`` bool, unless a later decider does; all."""
        return torch.ones_like(scored.weighs)


@dataclass(frozen=True)
class Weigh(Decider):
    """Weigh by log p - log q up to each particle's end, and resample where the ESS is low."""

    def __call__(self, scored: Scored, ops: Ops) -> Decided:
        block = scored.block
        p = scored.p
        log_p = scored.log_p
        if p.log_mass is not None:  # weights compare p before masks with q under them
            block = block._replace(log_p=(log_p + p.log_mass.view_as(log_p))[:, :, :-1])
        return _next_rows(scored, ops.reweight_and_resample(block))

    def groups(self, scored: Scored) -> torch.Tensor:
        extends = scored.extends
        return scored.weighs if extends is None else scored.weighs & ~extends


@dataclass(frozen=True)
class Plain(Decider):
    """Resample where the ESS is low, in a round without drafts: p draws the next token."""

    def __call__(self, scored: Scored, ops: Ops) -> Decided:
        found = weighing.reweight_and_resample(scored.block)  # kernels need a column
        decision, next_tokens = _next_rows(scored, found)
        return decision._replace(verified=~scored.weighs), next_tokens


@dataclass(frozen=True)
class VerifyTogether(Decider):
    """Verify the chains of a group as one multi-draft.

    It keeps the columns that the block's evidence covers, or those that exact verification accepts,
    whichever are more. Trees, at temperature 0, keep what the evidence covers: the target's own
    tokens. All particles become copies of one winner: they start and end such a round with one
    sequence, which is emitted at once. With masks, the masked and renormalised distributions are
    compared.
    """

    weighs = False

    def __call__(self, scored: Scored, ops: Ops) -> Decided:
        population = scored.population
        drafts = scored.drafts
        p = scored.p
        block = scored.block
        if drafts.q is None:
            found = verification.nothing(block.num_steps)
        else:
            drafted = block.num_steps.unsqueeze(1) * population.present
            if scored.is_tree is not None:  # what their chains' evidence covers is exact
                drafted = drafted.masked_fill(scored.is_tree.unsqueeze(1), 0)
            found = _verified(scored, ops, p, drafts.tokens.shape, drafted)
        kept = ops.keep(found, block, drafts.ends)
        of_particles = partial(of_each_draw, num_draws=population.lengths.numel())
        next_tokens = p._replace(rows=of_particles(kept.row), log_mass=None)
        if p.log_mass is not None:
            masses = log_mass_of_path(p.log_mass.view_as(scored.log_p), kept, drafts.ends)
            next_tokens = next_tokens._replace(log_mass=of_particles(masses))
        if drafts.q is not None:
            residual = p.of_log_probs(found.residuals.log(), of_particles(found.left))
            rejects = kept.rejects.unsqueeze(1).expand(population.lengths.shape)
            next_tokens = next_tokens._replace(rejects=rejects, left=residual)
        decision = one_lineage(population, kept)
        if scored.greedy is not None:  # by evidence, too
            decision = decision._replace(verified=decision.verified | scored.greedy)
        return decision, next_tokens


@dataclass(frozen=True)
class VerifyEach(Decider):
    """Extend each particle by the accepted prefix of its own chain; resample by masks and powers.

    So the accepted tokens are a sample of p^alpha under masks, renormalised at each token, whatever
    q is. The log-weight gains the log normaliser at each of them and at the bonus token, which
    `steps.add_bonus` draws. Particles advance by different lengths, which depend on chance and on
    no weight, so that E[Z-hat f] stays (docs/whole-texts.md).
    """

    extends = True

    def __call__(self, scored: Scored, ops: Ops) -> Decided:
        block = scored.block
        raised, log_sums = _raised(scored)
        size, num_particles, num_steps = scored.drafts.tokens.shape
        each = (size * num_particles, 1, num_steps)  # a group of its own for each chain
        found = _verified(scored, ops, raised, each, block.num_steps.unsqueeze(1))
        extension = _extend(scored, found.num_columns.view(size, num_particles), log_sums)
        drawn = ops.resample_by_weights(
            log_weights=scored.population.log_weights - extension.correction,
            gains=extension.gains,
            present=scored.population.present,
            ess_threshold=block.ess_threshold,
            uniforms=block.uniforms,
            scheme=block.scheme,
        )
        decision = _decision_of(extension, drawn)
        return decision, _after_rejection(scored.p, found, extension.num_kept, drawn.ancestors)

    def groups(self, scored: Scored) -> torch.Tensor:
        assert scored.extends is not None, "there where some group has such"
        return scored.extends


class _Extension(NamedTuple):
    """Accepted tokens of each particle, and what they do to its weight."""

    live: torch.Tensor  # [G, N] bool: present, and not ended before
    num_kept: torch.Tensor  # [G, N] int64 accepted tokens
    gains: torch.Tensor  # [G, N] float64 sums of log normalisers, the bonus token's included
    correction: torch.Tensor  # [G, N] float64, of `length_correction`


def _raised(scored: Scored) -> tuple[TokenDistribution, torch.Tensor]:
    """Return p^alpha under masks, and its log normalisers ``[G, N, K + 1]`` float64."""
    raised = scored.p
    log_sums = raised.log_masses()
    if scored.powered:
        raised, log_sums = raised.to_power(scored.block.power)
        raised = raised.summed()
    return raised, log_sums.double().view_as(scored.log_p)


def _extend(scored: Scored, num_accepted: torch.Tensor, log_sums: torch.Tensor) -> _Extension:
    """Return the extensions of particles by ``num_accepted`` ``[G, N]`` of their drafts."""
    population = scored.population
    live = population.present & ~population.ended
    num_kept = num_accepted.where(live, 0)
    column = torch.arange(log_sums.shape[2], device=log_sums.device)
    is_kept = column[:-1] < num_kept.unsqueeze(2)  # [G, N, K]
    continues = live & ~(scored.drafts.ends & is_kept).any(2)
    num_weighed = num_kept + continues  # with the bonus token
    gains = log_sums.masked_fill(column >= num_weighed.unsqueeze(2), 0.0).sum(2)
    lengths = population.lengths + num_weighed
    return _Extension(
        live=live,
        num_kept=num_kept,
        gains=gains,
        correction=length_correction(gains, num_weighed, lengths, continues),
    )


def _decision_of(extension: _Extension, drawn: weighing.Resampled) -> Decision:
    """Return the decision that keeps an extension, and resamples as drawn."""
    num_live = extension.live.sum(1).clamp_min(1)
    log_weights = drawn.log_weights + extension.correction.gather(1, drawn.ancestors)
    return Decision(
        num_columns=(extension.num_kept.sum(1) / num_live).round().long(),
        num_kept=extension.num_kept,
        weighed=drawn.weighed,
        ess=drawn.ess,
        resampled=drawn.resampled,
        all_zero=drawn.all_zero,
        ancestors=drawn.ancestors,
        # Weights stay where all particles would die; here their tokens are kept, so all have died.
        log_weights=log_weights.masked_fill(drawn.all_zero.unsqueeze(1), -torch.inf),
        log_evidence=drawn.log_evidence,
        num_killed=drawn.num_killed,
        verified=torch.ones_like(drawn.all_zero),
    )


def _after_rejection(
    p: TokenDistribution,
    found: verification.Verified,
    num_kept: torch.Tensor,
    ancestors: torch.Tensor,
) -> TokenDistribution:
    """Return the next token's distribution of each particle: that of its ancestor.

    Args:
        p: of G * N * (K + 1) draws.
        found: of G * N chains, each verified alone.
        num_kept, ancestors: ``[G, N]``.
    """
    first = torch.arange(0, p.num_draws, p.num_draws // num_kept.numel(), device=num_kept.device)

    def of_ancestors(of_chains: torch.Tensor) -> torch.Tensor:
        return of_chains.view_as(ancestors).gather(1, ancestors).flatten()

    row = of_ancestors(first + num_kept.flatten())
    return p._replace(
        rows=row,
        log_mass=None if p.log_mass is None else p.log_mass[row],
        rejects=of_ancestors(found.rejects),
        left=p.of_log_probs(found.residuals.log(), of_ancestors(found.left)),
    )


def decide(deciders: Sequence[Decider], scored: Scored, ops: Ops) -> Decided:
    """Decide for each group by the decider that it chooses, or by the first."""
    decided = deciders[0](scored, ops)
    for decider in deciders[1:]:
        decided = replace_groups(decided, decider.groups(scored), decider(scored, ops))
    return decided


def _next_rows(scored: Scored, decision: Decision) -> Decided:
    """Return a decision with each particle's row of p: that of its ancestor's next token."""
    p = scored.p
    log_p = scored.log_p
    first = torch.arange(0, log_p.numel(), log_p[0].numel(), device=log_p.device)  # [G]
    next_row = (first + decision.num_columns).unsqueeze(1)
    row = torch.add(next_row, decision.ancestors, alpha=log_p.shape[2]).flatten()  # [G * N]
    masses = None if p.log_mass is None else p.log_mass[row]
    return decision, p._replace(rows=row, log_mass=masses)


def length_correction(
    gains: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, continues: torch.Tensor
) -> torch.Tensor:
    """Return the part of each log-weight that comes of a text longer than the mean, ``[G, N]``.

    Each token multiplies a weight by its normaliser, so that among texts of unequal lengths
    resampling would prefer the shortest. Set aside while ancestors are drawn, and put back, this
    changes no mean: an auxiliary particle filter (Pitt and Shephard 1999).

    Args:
        gains: ``[G, N]`` float64 sums of this round's log normalisers.
        counts: ``[G, N]`` int64 normalisers in each.
        lengths: ``[G, N]`` int64 tokens of each tail.
        continues: ``[G, N]`` bool: the particle has not ended. The mean length is that of these.
    """
    alive = gains > -torch.inf
    total = gains.where(alive, 0.0).sum(1, keepdim=True)
    rate = total / counts.where(alive, 0).sum(1, keepdim=True).clamp_min(1)  # nats a token
    mean = (lengths * continues).sum(1, keepdim=True) / continues.sum(1, keepdim=True)
    longer = lengths - mean.nan_to_num(torch.inf)  # a group that has ended is not corrected
    return rate * longer.where(continues, longer.clamp_min(0.0))  # short texts have ended for good


def replace_groups(base: Decided, where: torch.Tensor, other: Decided) -> Decided:
    """Return ``base``, with ``other`` in its place for the groups ``where`` ``[G]`` bool."""
    return choose(where, other[0], base[0]), base[1].unless(where, other[1])


def _verified(
    scored: Scored, ops: Ops, p: TokenDistribution, shape: Sequence[int], num_steps: torch.Tensor
) -> verification.Verified:
    """Verify the drafted chains, as the groups, chains and columns of ``shape``.

    Args:
        num_steps: ``[G, N]`` of each chain, at most.
    """
    drafts = scored.drafts
    uniforms = scored.accept_uniforms
    assert drafts.q is not None and uniforms is not None, "kept where some group verifies"
    uniforms = uniforms.view(*shape[:2])[:, 0]
    lengths = drafts.up_to_end.sum(2).minimum(num_steps).view(*shape[:2])
    return ops.verify(drafts.tokens.view(*shape), lengths, p, drafts.q, uniforms)


def log_mass_of_path(
    log_mass: torch.Tensor, kept: verification.Kept, ends: torch.Tensor
) -> torch.Tensor:
    """Return 0, or -inf where masks forbid all tokens after some kept prefix, ``[G]``.

    Args:
        log_mass: ``[G, N, K + 1]`` log of the mass that masks leave of p after each prefix.
        kept: the kept columns of each group's winner.
        ends: ``[G, N, K]`` bool: the sequence ends with this token.
    """
    group = torch.arange(len(log_mass), device=log_mass.device)
    column = torch.arange(log_mass.shape[2], device=log_mass.device)
    within = column < kept.num_columns.unsqueeze(1)  # [G, K + 1]
    has_ended = (ends[group, kept.winner] & within[:, :-1]).any(1, keepdim=True)
    follows = within | ((column == kept.num_columns.unsqueeze(1)) & ~has_ended)
    stuck = (log_mass[group, kept.winner] == -torch.inf) & follows
    return torch.zeros_like(log_mass[:, 0, 0]).masked_fill(stuck.any(1), -torch.inf)


def one_lineage(population: Population, kept: verification.Kept) -> Decision:
    """Make all particles copies of the winner. Weights stay equal, so the evidence stays.

    Args:
        kept: the kept columns of each group's winner.
    """
    present = population.present
    log_weights = population.log_weights
    itself = torch.arange(present.shape[1], device=present.device)
    never = torch.zeros_like(kept.by_block)
    # A particle that was drawn when its group became smaller may have ended before the round.
    live = present & ~population.ended
    num_columns = kept.num_columns.where(live.any(1), 0)
    return Decision(
        num_columns,
        num_kept=num_columns.unsqueeze(1).where(live, 0),
        weighed=log_weights,
        ess=kept.ess,
        resampled=never,
        all_zero=never,
        ancestors=kept.winner.unsqueeze(1).where(present, itself),
        log_weights=log_weights,
        log_evidence=torch.zeros_like(population.log_evidence),
        num_killed=torch.zeros_like(kept.row),
        verified=~kept.by_block,
    )
