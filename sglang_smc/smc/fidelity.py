"""Measure how far output sequences are from the target distribution.

At a position of a sequence, with p and q the next-token distributions there, l = log q - log p and
x the token at that position, two numbers have mean 0 if x was drawn from p, whatever the prefix:

    l(x) - E_p l        the pull towards the draft; its variance is the information Var_p l
    log p(x) + H(p)     the innovation: above 0 the sequence is more likely than samples of p

Along a sequence the sums of both are martingales under the target. The sum of the first over that
of Var_p l is the *tilt*: 0 for the target, and near b where sequences follow p^(1 - b) q^b, of
which it is the score estimate; it is about 1 for the draft.

A round measures one position of each request, its start plus a *column* in 0..K that is drawn
before anything else of the round. The position counts if the sequence reaches it: the token may be
a kept draft token, or the target's own draw behind these. Draft tokens alone would be a biased
choice. In mode exact each mean is exactly 0: a path of a column's length with acceptance
probability a gives its next token the mass min(s, a p) by acceptance, with s the distribution of
the selected token, and (a p - s)+ by a redraw, together a p(x). So the token behind a prefix that
is reached has the distribution p.

Column K is the bonus token that the target draws behind a whole block, where there is no q. It
enters with its expectation: zero for the two sums, and for the information that of column K - 1.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.distribution import TokenDistribution, log_probs

MOST = 16.0
"""Bound of abs(l) in nats: filters leave tokens to p that q cannot draw.

The mean of the clamped l is subtracted, so the terms keep mean 0. Without filters hardly any
token lies beyond: its probabilities would differ by a factor of 10^7.
"""

LEAST = -100.0
"""Lower bound of log p, in nats, so that a token of probability zero leaves sums finite."""

NAMES = ("tilt_sum", "tilt_information", "innovation_sum", "watched_ct")
"""Names of the sums along a sequence: the last axis of all sums here."""


class Watchable(NamedTuple):
    """Inputs that select the measured column of each group."""

    uniforms: torch.Tensor  # [G] float64 in [0, 1): they select the column
    num_steps: torch.Tensor  # [G] int64 K
    normalized: torch.Tensor  # [G] bool: the target's next-token probabilities sum to 1
    greedy: torch.Tensor  # [G] bool: takes the likeliest token; not measured


class Path(NamedTuple):
    """Ancestors and tails of the particles after a round."""

    ancestors: torch.Tensor  # [G, N] int64: the particle before the round that each continues
    starts: torch.Tensor  # [G, N] int64: lengths of tails before the round
    lengths: torch.Tensor  # [G, N] int64: lengths of tails after it
    tails: torch.Tensor  # [G, N, T] int64


def columns(of: Watchable) -> torch.Tensor:
    """Return the measured column of each group, ``[G]`` int64, uniform in 0..K."""
    return (of.uniforms * (of.num_steps + 1)).long()


def drafted_columns(of: Watchable) -> torch.Tensor:
    """Return the measured column of each group, ``[G]`` int64, with K - 1 in place of K."""
    return columns(of).minimum(of.num_steps - 1).clamp_min(0)


def keep_column(
    held: torch.Tensor | None, scores: torch.Tensor, of: Watchable, step: int
) -> torch.Tensor:
    """Store a step's draft scores for the groups that measure this column.

    Args:
        held: ``[G * N, V]`` of the earlier steps, None at the first; it may be overwritten.
        scores: ``[G * N, V]`` of this step.
        of: of the groups.
        step: 0 to K - 1.

    Returns:
        ``[G * N, V]``; undefined for groups before their measured step.
    """
    if held is None:
        return scores
    here = (drafted_columns(of) == step).unsqueeze(1)  # [G, 1]
    return torch.where(here.unsqueeze(2), _grouped(scores, here), _grouped(held, here)).flatten(
        0, 1
    )


def watch(
    sums: torch.Tensor, of: Watchable, path: Path, p: TokenDistribution, q: TokenDistribution
) -> torch.Tensor:
    """Add a round's measurements to ``sums`` ``[G, N, 4]`` float64, by `NAMES`.

    Args:
        sums: of each particle after resampling.
        of: of the groups.
        path: of the particles.
        p: of ``G * N * (K + 1)`` rows; that of column k follows a chain's first k tokens.
        q: of ``G * N`` rows, those that `keep_column` returned.
    """
    size, num_particles, _ = sums.shape
    column = columns(of).unsqueeze(1)  # [G, 1]
    place = path.starts.gather(1, path.ancestors) + column  # [G, N] in the tails
    is_watched = of.normalized & ~of.greedy & (of.num_steps > 0)
    reached = is_watched.unsqueeze(1) & (place < path.lengths)
    within = place.clamp_max(path.tails.shape[2] - 1).unsqueeze(2)
    tokens = path.tails.gather(2, within).flatten()  # [G * N]
    group = torch.arange(size, device=sums.device).unsqueeze(1)
    q_rows = path.ancestors + group * num_particles
    p_rows = q_rows * (len(p.scores) // len(q.scores)) + drafted_columns(of).unsqueeze(1)
    log_p, log_q = (
        log_probs(law.scores, law.temperature, rows.flatten(), None, law.kept)
        for law, rows in ((p, p_rows), (q, q_rows))
    )
    pull, information, innovation = (
        found.view(size, num_particles) for found in measured(log_p, log_q, tokens)
    )
    is_drafted = column < of.num_steps.unsqueeze(1)
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


def measured(
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
    mass, log_mass = log_p.exp(), log_p.clamp_min(LEAST)
    mean = _sum(mass * ratio)
    information = _sum(mass * ratio.square()) - mean.square()
    of_tokens = tokens.unsqueeze(1)
    pull = ratio.gather(1, of_tokens).squeeze(1) - mean
    innovation = log_mass.gather(1, of_tokens).squeeze(1) - _sum(mass * log_mass)
    return pull, information.clamp_min(0.0), innovation


def _sum(terms: torch.Tensor) -> torch.Tensor:
    return terms.sum(1, dtype=torch.float64)


def _grouped(rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Reshape ``[G * N, V]`` to ``[G, N, V]``."""
    return rows.unflatten(0, (len(groups), -1))
