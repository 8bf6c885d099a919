"""Modes exact, mixed and auto: the chains of a round verified as one multi-draft."""

import torch

from sglang_smc.ops.interface import Ops
from sglang_smc.requests.failures import failure_of_round
from sglang_smc.round.batch import RoundBatch
from sglang_smc.round.decision import Decision, Drafts
from sglang_smc.smc import exact, mixed, rounds
from sglang_smc.smc.randomness import Purpose
from sglang_smc.state.population import Population
from sglang_smc.tokens.distribution import TokenDistribution


def verify(
    batch: RoundBatch, population: Population, drafts: Drafts, p: TokenDistribution, ops: Ops
) -> Decision:
    """Keep the columns that the block's evidence covers, or that exact verification accepts.

    Of the two the longer. All particles go on as one winner: they begin and end such a round
    with one text, which is emitted at once.
    """
    assert drafts.q is not None
    settings = batch.settings
    positions = batch.starts.unsqueeze(2) + batch.column  # [G, N, K]
    # The laws that masks leave are compared, whatever masks leave. The last column has no drafted
    # token to score: any will do.
    log_p = p._replace(log_mass=None).score(ops, torch.nn.functional.pad(drafts.tokens, (0, 1)))
    found = exact.verify(
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
        log_p,  # [G, N, K + 1]
        drafts.log_q,
        drafts.before_end,
        drafts.ends,
        population.present,
        settings.num_steps,
        settings.evidence_threshold,
        ops.uniforms(settings.seeds, batch.furthest, Purpose.KEEP)[:, 0],
        ops.uniforms(settings.seeds, batch.furthest, Purpose.RESAMPLE)[:, 0],
    )
    failure = failure_of_round(
        log_p, drafts.log_q, drafts.before_end, drafts.ends, ~population.ended
    )
    decision = one_lineage(population, kept, law_behind(found, kept, p, ops), failure)
    if p.log_mass is None:
        return decision
    log_mass = p.log_mass.view(log_p.shape)  # [G, N, K + 1]
    leaves = log_mass_of_path(log_mass, kept, drafts.ends)
    return decision._replace(next_tokens=decision.next_tokens._replace(log_mass=leaves))


def law_behind(
    found: exact.Verified, kept: mixed.Kept, p: TokenDistribution, ops: Ops
) -> torch.Tensor:
    """Log-probabilities of the token behind what is kept, ``[G, V]``, up to a constant."""
    left = found.residuals[found.left].log()
    return torch.where(kept.rejects.unsqueeze(1), left, p.at(kept.row).log_probs(ops))


def log_mass_of_path(log_mass: torch.Tensor, kept: mixed.Kept, ends: torch.Tensor) -> torch.Tensor:
    """``[G]``: 0, or -inf where no token may follow some prefix of what a group keeps.

    Args:
        log_mass: ``[G, N, K + 1]`` of what masks leave of p behind each prefix.
        ends: ``[G, N, K]`` bool: the text ends with this token.
    """
    group = torch.arange(len(log_mass), device=log_mass.device)
    column = torch.arange(log_mass.shape[2], device=log_mass.device)
    within = column < kept.num_columns.unsqueeze(1)  # [G, K + 1]
    has_ended = (ends[group, kept.winner] & within[:, :-1]).any(1, keepdim=True)
    follows = within | ((column == kept.num_columns.unsqueeze(1)) & ~has_ended)
    stuck = (log_mass[group, kept.winner] == -torch.inf) & follows
    return torch.zeros_like(log_mass[:, 0, 0]).masked_fill(stuck.any(1), -torch.inf)


def one_lineage(
    population: Population, kept: mixed.Kept, law: torch.Tensor, failure: torch.Tensor
) -> Decision:
    """Make all particles the winner. Their weights stay equal, so nothing is ever banked.

    Args:
        kept: what verification keeps of each group's winner.
        law: ``[G, V]`` log-probabilities of the token behind it.
        failure: ``[G]`` int64 `Failure`.
    """
    size, num_particles = population.present.shape
    itself = torch.arange(num_particles, device=failure.device)
    group = torch.arange(size, device=failure.device)
    never = torch.zeros_like(kept.by_block)
    # One that was drawn for its group as this became smaller may have ended before the round.
    live = population.present & ~population.ended
    num_columns = kept.num_columns.where(live.any(1), 0)
    return Decision(
        cut=rounds.BlockCut(num_columns, population.log_weights, kept.ess, never, never),
        num_kept=num_columns.unsqueeze(1).where(live, 0),
        resampled=rounds.Resampled(
            ancestors=kept.winner.unsqueeze(1).where(population.present, itself),
            log_weights=population.log_weights,
            log_evidence=torch.zeros_like(population.log_evidence),
        ),
        next_tokens=TokenDistribution.of_log_probs(
            law, group.unsqueeze(1).expand(-1, num_particles).flatten()
        ),
        verified=~kept.by_block,
        failure=failure,
    )
