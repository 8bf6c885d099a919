"""Measure how far output sequences are from the target distribution.

At a position of a sequence, with p and q the next-token distributions there, l = log q - log p and
x the token at that position, the *pull* towards the draft is l(x) - E_p l, its *information* Var_p
l, and the *innovation* log p(x) + H(p). Along a sequence the sums of pull and innovation are
martingales under the target; docs/fidelity.md, "What is measured", has what they say.

A round measures one position of each request, its start plus a *column* in 0..K that is drawn
before anything else of the round. The position counts if the sequence reaches it: the token may be
a kept draft token, or the target's own draw after these. Draft tokens alone would be a biased
choice. In mode exact each mean is exactly 0: a path of a column's length with acceptance
probability a gives its next token the mass min(s, a p) by acceptance, with s the distribution of
the selected token, and (a p - s)+ by a redraw, together a p(x). So the token after a prefix that
is reached has the distribution p.

Column K is the bonus token that the target draws after a whole block, where there is no q. It
enters with its expectation: zero for the two sums, and for the information that of column K - 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_smc.smc.distribution import TokenDistribution

MOST = 16.0
"""Bound of abs(l) in nats: filters leave tokens to p that q cannot draw.

The mean of the clamped l is subtracted, so the terms keep mean 0. Without filters hardly any
token lies beyond: its probabilities would differ by a factor of 10^7.
"""

LEAST = -100.0
"""Lower bound of log p, in nats, so that a token of probability zero leaves sums finite."""

NAMES = ("tilt_sum", "tilt_information", "innovation_sum", "watched_ct")
"""Names of the sums along a sequence: the last axis of all sums here."""


def columns(coins: torch.Tensor, num_steps: torch.Tensor) -> torch.Tensor:
    """Return the measured column of each group, ``[G]`` int64, by uniforms ``coins``: one of 0..K.

    Column K, where there is no q, reads the distributions of column K - 1.
    """
    return (coins * (num_steps + 1)).long()


def _drafted(coins: torch.Tensor, num_steps: torch.Tensor) -> torch.Tensor:
    """Return the measured columns with K - 1 in place of K."""
    return columns(coins, num_steps).minimum(num_steps - 1).clamp_min(0)


def keep_column(
    q: Sequence[TokenDistribution], coins: torch.Tensor, num_steps: torch.Tensor
) -> torch.Tensor:
    """Return the draft scores of each group's measured column, K - 1 for column K, ``[G * N, V]``.

    Args:
        q: of each draft step, ``G * N`` rows.
        coins, num_steps: ``[G]`` of `columns`.
    """
    found = q[0].scores
    drafted = _drafted(coins, num_steps).view(-1, 1, 1)  # [G, 1, 1]
    for step, of_step in enumerate(q[1:], 1):
        of_groups = (one.unflatten(0, (len(coins), -1)) for one in (of_step.scores, found))
        found = torch.where(drafted == step, *of_groups).flatten(0, 1)
    return found


class Path(NamedTuple):
    """Hold what a round has appended, and where it is measured."""

    coins: torch.Tensor  # [G] float64 uniforms, of `columns`
    num_steps: torch.Tensor  # [G] int64 K of each group; without drafts nothing is measured
    measured: torch.Tensor  # [G] bool: which groups are
    ancestors: torch.Tensor  # [G, N] int64: the particle before the round that each continues
    starts: torch.Tensor  # [G, N] int64 lengths of tails before the round
    lengths: torch.Tensor  # [G, N] int64 after it
    tails: torch.Tensor  # [G, N, T] int64 after it


def watch(
    sums: torch.Tensor, path: Path, p: TokenDistribution, q: TokenDistribution
) -> torch.Tensor:
    """Add a round's measurements to ``sums`` ``[G, N, 4]`` float64, by `NAMES`.

    Args:
        sums: of each particle after resampling.
        p: of ``G * N * (K + 1)`` rows; that of column k follows a chain's first k tokens.
        q: of ``G * N`` rows, those of `keep_column`.
    """
    coins, num_steps, measured, ancestors, starts, lengths, tails = path
    size, num_particles, _ = sums.shape
    column = columns(coins, num_steps).unsqueeze(1)  # [G, 1]
    place = starts.gather(1, ancestors) + column  # [G, N] in the tails
    reached = (measured & (num_steps > 0)).unsqueeze(1) & (place < lengths)
    tokens = tails.gather(2, place.clamp_max(tails.shape[2] - 1).unsqueeze(2)).flatten()  # [G * N]
    q_rows = ancestors + torch.arange(size, device=sums.device).unsqueeze(1) * num_particles
    drafted = _drafted(coins, num_steps).unsqueeze(1)
    p_rows = q_rows * (len(p.scores) // len(q.scores)) + drafted
    log_p = p._replace(rows=p_rows.flatten(), greedy=None).log_probs()
    log_q = q._replace(rows=q_rows.flatten(), greedy=None).log_probs()
    pull, information, innovation = (
        found.view(size, num_particles) for found in moments(log_p, log_q, tokens)
    )
    is_drafted = column < num_steps.unsqueeze(1)
    new = torch.stack(
        [
            torch.where(is_drafted, pull, 0.0),
            information,
            torch.where(is_drafted, innovation, 0.0),
            torch.ones_like(information),
        ],
        dim=2,
    )
    return sums + torch.where(reached.unsqueeze(2), new, 0.0)


def moments(
    log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pull, information and innovation at D tokens, each ``[D]`` float64.

    Args:
        log_p, log_q: ``[D, V]`` float32 or float64, normalized.
        tokens: ``[D]`` int64.

    Returns:
        ``l(x) - E_p l``, ``Var_p l`` and ``log p(x) + H(p)``.
    """
    ratio = (log_q - log_p).nan_to_num(0.0, MOST, -MOST).clamp(-MOST, MOST)  # l
    mass = log_p.exp()
    log_mass = log_p.clamp_min(LEAST)
    mean = _sum(mass * ratio)
    information = _sum(mass * ratio.square()) - mean.square()
    of_tokens = tokens.unsqueeze(1)
    pull = ratio.gather(1, of_tokens).squeeze(1) - mean
    innovation = log_mass.gather(1, of_tokens).squeeze(1) - _sum(mass * log_mass)
    return pull, information.clamp_min(0.0), innovation


def _sum(terms: torch.Tensor) -> torch.Tensor:
    return terms.sum(1, dtype=torch.float64)
