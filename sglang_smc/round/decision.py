"""What a round drafts, and what is decided about it: the forms in which both leave their steps."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch

from sglang_smc.smc import rounds
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.resizing import Resized
from sglang_smc.state.population import Population


class Drafts(NamedTuple):
    """What the draft proposed, and with what probability."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens
    ends: torch.Tensor  # [G, N, K] bool: the text ends with this token
    before_end: torch.Tensor  # [G, N, K] bool: up to the particle's end, within its request's K
    q: torch.Tensor | None  # [G, N, K, V] log q of all tokens; kept where some group verifies


class Decision(NamedTuple):
    """What becomes of the drafts: weighed or verified, both end in these."""

    cut: rounds.BlockCut
    num_kept: torch.Tensor  # [G, N] drafted tokens that each particle keeps
    resampled: rounds.Resampled  # who goes on then, and with what weight
    next_tokens: TokenDistribution  # of the G * N particles
    verified: torch.Tensor  # [G] bool: exact verification had the last word
    failure: torch.Tensor  # [G] int64 `Failure`, where logits gave no law to decide by


def no_drafts(population: Population) -> Drafts:
    """The drafts of a round with K = 0."""
    nothing = population.tokens[:, :, :0]  # [G, N, 0]
    return Drafts(nothing, nothing.float(), nothing.bool(), nothing.bool(), None)


Chosen = TypeVar("Chosen", Decision, rounds.Reweighted, Resized)


def by_method(
    scheme: torch.Tensor, methods: Iterable[str], step: Callable[[str], Chosen]
) -> Chosen:
    """A resampling step of each group by its own method: ``scheme`` ``[G]``, in ``methods``."""
    first, *others = methods
    found = step(first)
    for method in others:
        mine = scheme == list(SCHEMES).index(method)
        found = choose(mine, step(method), found)
    return found


def choose(where: torch.Tensor, yes: Chosen, no: Chosen) -> Chosen:
    """``yes`` for the groups ``where`` ``[G]`` bool, ``no`` for the others."""
    return yes._make(_choose(where, a, b) for a, b in zip(yes, no, strict=True))


Field = torch.Tensor | TokenDistribution | rounds.BlockCut | rounds.Resampled


def _choose(where: torch.Tensor, yes: Field, no: Field) -> Field:
    """One field of `choose`: a tensor ``[G, ...]``, a distribution, or a tuple of tensors."""
    if isinstance(yes, torch.Tensor) and isinstance(no, torch.Tensor):
        return torch.where(where.view(-1, *(1,) * (yes.dim() - 1)), yes, no)
    if isinstance(yes, TokenDistribution) and isinstance(no, TokenDistribution):
        return yes.where(where, no)
    assert isinstance(yes, (rounds.BlockCut, rounds.Resampled)) and isinstance(no, type(yes))
    return yes._make(_choose(where, a, b) for a, b in zip(yes, no, strict=True))
