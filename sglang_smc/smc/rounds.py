"""The decisions of one round, for all groups at once.

A round drafts K tokens for each particle, scores them, and then decides how
many of the K columns the group keeps, and whether it is resampled there.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.weights import accumulate, effective_sample_size, log_mean_exp, normalized


class Cut(NamedTuple):
    """Where a round stops, per group."""

    num_columns: torch.Tensor  # [G] int64 in 0..K: drafted tokens kept
    log_weights: torch.Tensor  # [G, N] after the kept columns
    ess: torch.Tensor  # [G] effective sample size of those weights
    resample: torch.Tensor  # [G] bool: the effective sample size is below the threshold
    all_zero: torch.Tensor  # [G] bool: every particle died in the column after the cut


class Resampled(NamedTuple):
    """A population after its resampling step."""

    ancestors: torch.Tensor  # [G, N] int64
    log_weights: torch.Tensor  # [G, N]
    log_evidence: torch.Tensor  # [G] what this step adds to log Z-hat


def cut(
    log_weights: torch.Tensor,
    increments: torch.Tensor,
    *,
    ess_threshold: float,
    resample_at: str,
) -> Cut:
    """Choose the columns that a round keeps (arXiv 2604.15672, section 3).

    ``block`` keeps all K and tests the effective sample size once, after them.
    ``token`` tests it after every column and stops at the first that fails.
    Either stops before a column in which all particles die: the target's own draw
    takes that column's place, so a round always advances by at least one token.
    At temperature 0 this is greedy verification: keep the drafts that agree.

    Args:
        log_weights: ``[G, N]`` before the round.
        increments: ``[G, N, K]`` of ``log p - log q``, 0 where a particle has ended.
        ess_threshold: tau; resample where ESS < tau * N.
        resample_at: ``block`` or ``token``.
    """
    running = accumulate(log_weights, increments).transpose(1, 2)  # [G, K + 1, N]
    ess = effective_sample_size(running)  # [G, K + 1]
    alive = (running > -torch.inf).any(-1)  # [G, K + 1]; a group never begins dead
    num_alive_columns = alive.long().cumprod(-1).sum(-1) - 1  # [G]
    low = ess < ess_threshold * log_weights.shape[-1]  # [G, K + 1]
    num_columns = num_alive_columns
    if resample_at == "token":
        num_columns = torch.minimum(_first_true(low[:, 1:]) + 1, num_alive_columns)
    at = num_columns.unsqueeze(-1)
    return Cut(
        num_columns=num_columns,
        log_weights=running.gather(1, at.unsqueeze(-1).expand(-1, -1, running.shape[-1])).squeeze(
            1
        ),
        ess=ess.gather(1, at).squeeze(1),
        resample=low.gather(1, at).squeeze(1),
        all_zero=(num_columns == num_alive_columns) & (num_alive_columns < increments.shape[-1]),
    )


def resample(
    log_weights: torch.Tensor, where: torch.Tensor, uniforms: torch.Tensor, method: str
) -> Resampled:
    """Resample the groups in ``where``; the others keep their particles and weights.

    Args:
        log_weights: ``[G, N]``, at least one finite a group.
        where: ``[G]`` bool.
        uniforms: ``[G, N]`` float64.
        method: a key of `SCHEMES`.
    """
    chosen = SCHEMES[method](normalized(log_weights), uniforms)
    return _replace(log_weights, where, chosen)


def collapse(
    log_weights: torch.Tensor, where: torch.Tensor, uniforms: torch.Tensor, selection: str
) -> Resampled:
    """Let one particle stand for its whole group, in the groups of ``where``.

    ``sample`` draws it in proportion to the weights, which keeps the method proper;
    ``argmax`` takes the heaviest, which does not.

    Args:
        uniforms: ``[G]`` float64.
    """
    if selection == "argmax":
        chosen = log_weights.argmax(-1, keepdim=True)
    else:
        chosen = SCHEMES["multinomial"](normalized(log_weights), uniforms.unsqueeze(-1))
    return _replace(log_weights, where, chosen.expand_as(log_weights))


def still_open(ends: torch.Tensor) -> torch.Tensor:
    """Which columns still lie open: ``[..., K]`` ends to ``[..., K]`` "none before this one"."""
    return (ends.long().cumsum(-1) - ends.long()) == 0


def common_prefix(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Number of leading tokens that all particles of a group share.

    Args:
        tokens: ``[G, N, T]``.
        lengths: ``[G, N]``; what lies beyond a particle's length is ignored.

    Returns:
        ``[G]`` int64.
    """
    agree = (tokens == tokens[:, :1]).all(1)  # [G, T]
    return torch.minimum(agree.long().cumprod(-1).sum(-1), lengths.amin(-1))


def _replace(log_weights: torch.Tensor, where: torch.Tensor, chosen: torch.Tensor) -> Resampled:
    """Make ``chosen`` the ancestors in ``where``, with equal weights and their mean banked."""
    stay = torch.arange(log_weights.shape[-1], device=log_weights.device)
    selected = where.unsqueeze(-1)
    return Resampled(
        ancestors=torch.where(selected, chosen, stay),
        log_weights=torch.where(selected, 0.0, log_weights),
        log_evidence=torch.where(where, log_mean_exp(log_weights), 0.0),
    )


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """Index of the first True along the last dimension, its size where there is none."""
    return (~flags).long().cumprod(-1).sum(-1)
