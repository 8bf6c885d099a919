"""Verify the chains of a round: as one multi-draft, or each particle's own.

Modes exact, mixed and auto do the former, mode smc with verified proposals the latter.
"""

from collections.abc import Sequence
from functools import partial

import torch

from sglang_smc.round.batch import Drafts, RoundBatch
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution, of_each_draw
from sglang_smc.smc.population import Population
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.weighing import Block, Decision, choose


def verify(
    batch: RoundBatch,
    population: Population,
    drafts: Drafts,
    p: TokenDistribution,
    log_p: torch.Tensor,
) -> tuple[Decision, TokenDistribution]:
    """Keep the columns that the block's evidence covers, or that exact verification accepts.

    The longer of the two is kept. Trees, at temperature 0, keep what the evidence covers: the
    target's own tokens. All particles become copies of one winner: they start and end such a round
    with one sequence, which is emitted at once. With masks, the masked and renormalised
    distributions are compared. ``p`` and ``log_p`` are ``[G, N, K + 1]``, of `Steps.score`.
    """
    settings, ops = batch.settings, batch.ops
    if drafts.q is None:
        found = verification.nothing(settings.num_steps)
    else:
        drafted = settings.num_steps.unsqueeze(1) * population.present
        if batch.shape.branches:  # what their chains' evidence covers is exact
            drafted = drafted.masked_fill(settings.branches.unsqueeze(1), 0)
        found = _verified(batch, drafts, p, drafts.tokens.shape, drafted)
    kept = ops.keep(
        found,
        log_p,
        drafts.log_q,
        drafts.up_to_end,
        drafts.ends,
        population.present,
        settings.num_steps,
        settings.evidence_threshold,
        ops.uniforms(settings.seeds, batch.position[:, :1], Purpose.KEEP)[:, 0],
        ops.uniforms(settings.seeds, batch.position[:, :1], Purpose.RESAMPLE)[:, 0],
    )
    of_particles = partial(of_each_draw, num_draws=batch.output_lengths.numel())
    next_tokens = p._replace(rows=of_particles(kept.row), log_mass=None)
    if p.log_mass is not None:
        masses = log_mass_of_path(p.log_mass.view_as(log_p), kept, drafts.ends)
        next_tokens = next_tokens._replace(log_mass=of_particles(masses))
    if drafts.q is not None:
        residual = p.of_log_probs(found.residuals.log(), of_particles(found.left))
        rejects = kept.rejects.unsqueeze(1).expand(batch.output_lengths.shape)
        next_tokens = next_tokens._replace(rejects=rejects, left=residual)
    decision = one_lineage(population, kept)
    if batch.shape.branches:  # by evidence, too
        decision = decision._replace(verified=decision.verified | settings.greedy)
    return decision, next_tokens


def extend_each(
    batch: RoundBatch,
    population: Population,
    drafts: Drafts,
    p: TokenDistribution,
    ess_threshold: torch.Tensor,
    num_chains: int,
) -> tuple[Decision, TokenDistribution]:
    """Verify each particle's own chains, and resample by the other factors of the request's target.

    So the accepted tokens are a sample of p^alpha under masks, renormalised at each token, whatever
    q is. The log-weight gains the log normaliser at each of them and at the bonus token, which
    `Steps.add_bonus` draws. Particles advance by different lengths, which depend on chance and on
    no weight, so that E[Z-hat f] stays (docs/fidelity.md).

    The N places are of P = N / M particles, of which each has M equal ones: its chains are verified
    as one multi-draft, and all become copies of the chain that carries the accepted tokens.

    Args:
        ess_threshold: ``[G]`` float64 tau.
        num_chains: M; groups of another M get undefined values. The other arguments are those of
            `verify`.
    """
    settings, ops, (size, num_places, num_steps) = batch.settings, batch.ops, drafts.tokens.shape
    law, log_sums = p, p.log_masses()
    if batch.shape.powered:
        raised, log_sums = p.to_power(settings.power)
        law = raised.summed()
    num_particles, each = num_places // num_chains, slice(None, None, num_chains)
    shape = size * num_particles, num_chains, num_steps
    found = _verified(batch, drafts, law, shape, settings.num_steps.unsqueeze(1))
    ends, sums = drafts.ends, log_sums.double().view(size, num_places, -1)
    first = torch.arange(0, log_sums.numel(), num_chains * (num_steps + 1), device=sums.device)
    chain = first
    if num_chains > 1:
        chain = found.winner + num_chains * torch.arange(len(first), device=sums.device)
        first = chain * (num_steps + 1)  # [G * P] rows of p after the particles
        ends, sums = (x.flatten(0, 1)[chain].view(size, num_particles, -1) for x in (ends, sums))
    present = population.present[:, each]  # [G, P]
    live = present & ~population.ended[:, each]
    num_kept = found.num_columns.view(size, num_particles).where(live, 0)
    continues = live & ~(ends & (batch.column < num_kept.unsqueeze(2))).any(2)
    num_weighed = num_kept + continues
    rest = torch.arange(num_steps + 1, device=sums.device) >= num_weighed.unsqueeze(2)
    gains = sums.masked_fill(rest, 0.0).sum(2)
    ahead = _ahead(gains, num_weighed, batch.output_lengths[:, each] + num_weighed, continues)
    block = Block.of_gains(
        population.log_weights[:, each] - ahead,
        gains,
        present=present,
        ess_threshold=ess_threshold,
        scheme=settings.scheme,
        uniforms=ops.uniforms(settings.seeds, batch.position[:, each], Purpose.RESAMPLE),
    )
    decision = ops.reweight_and_resample(block)
    row, left, rejects = (
        of_each_draw(
            of_particles.view(size, -1).gather(1, decision.ancestors).flatten(),
            live.numel() * num_chains,
        )
        for of_particles in (first + num_kept.flatten(), found.left, found.rejects)
    )
    masses = None if p.log_mass is None else p.log_mass[row]
    residual = p.of_log_probs(found.residuals.log(), left)
    log_weights = decision.log_weights + ahead.gather(1, decision.ancestors)
    decision = decision._replace(
        num_columns=(num_kept.sum(1) / live.sum(1).clamp_min(1)).round().long(),
        num_kept=num_kept,
        # A column in which all particles die is not kept, but here their tokens are.
        log_weights=log_weights.masked_fill(decision.all_zero.unsqueeze(1), -torch.inf),
        verified=torch.ones_like(decision.all_zero),
    )
    if num_chains > 1:
        decision = _of_chains(decision, num_chains, chain.view(live.shape) % num_places)
    return decision, p._replace(rows=row, log_mass=masses, rejects=rejects, left=residual)


def _of_chains(decision: Decision, num_chains: int, winner: torch.Tensor) -> Decision:
    """Return a decision about P particles as one about the M chains of each.

    Args:
        decision: with fields ``[G, P]`` in place of ``[G, N]``, N = P M.
        num_chains: M.
        winner: ``[G, P]`` int64: the place of the chain that a particle goes on with, among N.
    """

    def spread(of_particles: torch.Tensor) -> torch.Tensor:
        return of_particles.unsqueeze(2).expand(-1, -1, num_chains).flatten(1)

    none = spread(torch.zeros_like(decision.num_kept))
    return decision._replace(
        num_kept=none.scatter(1, winner, decision.num_kept),
        weighed=spread(decision.weighed),
        ancestors=spread(winner.gather(1, decision.ancestors)),
        log_weights=spread(decision.log_weights),
    )


def _ahead(
    gains: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, continues: torch.Tensor
) -> torch.Tensor:
    """Return the part of each log-weight that comes of a text longer than the mean, ``[G, N]``.

    Each token multiplies a weight by its normaliser, so that among texts of unequal lengths
    resampling would prefer the shortest. Set aside while ancestors are drawn, and put back, this
    changes no mean: an auxiliary particle filter (Pitt and Shephard 1999).

    Args:
        gains: ``[G, N]`` float64 sums of this round's log normalisers.
        counts: ``[G, N]`` int64 normalisers in each.
        lengths: ``[G, N]`` int64 output tokens of each particle.
        continues: ``[G, N]`` bool: the particle has not ended. The mean length is that of these.
    """
    alive = gains > -torch.inf
    total = gains.where(alive, 0.0).sum(1, keepdim=True)
    rate = total / counts.where(alive, 0).sum(1, keepdim=True).clamp_min(1)  # nats a token
    mean = (lengths * continues).sum(1, keepdim=True) / continues.sum(1, keepdim=True)
    longer = lengths - mean.nan_to_num(torch.inf)  # a group that has ended is not corrected
    return rate * longer.where(continues, longer.clamp_min(0.0))  # short texts have ended for good


def unless(
    found: tuple[Decision, TokenDistribution],
    mine: torch.Tensor,
    other: tuple[Decision, TokenDistribution],
) -> tuple[Decision, TokenDistribution]:
    """Return ``found``, with ``other`` in its place for the groups ``mine`` ``[G]`` bool."""
    return choose(mine, other[0], found[0]), found[1].unless(mine, other[1])


def _verified(
    batch: RoundBatch,
    drafts: Drafts,
    p: TokenDistribution,
    shape: Sequence[int],
    num_steps: torch.Tensor,
) -> verification.Verified:
    """Verify the drafted chains, as the groups, chains and columns of ``shape``.

    Args:
        num_steps: ``[G, N]`` of each chain, at most.
    """
    assert drafts.q is not None, "kept where some group verifies"
    ops, positions = batch.ops, batch.position
    uniforms = ops.uniforms(batch.settings.seeds, positions, Purpose.ACCEPT).view(*shape[:2])[:, 0]
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
    present, log_weights = population.present, population.log_weights
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
        verified=~kept.by_block,
    )
