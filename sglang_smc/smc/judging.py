"""What potentials and votes do to weights."""

from typing import NamedTuple

import torch


class Revalued(NamedTuple):
    """A population whose weights hold new values of potentials."""

    log_weights: torch.Tensor  # [G, N] float64
    log_values: torch.Tensor  # [G, N] float64: log phi that these hold now
    log_gains: torch.Tensor  # [G, N] float64: what they gained


def revalue(log_weights: torch.Tensor, held: torch.Tensor, log_values: torch.Tensor) -> Revalued:
    """Let weights hold phi_t in place of phi_{t-1}: they gain log phi_t - log phi_{t-1}.

    The target of the particles is p phi_t then, whatever the values in between were, since they
    cancel (Chopin and Papaspiliopoulos, An Introduction to Sequential Monte Carlo, 2020,
    section 5.2). What has died stays dead.

    Args:
        log_weights: ``[G, N]`` float64.
        held: ``[G, N]`` float64 log phi_{t-1}, finite where a particle is alive.
        log_values: ``[G, N]`` float64 log phi_t; NaN keeps what is held.
    """
    is_told = (log_weights > -torch.inf) & ~log_values.isnan()
    gains = torch.where(is_told, log_values - held, 0.0)
    return Revalued(log_weights + gains, torch.where(is_told, log_values, held), gains)


def elect(log_weights: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Leave the weight to those who give the answer that weighs most: log-weights ``[G, N]``.

    Their sum stays what it was. Of two answers that weigh the same the one that is given first
    wins. Groups in which nobody gives one stay as they are.

    Args:
        log_weights: ``[G, N]`` float64.
        answers: ``[G, N]`` int64, equal numbers for equal answers; -1 for none.
    """
    gives = answers >= 0
    same = (answers.unsqueeze(1) == answers.unsqueeze(2)) & gives.unsqueeze(1)  # [G, N, N]
    totals = log_weights.unsqueeze(1).masked_fill(~same, -torch.inf).logsumexp(2)  # [G, N]
    winner = answers.gather(1, totals.argmax(1, keepdim=True))  # [G, 1]
    votes = (answers == winner) & gives
    won = log_weights.masked_fill(~votes, -torch.inf)
    log_share = won.logsumexp(1, keepdim=True) - log_weights.logsumexp(1, keepdim=True)
    is_decided = log_share.isfinite()  # somebody who weighs anything gives an answer
    return torch.where(is_decided, won - log_share, log_weights)
