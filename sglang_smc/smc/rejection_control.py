"""Rejection control: between weighing a drafted token and verifying it, by a constant c.

A token x ~ q is kept with probability min(1, p(x) / (c q(x))), else replaced by a draw from
what p has beyond the kept ones; what is then still amiss goes into a weight (Liu, Chen and Wong
1998, "Rejection control and sequential importance sampling", JASA 93). With

    M = min(q, p / c)                    what is kept,
    S = (p - M)+, normalised             what replaces the rest,
    proposal = M + (1 - |M|) S           the law of what comes out,

the weight p / proposal makes it proper for p. c = 0 keeps all drafts, with the weights p / q of
sequential Monte Carlo; c = 1 is speculative sampling (Leviathan et al. 2023, arXiv 2211.17192),
with weight 1. Between them c trades fresh draws from the target against even weights.

p may be unnormalised, as the powers and products of target distributions are: the weights then
have mean |p|, the mass of p. c is measured against p as it is given. As in all importance
sampling q must be positive wherever p is, but for c = 1 and normalised p, which need nothing.

Nothing uses this yet. It is for a mode in which particles replace the drafts that fit p worst,
so that populations degenerate less, at the price of a round that ends at a replacement.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.proposal import sample


class Controlled(NamedTuple):
    """Tokens after rejection control."""

    tokens: torch.Tensor  # [...] int64
    kept: torch.Tensor  # [...] bool: the draft's own token, else a replacement
    log_weights: torch.Tensor  # [...] float64: log p / proposal of the token


class Split(NamedTuple):
    """The proposal in two parts, by token."""

    kept: torch.Tensor  # [..., V] float64: M
    replaced: torch.Tensor  # [..., V] float64: (1 - |M|) S


def control(
    tokens: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    c: torch.Tensor | float,
    uniforms_keep: torch.Tensor,
    uniforms_draw: torch.Tensor,
) -> Controlled:
    """Keep or replace drafted tokens, and weigh what comes out.

    Args:
        tokens: ``[...]`` int64, drawn from q.
        log_p: ``[..., V]``, of any mass; ``-inf`` where p is 0.
        log_q: ``[..., V]``, normalised.
        c: in [0, 1], a number or ``[...]``.
        uniforms_keep, uniforms_draw: ``[...]`` float64, independent of each other and of those
            that drew the tokens.
    """
    parts = split(log_p, log_q, c)
    # A token that q cannot draw has no M either: it is not kept.
    kept = uniforms_keep * _at(_normalized(log_q), tokens) < _at(parts.kept, tokens)
    tokens = torch.where(kept, tokens, sample(parts.replaced.log(), uniforms_draw))
    proposal = _at(parts.kept + parts.replaced, tokens)
    return Controlled(tokens, kept, _at(log_p.double(), tokens) - proposal.log())


def split(log_p: torch.Tensor, log_q: torch.Tensor, c: torch.Tensor | float) -> Split:
    """The proposal ``[..., V]``, in the part that is kept and the part that replaces the rest."""
    p, q = log_p.double().exp(), _normalized(log_q)
    bound = torch.as_tensor(c, dtype=torch.float64, device=p.device).unsqueeze(-1)
    # c q <= p, not q <= p / c: c may be 0, and then all is kept, also where p is 0.
    kept = torch.where(bound * q <= p, q, p / bound)
    rest = (1.0 - kept.sum(-1, keepdim=True)).clamp_min(0.0)
    beyond = (p - kept).clamp_min(0.0)
    mass = beyond.sum(-1, keepdim=True)
    # With |p| < 1 nothing of p may be beyond though some drafts are replaced: then by draws from
    # p itself, and from q where p is 0 everywhere, with weight 0.
    other = torch.where(p.sum(-1, keepdim=True) > 0, p, q)
    beyond = torch.where(mass > 0, beyond, other)
    return Split(kept, rest * beyond / beyond.sum(-1, keepdim=True))


def _normalized(log_q: torch.Tensor) -> torch.Tensor:
    """The law ``[..., V]`` that `sample` draws from, which has no float32 rounding left."""
    q = log_q.double().exp()
    return q / q.sum(-1, keepdim=True)


def _at(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
