"""What a round drafts, and what is decided about it: the forms in which both leave their steps."""

from typing import NamedTuple

import torch

from sglang_smc.smc import exact, rounds
from sglang_smc.state.counters import num_childless
from sglang_smc.state.distribution import TokenDistribution
from sglang_smc.state.population import Population


class Drafts(NamedTuple):
    """What the draft proposed, and with what probability."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens
    ends: torch.Tensor  # [G, N, K] bool: the text ends with this token
    before_end: torch.Tensor  # [G, N, K] bool: up to the particle's end, within its request's K
    law: torch.Tensor | None  # [G, N, K, V] log q of all tokens; kept where some group verifies


class Decision(NamedTuple):
    """What becomes of the drafts: weighed or verified, both end in these."""

    cut: rounds.BlockCut
    num_kept: torch.Tensor  # [G, N] drafted tokens that each particle keeps
    resampled: rounds.Resampled  # who goes on then, and with what weight
    next_tokens: TokenDistribution  # of the G * N particles' next tokens
    verified: torch.Tensor  # [G] bool: exact verification had the last word
    failure: torch.Tensor  # [G] int64 `Failure`, where logits gave no law to decide by

    def num_killed(self, present: torch.Tensor) -> torch.Tensor:
        """Particles of ``present`` ``[G, N]`` that left no child where weights resampled: ``[G]``.

        The winner of a verification is no resampling: all others were its rivals, not its equals.
        """
        return num_childless(self.resampled.ancestors, present) * self.cut.resample


def open_columns(ends: torch.Tensor, num_steps: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """The columns up to each particle's end, and within its request's K: ``[G, N, K]`` bool.

    Args:
        ends: ``[G, N, K]`` bool: the text ends with this token.
        num_steps: ``[G]`` K of each.
        ended: ``[G, N]`` bool: before the round.
    """
    in_block = torch.arange(ends.shape[2], device=ends.device) < num_steps.view(-1, 1, 1)
    return rounds.still_open(ends) & in_block & ~ended.unsqueeze(2)


def no_drafts(population: Population) -> Drafts:
    nothing = population.tokens[:, :, :0]  # [G, N, 0]
    return Drafts(nothing, nothing.float(), nothing.bool(), nothing.bool(), None)


def all_log_probs(laws: list[TokenDistribution], shape: torch.Size) -> torch.Tensor:
    """K laws of G * N rows as ``[G, N, K, V]``."""
    return torch.stack([law.log_probs().unflatten(0, shape) for law in laws], dim=2)


def log_mass_of_path(
    log_mass: torch.Tensor, kept: exact.Verified, ends: torch.Tensor
) -> torch.Tensor:
    """``[G]``: 0, or -inf where no token may follow some prefix of what a group keeps.

    Args:
        log_mass: ``[G, N, K + 1]`` of what the grammar leaves of p behind each prefix.
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
    population: Population,
    kept: exact.Verified,
    ess: torch.Tensor,
    by_block: torch.Tensor,
    failure: torch.Tensor,
) -> Decision:
    """All particles become the winner. Their weights stay equal, so nothing is ever banked."""
    size, num_particles = population.present.shape
    itself = torch.arange(num_particles, device=ess.device)
    group = torch.arange(size, device=ess.device)
    never = torch.zeros_like(by_block)
    # One that was drawn for its group as this became smaller may have ended before the round.
    live = population.present & ~population.ended
    num_columns = kept.num_columns.where(live.any(1), 0)
    return Decision(
        cut=rounds.BlockCut(num_columns, population.log_weights, ess, never, never),
        num_kept=num_columns.unsqueeze(1).where(live, 0),
        resampled=rounds.Resampled(
            ancestors=kept.winner.unsqueeze(1).where(population.present, itself),
            log_weights=population.log_weights,
            log_evidence=torch.zeros_like(population.log_evidence),
        ),
        next_tokens=TokenDistribution.of_log_probs(
            kept.next_probs.log(), group.unsqueeze(1).expand(-1, num_particles).flatten()
        ),
        verified=~by_block,
        failure=failure,
    )
