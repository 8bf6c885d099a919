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
2605.04543). The greedy order of Thomas and Pal overshoots as m grows; `_selection_rule`, which
is this project's own, stays within about 1 % of the bound.

Only how many chains follow the path is used, never what the others hold, so the chosen token
and the chains behind it are fresh draws from q.
"""

from typing import NamedTuple

import torch

_OFFSETS = 32  # levels in a tier; more come closer to the best rule, at hardly any cost
_MAX_TIERS = 3  # tiers on one side of the cut; more change nothing measurable
_NUM_LEVELS = 2 * _MAX_TIERS * _OFFSETS + _OFFSETS + 1
_HUGE = 1e30  # the ratio p / q of a token that is never drafted
_TINY = 1e-12


class Verified(NamedTuple):
    """What a walk accepted, per group."""

    num_columns: torch.Tensor  # [G] int64 in 0..num_steps: drafted tokens accepted
    winner: torch.Tensor  # [G] int64: a chain that carries them
    next_probs: torch.Tensor  # [G, V] float64: law of the token that follows


class _Chains(NamedTuple):
    """The arguments of `verify`."""

    tokens: torch.Tensor
    ends: torch.Tensor
    log_p: torch.Tensor
    log_q: torch.Tensor
    uniforms: torch.Tensor
    num_steps: torch.Tensor


class _Walk(NamedTuple):
    """The selected path so far, per group."""

    follows: torch.Tensor  # [G, N] bool: the chains that carry it
    chance: torch.Tensor  # [G] float64: a, with which it may still be accepted
    walking: torch.Tensor  # [G] bool: it goes on
    found: Verified  # the longest prefix accepted so far


class _Fork(NamedTuple):
    """What may come next on the path, per group."""

    sibling: torch.Tensor  # [G] int64: a chain that carries the path
    target: torch.Tensor  # [G, V]: p times the path's chance
    levels: torch.Tensor  # [G, V] int64: the selection's rule
    law: torch.Tensor  # [G, V]: and its law


class _Rule(NamedTuple):
    """How one of several siblings is selected, per group."""

    levels: torch.Tensor  # [G, V] int64: a token's rank; tiers are runs of `_OFFSETS` levels
    law: torch.Tensor  # [G, V]: probability that each token is the selected one


class _Sorted(NamedTuple):
    """Tokens in the order of p / q, lowest first. Sums have V + 1 entries, from 0 on."""

    order: torch.Tensor  # [G, V]
    ratio: torch.Tensor  # [G, V]: target over draft
    target: torch.Tensor  # [G, V + 1]: mass of the first tokens, in all the path's chance
    draft: torch.Tensor  # [G, V + 1]: mass of the first tokens, 1 in all
    cut: torch.Tensor  # [G, 1]: so many tokens are drafted more than the target can take


def verify(
    tokens: torch.Tensor,
    ends: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    num_steps: torch.Tensor | None = None,
    num_chains: torch.Tensor | None = None,
) -> Verified:
    """Walk down a selected path of each group, and accept a prefix of it.

    A round's numbers must be fresh, those that drew the tokens as well as ``uniforms``: where a
    round stops depends on all its columns, so what it drew behind that is no longer random.

    Args:
        tokens: ``[G, N, K]`` int64, drafted from q.
        ends: ``[G, N, K]`` bool: the text ends with this token, so the walk does too.
        log_p: ``[G, N, K + 1, V]``; column k follows a chain's first k tokens.
        log_q: ``[G, N, K, V]``; column k is what its token k was drawn from.
        uniforms: ``[G, N, K]`` float64.
        num_steps: ``[G]`` int64 in 1..K: a group's columns; None for K.
        num_chains: ``[G]`` int64 in 1..N: a group's chains; None for N.
    """
    group = torch.arange(len(tokens), device=tokens.device)
    if num_steps is None:
        num_steps = torch.full_like(group, tokens.shape[2])
    walk = _begin(log_p, num_chains)
    # What does not exist may hold anything, but a gather must find a token.
    column = torch.arange(tokens.shape[2], device=tokens.device)
    exist = walk.follows.unsqueeze(2) & (column < num_steps.view(-1, 1, 1))
    tokens = torch.where(exist, tokens, 0)
    chains = _Chains(tokens, ends, log_p, log_q, uniforms, num_steps)
    for step in range(tokens.shape[2]):
        fork = _fork(walk, chains, step)
        walk = _stop(walk, fork, chains, step)
        walk = _go_on(walk, fork, chains, step)
    num_columns, winner, next_probs = walk.found
    behind_all = log_p[group, winner, num_steps].double().exp()
    complete = (num_columns == num_steps) & ~ends[group, winner, num_steps - 1]
    return Verified(num_columns, winner, torch.where(complete.unsqueeze(1), behind_all, next_probs))


def _begin(log_p: torch.Tensor, num_chains: torch.Tensor | None) -> _Walk:
    """The walk of all groups at the root, with all chains that they have."""
    size, max_chains = log_p.shape[:2]
    chain = torch.arange(max_chains, device=log_p.device).expand(size, -1)
    bound = max_chains if num_chains is None else num_chains.unsqueeze(1)
    none = torch.zeros_like(chain[:, 0])
    no_probs = torch.zeros_like(log_p[:, 0, 0], dtype=torch.float64)
    return _Walk(
        follows=chain < bound,
        chance=torch.ones_like(none, dtype=torch.float64),
        walking=torch.ones_like(none, dtype=torch.bool),
        found=Verified(none, none, no_probs),
    )


def _fork(walk: _Walk, chains: _Chains, step: int) -> _Fork:
    """The laws behind the path, and the rule that selects its next token."""
    group = torch.arange(len(walk.chance), device=walk.chance.device)
    sibling = walk.follows.long().argmax(1)  # any: they have one text, hence one p and one q
    target = _probs(chains.log_p[group, sibling, step], walk.walking) * walk.chance.unsqueeze(1)
    draft = _probs(chains.log_q[group, sibling, step], walk.walking)
    rule = _selection_rule(target, draft, walk.follows.sum(1), walk.follows.shape[1])
    return _Fork(sibling, target, *rule)


def _probs(log_probs: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Probabilities that sum to 1 in float64, ``[G, V]``; anything valid where none exist."""
    probs = torch.where(exists.unsqueeze(1), log_probs.double(), 0.0).exp()
    return probs / probs.sum(1, keepdim=True)


def _stop(walk: _Walk, fork: _Fork, chains: _Chains, step: int) -> _Walk:
    """Accept the path up to here, unless a longer part of it will be, by chance S/(S + 1 - a)."""
    residual = (fork.target - fork.law).clamp_min(0.0)
    mass = residual.sum(1)
    # While a = 1 some prefix is sure to be accepted, so this one may be: at the root it must.
    stop_chance = torch.where(walk.chance < 1, mass / (mass + 1 - walk.chance), 1.0)
    stops = walk.walking & (chains.uniforms[:, 0, max(step - 1, 0)] < stop_chance)
    # Nothing is left only where the path is sure to go on, but for rounding.
    residual = torch.where((mass > 0).unsqueeze(1), residual / mass.unsqueeze(1), fork.target)
    probs = torch.where(stops.unsqueeze(1), residual, walk.found.next_probs)
    return walk._replace(found=_record(walk.found, stops, step, fork.sibling, probs))


def _go_on(walk: _Walk, fork: _Fork, chains: _Chains, step: int) -> _Walk:
    """Select the path's next token. At the path's end, accept all of it by the chance it has."""
    group = torch.arange(len(walk.chance), device=walk.chance.device)
    tokens = chains.tokens[:, :, step]
    # A number that no coin uses; one chain alone needs none.
    offset = chains.uniforms[:, min(1, tokens.shape[1] - 1), step]
    chosen = _select(fork.levels.gather(1, tokens), walk.follows, offset)
    token = tokens[group, chosen]
    target, law = fork.target[group, token], fork.law[group, token]
    chance = torch.where(law > 0, target / law, 0.0).clamp_max(1.0)
    at_end = walk.walking & (chains.ends[group, chosen, step] | (step + 1 == chains.num_steps))
    accepted = at_end & (chains.uniforms[:, 0, step] < chance)
    return _Walk(
        follows=walk.follows & (tokens == token.unsqueeze(1)),
        chance=chance,
        walking=walk.walking & ~at_end,
        found=_record(walk.found, accepted, step + 1, chosen, walk.found.next_probs),
    )


def _record(
    found: Verified, where: torch.Tensor, depth: int, chain: torch.Tensor, probs: torch.Tensor
) -> Verified:
    """Replace what was found by ``depth`` tokens of ``chain``, in the groups of ``where``."""
    return Verified(
        torch.where(where, depth, found.num_columns),
        torch.where(where, chain, found.winner),
        probs,
    )


def _select(levels: torch.Tensor, follows: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first chain ``[G]`` in the highest tier, of those that follow.

    Args:
        levels: ``[G, N]`` of the chains' tokens.
        uniforms: ``[G]``; where tiers begin.
    """
    offset = (uniforms * _OFFSETS).long().unsqueeze(1)
    tier = (levels + offset).div(_OFFSETS, rounding_mode="floor")
    lowest = torch.iinfo(tier.dtype).min  # a lone chain's offset may be no number at all
    return torch.where(follows, tier, lowest).argmax(1)


def _selection_rule(
    target: torch.Tensor, draft: torch.Tensor, num_siblings: torch.Tensor, max_siblings: int
) -> _Rule:
    """Which of m draws from ``draft`` to select so that ``target`` can take it.

    Tokens get levels that rise with target / draft. Tiers are runs of `_OFFSETS` levels that
    begin at a random offset; the first sibling in the highest tier is selected. Two tokens far
    apart in level are ranked surely, two close ones only now and then, so that the law's
    density over the draft can rise as steeply as the target's and no more. Where the tiers
    are all one, the law is the draft; where each token has its own, the rule is the greedy
    order of Thomas and Pal. Any levels are exact; these are near the best.

    Args:
        target: ``[G, V]``, of any mass up to 1.
        draft: ``[G, V]``, of mass 1.
        num_siblings: ``[G]``, m from 1 to ``max_siblings``.
    """
    count = num_siblings.unsqueeze(1)
    ranked = _sort(target, draft, count)
    levels = _levels(ranked, _best_density(ranked, count), count)
    law = _law(levels, ranked.draft, count, max_siblings).gather(1, levels)
    back = ranked.order.argsort(1)
    return _Rule(levels.gather(1, back), law.gather(1, back) * draft)


def _sort(target: torch.Tensor, draft: torch.Tensor, count: torch.Tensor) -> _Sorted:
    """Order the tokens, and find the set that q forces on the selection most."""
    ratio = torch.where(draft > 0, target / draft, _HUGE).clamp_max(_HUGE)
    ratio, order = ratio.sort(dim=1, stable=True)
    mass = torch.stack([target, draft]).gather(2, order.expand(2, -1, -1)).cumsum(2)
    mass = torch.nn.functional.pad(mass, (1, 0))
    drafted = mass[1] / mass[1, :, -1:]
    return _Sorted(
        order, ratio, mass[0], drafted, cut=(drafted**count - mass[0]).argmax(1, keepdim=True)
    )


def _best_density(ranked: _Sorted, count: torch.Tensor) -> torch.Tensor:
    """Law over draft ``[G, V]``, in order, of the best rule that rises as little as possible.

    All draws fall below the cut with probability forced = draft^m, more than the target has
    there, else one above it is selected, which the target can take. So the law may exceed the
    target only below the cut, where water is filled up to a floor, and is cut to a ceiling above.
    """
    below = _below_cut(ranked)
    draft, target = ranked.draft, ranked.target
    forced = draft.gather(1, ranked.cut) ** count
    taken = target.gather(1, ranked.cut)
    floors = (forced - taken + target[:, 1:]) / draft[:, 1:]
    floor = floors.masked_fill(~below | (draft[:, 1:] <= 0), torch.inf).amin(1, keepdim=True)
    rest = 1.0 - draft[:, :-1]
    ceilings = (1.0 - forced + taken - target[:, :-1]) / rest
    ceiling = ceilings.masked_fill(below | (rest <= _TINY), 0.0).amax(1, keepdim=True)
    return torch.where(
        below, torch.maximum(ranked.ratio, floor), torch.minimum(ranked.ratio, ceiling)
    )


def _below_cut(ranked: _Sorted) -> torch.Tensor:
    """Which of the ordered tokens lie below the cut, ``[G, V]``."""
    return torch.arange(ranked.ratio.shape[1], device=ranked.cut.device) < ranked.cut


def _levels(ranked: _Sorted, density: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Levels ``[G, V]`` in order: a tier begins between two tokens as often as it must.

    One threshold at draft mass t, on a side of the cut that spans lo to hi, lets the density
    jump by J(t) = (hi^m - t^m) / (hi - t) - (t^m - lo^m) / (t - lo). So it is put there with
    probability (wanted jump) / J(t). That gives the density exactly as long as a side's
    probabilities sum to 1 at most, and approximately where there are several thresholds at once.
    """
    below = _below_cut(ranked)
    at_cut, at = ranked.draft.gather(1, ranked.cut), ranked.draft[:, 1:]
    low, high = torch.where(below, 0.0, at_cut), torch.where(below, at_cut, 1.0)
    rise = (high**count - at**count) / (high - at).clamp_min(_TINY)
    rise = rise - (at**count - low**count) / (at - low).clamp_min(_TINY)
    wanted = density.diff(dim=1, append=density[:, -1:])
    splits = (wanted / rise.clamp_min(_TINY)).clamp(0.0, 1.0)
    splits = splits.masked_fill((high - at <= _TINY) | (at - low <= _TINY), 0.0)
    place = splits.cumsum(1) - splits  # in tiers, of both sides one after the other
    first_above = place.gather(1, ranked.cut.clamp_max(place.shape[1] - 1))
    place = torch.where(below, place, place - first_above)
    spans = torch.stack([place.masked_fill(below, 0.0), place.masked_fill(~below, 0.0)])
    above_span, below_span = spans.amax(2, keepdim=True)
    shrink = _MAX_TIERS / torch.where(below, below_span, above_span).clamp_min(_MAX_TIERS)
    levels = (place * shrink * _OFFSETS).long().clamp(0, _MAX_TIERS * _OFFSETS)
    # No tier reaches across the cut. The maximum undoes roundings of a parallel sum.
    levels = torch.where(below, levels, levels + (_MAX_TIERS + 1) * _OFFSETS)
    return levels.cummax(1).values


def _law(
    levels: torch.Tensor, draft: torch.Tensor, count: torch.Tensor, max_siblings: int
) -> torch.Tensor:
    """TokenDistribution over draft of the selected token, per level, ``[G, levels]``.

    A tier that holds the draft's mass from x to y is selected with probability y^m - x^m, and
    then gives the draft restricted to it: density (y^m - x^m) / (y - x), here as a sum of
    powers, which needs no division. A level's law is the mean over the tiers that hold it.
    """
    size = len(levels)
    edges = torch.arange(1 - _OFFSETS, _NUM_LEVELS + _OFFSETS, device=levels.device)
    num_below = torch.searchsorted(levels, edges.expand(size, -1).contiguous())
    mass_below = draft.gather(1, num_below)
    start, stop = mass_below[:, :-_OFFSETS], mass_below[:, _OFFSETS:]
    density, power = torch.ones_like(start), torch.ones_like(start)
    for n in range(1, max_siblings):
        power = power * start
        density = torch.where(n < count, density * stop + power, density)
    total = torch.nn.functional.pad(density.cumsum(1), (1, 0))
    return (total[:, _OFFSETS:] - total[:, :-_OFFSETS]) / _OFFSETS
