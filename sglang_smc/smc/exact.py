"""Exact verification of N drafted chains: the output follows p, whatever q is.

The chains were drafted independently from q and start from one text. Two ideas meet:

*Block verification* (Sun et al. 2025, arXiv 2403.10444) follows one path to its end before it
decides how much of it to accept. A prefix carries the chance ``a`` with which it may still be
accepted, a = min(1, a p(x) / q(x)) after each token x. What a p has beyond q is the residual,
of mass S = sum (a p - q)+: the path is cut here, and a token drawn from the residual, with
probability S / (S + 1 - a), unless a longer prefix is accepted. Of all methods with one chain
this accepts most.

*Selection* makes one path of many chains (Khisti et al. 2025, arXiv 2410.18234; with block
verification Thomas and Pal 2026, arXiv 2602.16961). Of the m chains that follow the path so
far one is chosen by its next token, and that token's law takes the place of q above. Any rule
is exact whose law is known. Even the best rejects with probability max over token sets A of
q(A)^m - a p(A), since all m draws may fall into A: the bound of optimal transport (Hu et al.
2025, arXiv 2502.18779), here with the path's chance, as in UniVer (Weng et al. 2026, arXiv
2605.04543). The greedy order of Thomas and Pal overshoots as m grows; `selection`, which is
this project's own, stays within about 1 % of the bound.

Only how many chains follow the path is used, never what the others hold, so the chosen token
and the chains behind it are fresh draws from q.

The levels that the rule is made of may depend on tokens in any way. So tokens are put into bins by
log p - log q, and what a column asks of the vocabulary is the mass that p and q have in each bin,
and what p has left. Nothing is sorted, and only the path's own row of p and of q is looked at.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from sglang_smc.smc.selection import select, selection_rule
from sglang_smc.tokens.distribution import Draws, TokenDistribution

NUM_BINS = 128
BINS_PER_NAT = 16  # a power of two: then no rounding decides where a bin begins
_UNIT = 2.0**48  # masses are counted in its fractions


class Verified(NamedTuple):
    """What a walk accepted, per group, and from what the token that follows is drawn."""

    num_columns: torch.Tensor  # [G] int64 in 0..num_steps: drafted tokens accepted
    winner: torch.Tensor  # [G] int64: a chain that carries them
    rejects: torch.Tensor  # [G] bool: from what is left of p behind them; else from p itself
    left: torch.Tensor  # [G] int64: the row of `residuals` that has it
    residuals: torch.Tensor  # [R, V] float32: what was left of p, of any mass


class Chains(NamedTuple):
    """What `verify` is told of the chains."""

    tokens: torch.Tensor  # [G, N, K] int64
    ends: torch.Tensor  # [G, N, K] bool
    uniforms: torch.Tensor  # [G, N, K] float64
    num_steps: torch.Tensor  # [G] int64


class Walk(NamedTuple):
    """The selected path so far, per group."""

    follows: torch.Tensor  # [G, N] bool: the chains that carry it
    chance: torch.Tensor  # [G] float64: a, with which it may still be accepted
    walking: torch.Tensor  # [G] bool: it goes on
    p_row: torch.Tensor  # [G] int64: the row of p that follows it, of G * N * (K + 1)
    q_row: torch.Tensor  # [G] int64: the row of this column's q, of G * N
    found: Verified  # the longest prefix accepted so far


class Walker(Draws, Protocol):
    """Who walks: `begin_walk` and `walk_on`, or kernels."""

    @property
    def begin_walk(self) -> Callable[..., Walk]: ...

    @property
    def walk_on(self) -> Callable[..., Walk]: ...


class _Fork(NamedTuple):
    """What may come next on the path, per group."""

    bins: torch.Tensor  # [G, V] int64
    levels: torch.Tensor  # [G, B] int64: the selection's rule
    target: torch.Tensor  # [G, V]: p times the path's chance
    law: torch.Tensor  # [G, V]: probability that each token is the selected one


def verify(
    walker: Walker,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    uniforms: torch.Tensor,
    *,
    num_steps: torch.Tensor | None = None,
    num_chains: torch.Tensor | None = None,
) -> Verified:
    """Walk down a selected path of each group, and accept a prefix of it.

    A round's numbers must be fresh, those that drew the tokens as well as ``uniforms``: where a
    round stops depends on all its columns, so what it drew behind that is no longer random.

    Args:
        walker: the torch functions of this module, or kernels.
        tokens: ``[G, N, K]`` int64, drafted from q.
        ends: ``[G, N, K]`` bool: the text ends with this token, so the walk does too.
        p: of ``G * N * (K + 1)`` draws; that of column k follows a chain's first k tokens.
        q: K of ``G * N`` draws, what each chain's token k was drawn from.
        uniforms: ``[G, N, K]`` float64.
        num_steps: ``[G]`` int64 in 1..K: a group's columns; None for K.
        num_chains: ``[G]`` int64 in 1..N: a group's chains; None for N.
    """
    size, max_chains, max_steps = tokens.shape
    if num_steps is None:
        num_steps = tokens.new_full((size,), max_steps)
    if num_chains is None:
        num_chains = tokens.new_full((size,), max_chains)
    chains = Chains(tokens, ends, uniforms, num_steps)
    walk = walker.begin_walk(chains, num_chains, p.scores.shape[1])
    for step in range(max_steps):
        log_p = p.at(walk.p_row).log_probs(walker)  # [G, V]
        log_q = q[step].at(walk.q_row).log_probs(walker)
        walk = walker.walk_on(walk, chains, log_p, log_q, step)
    return walk.found


def begin_walk(chains: Chains, num_chains: torch.Tensor, vocab_size: int) -> Walk:
    """The walk of all groups at the root, with all of their chains: ``[G]`` int64, 1 or more."""
    size, max_chains, max_steps = chains.tokens.shape
    device = num_chains.device
    group, none = torch.arange(size, device=device), torch.zeros_like(num_chains)
    return Walk(
        follows=torch.arange(max_chains, device=device) < num_chains.unsqueeze(1),
        chance=torch.ones_like(none, dtype=torch.float64),
        walking=torch.ones_like(none, dtype=torch.bool),
        p_row=group * max_chains * (max_steps + 1),
        q_row=group * max_chains,
        found=Verified(none, none, none.bool(), group, none.new_zeros(size, vocab_size).float()),
    )


def walk_on(
    walk: Walk, chains: Chains, log_p: torch.Tensor, log_q: torch.Tensor, step: int
) -> Walk:
    """Stop behind the path, or select its next token; on with what was begun in `begin_walk`.

    Args:
        walk: of which groups that walk no more are left as they are; it may be written over.
        chains: all of them.
        log_p, log_q: ``[G, V]`` float32, what follows the path: rows ``walk.p_row`` of p and
            ``walk.q_row`` of column ``step`` of q. Where a group walks no more, anything.
        step: the column, 0 to K - 1.
    """
    fork = _fork(walk, log_p, log_q)
    stopped = _stop(walk, fork, chains, step)
    return _go_on(stopped, fork, chains, step)


def _fork(walk: Walk, log_p: torch.Tensor, log_q: torch.Tensor) -> _Fork:
    """The laws behind the path, and the rule that selects its next token."""
    bins = bins_of(log_p, log_q, walk.chance)
    p, q = log_p.exp(), log_q.exp()
    p_masses, q_masses = _bin_masses(p, bins), _bin_masses(q, bins)
    p_total, q_total = p_masses.sum(1), q_masses.sum(1)  # 1, but for rounding
    scale = walk.chance / p_total
    target, draft = p_masses * scale.unsqueeze(1), q_masses / q_total.unsqueeze(1)
    ratio = torch.where(draft > 0, target / draft, middle_ratios(draft.device))
    rule = selection_rule(ratio, target, draft, walk.follows.sum(1), walk.follows.shape[1])
    density = (rule.density / q_total.unsqueeze(1)).to(q.dtype)
    return _Fork(bins, rule.levels, p * scale.unsqueeze(1).to(p.dtype), q * density.gather(1, bins))


def bins_of(log_p: torch.Tensor, log_q: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The bin of each token by its ratio ``chance * p / q``, ``[G, V]`` int64.

    Bin ``NUM_BINS / 2`` begins at ratio 1. The outermost bins hold what lies beyond: a law is at
    most m times the draft, so that large ratios are all one, and small ones have hardly any target.
    """
    log_ratio = log_p - log_q + chance.log().to(log_p.dtype).unsqueeze(1)
    half = NUM_BINS // 2
    # What neither drafts nor draws is NaN, and may lie anywhere.
    return (log_ratio.nan_to_num_() * BINS_PER_NAT).floor_().clamp_(-half, half - 1).long() + half


def middle_ratios(device: torch.device) -> torch.Tensor:
    """The ratio in the middle of each bin, ``[B]`` float64."""
    place = torch.arange(NUM_BINS, dtype=torch.float64, device=device)
    return ((place + 0.5 - NUM_BINS // 2) / BINS_PER_NAT).exp()


def _bin_masses(probs: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """The mass ``[G, B]`` float64 of the tokens in each bin, in whole units: they add up to the
    same in any order, as they must, since a GPU's order differs between runs.
    """
    masses = torch.zeros(len(bins), NUM_BINS, dtype=torch.float64, device=bins.device)
    return masses.scatter_add_(1, bins, (probs * _UNIT).round_().double()) / _UNIT


def _stop(walk: Walk, fork: _Fork, chains: Chains, step: int) -> Walk:
    """Accept the path up to here, unless a longer part of it will be, by chance S/(S + 1 - a)."""
    residual = (fork.target - fork.law).clamp_min_(0.0)
    mass = residual.sum(1, dtype=torch.float64)
    # While a = 1 some prefix is sure to be accepted, so this one may be: at the root it must.
    stop_chance = torch.where(walk.chance < 1, mass / (mass + 1 - walk.chance), 1.0)
    stops = walk.walking & (chains.uniforms[:, 0, max(step - 1, 0)] < stop_chance)
    found = walk.found
    return walk._replace(
        found=Verified(
            num_columns=torch.where(stops, step, found.num_columns),
            winner=torch.where(stops, walk.follows.long().argmax(1), found.winner),
            # Nothing is left only where the path is sure to go on, but for rounding.
            rejects=torch.where(stops, mass > 0, found.rejects),
            left=found.left,
            residuals=torch.where(stops.unsqueeze(1), residual, found.residuals),
        )
    )


def _go_on(walk: Walk, fork: _Fork, chains: Chains, step: int) -> Walk:
    """Select the path's next token. At the path's end, accept all of it by the chance it has."""
    follows = walk.follows & walk.walking.unsqueeze(1)
    # What does not exist may hold anything, but a gather must find a token.
    tokens = torch.where(follows, chains.tokens[:, :, step], 0)
    # A number that no coin uses; one chain alone needs none.
    offset = chains.uniforms[:, min(1, tokens.shape[1] - 1), step]
    levels = fork.levels.gather(1, fork.bins.gather(1, tokens))
    chosen = select(levels, follows, offset).unsqueeze(1)
    token = tokens.gather(1, chosen)
    target, law = (of.gather(1, token).squeeze(1).double() for of in (fork.target, fork.law))
    chance = torch.where(law > 0, target / law, 0.0).clamp_max(1.0)
    ends = chains.ends[:, :, step].gather(1, chosen).squeeze(1)
    at_end = walk.walking & (ends | (step + 1 == chains.num_steps))
    accepted = at_end & (chains.uniforms[:, 0, step] < chance)
    found = walk.found
    goes_on = walk.walking & ~at_end & (chance > 0)
    still = follows & (tokens == token)
    first = still.long().argmax(1)  # any: they have one text, hence one p and one q
    num_chains, num_columns = tokens.shape[1], chains.tokens.shape[2] + 1
    q_row = torch.arange(len(tokens), device=tokens.device) * num_chains + first
    return Walk(
        follows=still,
        chance=chance,
        walking=goes_on,
        p_row=q_row * num_columns + step + 1,
        q_row=q_row,
        found=found._replace(
            num_columns=torch.where(accepted, step + 1, found.num_columns),
            winner=torch.where(accepted, chosen.squeeze(1), found.winner),
            rejects=found.rejects & ~accepted,
        ),
    )
