"""Verify the chains of a round as one multi-draft, in modes exact, mixed and auto."""

import torch

from sglang_smc.ops.interface import Ops
from sglang_smc.round.batch import Decision, Drafts, RoundBatch
from sglang_smc.smc import verification, weighing
from sglang_smc.smc.distribution import NextTokens, TokenDistribution
from sglang_smc.smc.randomness import Purpose
from sglang_smc.state.population import Population


def verify(
    batch: RoundBatch,
    population: Population,
    drafts: Drafts,
    p: TokenDistribution,
    log_p: torch.Tensor,
    failure: torch.Tensor,
    ops: Ops,
) -> Decision:
    """Keep the columns that the block's evidence covers, or that exact verification accepts.

    The longer of the two is kept. Trees, at temperature 0, keep what the evidence covers: the
    target's own tokens. All particles become copies of one winner: they start and end such a round
    with one sequence, which is emitted at once. With masks, the masked and renormalised
    distributions are compared.

    Args:
        p, log_p: ``[G, N, K + 1]`` the target distribution, and log p of the draft tokens.
        failure: ``[G]`` int64 `Failure`.
    """
    settings = batch.settings
    if drafts.q is None:
        found = verification.nothing(settings.num_steps)
    else:
        positions = batch.starts.unsqueeze(2) + batch.column  # [G, N, K]
        found = verification.verify(
            ops,
            drafts.tokens,
            drafts.ends,
            p,
            drafts.q,
            ops.uniforms(settings.seeds, positions, Purpose.ACCEPT),
            num_chains=settings.num_particles,
            num_steps=settings.num_steps,
        )
    kept = ops.keep(
        found,
        log_p,
        drafts.log_q,
        drafts.before_end,
        drafts.ends,
        population.present,
        settings.num_steps,
        settings.evidence_threshold,
        ops.uniforms(settings.seeds, batch.furthest[:, :1], Purpose.KEEP)[:, 0],
        ops.uniforms(settings.seeds, batch.furthest[:, :1], Purpose.RESAMPLE)[:, 0],
    )
    masses = None
    if p.log_mass is not None:
        by_column = p.log_mass.view_as(log_p)  # [G, N, K + 1]
        masses = log_mass_of_path(by_column, kept, drafts.ends)
        masses = masses.unsqueeze(1).expand(batch.starts.shape)
    row, left = (
        of_groups.unsqueeze(1).expand(batch.starts.shape).flatten()
        for of_groups in (kept.row, found.left)
    )
    residual = None
    if drafts.q is not None:
        residual = TokenDistribution.of_log_probs(found.residuals.log(), left)
    law = p._replace(rows=row, log_mass=None)
    next_tokens = NextTokens(law, masses, kept.rejects, residual)
    decision = one_lineage(population, kept, next_tokens, failure)
    if not batch.shape.branches:
        return decision
    return decision._replace(verified=decision.verified | settings.greedy)  # by evidence, too


def log_mass_of_path(
    log_mass: torch.Tensor, kept: verification.Kept, ends: torch.Tensor
) -> torch.Tensor:
    """Return 0, or -inf where masks forbid all tokens after some kept prefix, ``[G]``.

    Args:
        log_mass: ``[G, N, K + 1]`` log of the mass that masks leave of p behind each prefix.
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


def one_lineage(
    population: Population, kept: verification.Kept, next_tokens: NextTokens, failure: torch.Tensor
) -> Decision:
    """Make all particles copies of the winner. Weights stay equal, so the evidence stays.

    Args:
        kept: the kept columns of each group's winner.
        next_tokens: the distribution of the token behind it.
        failure: ``[G]`` int64 `Failure`.
    """
    itself = torch.arange(population.present.shape[1], device=failure.device)
    never = torch.zeros_like(kept.by_block)
    # A particle that was drawn when its group became smaller may have ended before the round.
    live = population.present & ~population.ended
    num_columns = kept.num_columns.where(live.any(1), 0)
    return Decision(
        cut=weighing.BlockCut(num_columns, population.log_weights, kept.ess, never, never),
        num_kept=num_columns.unsqueeze(1).where(live, 0),
        resampled=weighing.Resampled(
            ancestors=kept.winner.unsqueeze(1).where(population.present, itself),
            log_weights=population.log_weights,
            log_evidence=torch.zeros_like(population.log_evidence),
        ),
        next_tokens=next_tokens,
        verified=~kept.by_block,
        failure=failure,
    )
