"""How far texts are from the target's law, told by the laws that they were drawn under.

At a position of a text, with p and q the laws of the next token there, l = log q - log p and x the
token that the text has, two numbers have mean 0 if x was drawn from p, whatever the text before:

    l(x) - E_p l        the text's pull towards the draft; its variance is the information Var_p l
    log p(x) + H(p)     the innovation: above 0 the text is more likely than the target's own

Over a text both are martingales under the target. The sum of the first over that of Var_p l is the
*tilt*: 0 for the target, and near b where texts follow p^(1 - b) q^b, of which it is the score
estimate; 1 is about the draft.

A round watches one position of each request, its start plus a *column* in 0..K that is drawn before
anything else of the round. What counts is whether the text reaches it, and not how: the token may
be a draft that is kept, or the target's own behind those that are. Drafts alone would be a biased
choice. In mode exact each mean is exactly 0 then: a path of a column's length that may still be
accepted with chance a hands its followers the mass min(law, a p) by acceptance and (a p - law)+
by a redraw, together a p(x), so the token behind a prefix that is reached has the law p.

Column K is the token that the target draws behind a whole block, where the draft has not looked.
It counts as what its law says: nothing for the sums, which have mean 0 as it is drawn, and for
their information what the column before has.
"""

from typing import NamedTuple

import torch

from sglang_smc.tokens.distribution import TokenDistribution, log_probs

MOST = 16.0
"""Nats that l is cut to, on both sides: filters leave tokens to p that q cannot draw.

Any function of the token has its mean taken off, so the means stay 0. Without filters hardly any
token lies beyond: it would need 10^7 times the draft's chance.
"""

LEAST = -100.0
"""Of log p, so that a token which p forbids does not make a sum infinite; no other is as rare."""

NAMES = ("tilt_sum", "tilt_information", "innovation_sum", "watched_ct")
"""What is added up along a text: the last axis of all sums here."""


class Watchable(NamedTuple):
    """What decides where each group is watched."""

    uniforms: torch.Tensor  # [G] float64 in [0, 1): they choose the column
    num_steps: torch.Tensor  # [G] int64 K
    normalized: torch.Tensor  # [G] bool: the target's next-token probabilities sum to 1
    greedy: torch.Tensor  # [G] bool: the likeliest token alone, which says nothing of a law


class Path(NamedTuple):
    """Where particles have gone in a round."""

    ancestors: torch.Tensor  # [G, N] int64: whose tail each has carried on
    starts: torch.Tensor  # [G, N] int64: lengths of tails before
    lengths: torch.Tensor  # [G, N] int64: and now
    tails: torch.Tensor  # [G, N, T] int64


def columns(of: Watchable) -> torch.Tensor:
    """The column ``[G]`` int64 in 0..K that each group watches, each as likely."""
    return (of.uniforms * (of.num_steps + 1)).long()


def drafted_columns(of: Watchable) -> torch.Tensor:
    """The same in 0..K - 1: of K the column before."""
    return columns(of).minimum(of.num_steps - 1).clamp_min(0)


def keep_column(
    held: torch.Tensor | None, scores: torch.Tensor, of: Watchable, step: int
) -> torch.Tensor:
    """Hold a step's scores of the draft where a group watches it.

    Args:
        held: ``[G * N, V]`` of the steps before, None at the first; it may be written over.
        scores: ``[G * N, V]`` of this one.
        of: of the groups.
        step: 0 to K - 1.

    Returns:
        ``[G * N, V]``: of groups whose step is yet to come anything.
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
    """Add what a round has watched to ``sums`` ``[G, N, 4]`` float64, by `NAMES`.

    Args:
        sums: of each particle as it stands now.
        of: of the groups.
        path: of the particles.
        p: of ``G * N * (K + 1)`` rows; that of column k follows a chain's first k tokens.
        q: of ``G * N`` rows, what `keep_column` has held.
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
    """Both means' terms at D tokens and the first one's variance, each ``[D]`` float64.

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
    """``[G * N, V]`` to ``[G, N, V]``."""
    return rows.unflatten(0, (len(groups), -1))
