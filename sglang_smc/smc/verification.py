"""Verify N drafted chains: accept or reject draft tokens exactly, or by the block's evidence.

Exact verification accepts a prefix of the draft tokens such that the output follows p, whatever q
is. The chains are drafted independently from q and continue one prefix. It combines two methods:

*Block verification* (Sun et al. 2025, arXiv 2403.10444) follows one path to its end before it
decides how many of its tokens to accept. A prefix has an acceptance probability ``a``, with
a = min(1, a p(x) / q(x)) after each token x. The residual (a p - q)+ has the mass
S = sum (a p - q)+: with probability S / (S + 1 - a) the path is cut here, and a token is drawn from
the residual, unless a longer prefix is accepted. Of all methods with one chain this accepts most.

*Selection* makes one path of many chains (Khisti et al. 2025, arXiv 2410.18234; with block
verification Thomas and Pal 2026, arXiv 2602.16961). Of the m chains that follow the path so far one
is selected by its next token, and that token's distribution takes the place of q above. Even the
best rule rejects with probability max over token sets A of q(A)^m - a p(A), since all m draws may
fall into A: the bound of optimal transport (Hu et al. 2025, arXiv 2502.18779), here with the path's
acceptance probability, as in UniVer (Weng et al. 2026, arXiv 2605.04543).

Only the number of chains that follow the path is used, never the other chains' tokens, so the
selected token and the later tokens of its chains are fresh draws from q.

*The selection rule* (`selection_rule`). Tokens are put into bins by target / draft. Each bin has a
level that rises with the ratio, and tiers are runs of `OFFSETS` levels that start at a random
offset; the first chain in the highest tier is selected. Tokens of distant levels are always
ranked, those of close levels only at some offsets, so that the selected token's density over the
draft can rise as steeply as the target's and no more. With one tier its distribution is the draft;
with a tier per token the rule is the greedy order of Thomas and Pal (arXiv 2602.16961). Any bins
and levels are exact, since the distribution follows from them; these are near the best, and nearer
with finer bins. A column needs only the masses of p and q in each bin and the residual: nothing is
sorted, and only the path's own rows of p and q are read.

*Verification by evidence* (`keep`), of modes mixed and auto, keeps as many columns as the block's
evidence covers, and draws one chain there by weight; or as many as exact verification accepts, if
those are more.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.weighing import (
    accumulate,
    column_of,
    covered_columns,
    draw,
    effective_sample_size,
    normalized,
)

OFFSETS = 32  # levels in a tier; more come closer to the best rule, at hardly any cost
MAX_TIERS = 3  # tiers on one side of the cut; more change nothing measurable
NUM_LEVELS = 2 * MAX_TIERS * OFFSETS + OFFSETS + 1
TINY = 1e-12
NUDGE = 1e-4  # of a level: so much below a whole one counts as rounding


class Rule(NamedTuple):
    """Rule that selects one of the chains on the path, per group, by the bin of its next token."""

    levels: torch.Tensor  # [G, B] int64: a bin's rank; tiers are runs of `OFFSETS` levels
    density: torch.Tensor  # [G, B] float64: probability of the selected token over the draft's


class _Ranked(NamedTuple):
    """Bins in the order of target / draft. Cumulative masses have B + 1 entries, the first is 0."""

    ratio: torch.Tensor  # [G, B]: target over draft
    target: torch.Tensor  # [G, B + 1]: cumulative mass; its total is the path's chance
    draft: torch.Tensor  # [G, B + 1]: cumulative mass; its total is 1
    cut: torch.Tensor  # [G, 1]: number of bins that are drafted more than the target accepts


def select(levels: torch.Tensor, follows: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first chain ``[G]`` in the highest tier, of those that follow the path.

    Args:
        levels: ``[G, N]`` of the chains' tokens.
        follows: ``[G, N]`` bool.
        uniforms: ``[G]`` in [0, 1), which set the offset of the tiers.
    """
    offset = (uniforms * OFFSETS).long().unsqueeze(1)
    tier = (levels + offset).div(OFFSETS, rounding_mode="floor")
    lowest = torch.iinfo(tier.dtype).min  # with one chain the uniform may be undefined
    return torch.where(follows, tier, lowest).argmax(1)


def selection_rule(
    ratio: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor,
    num_siblings: torch.Tensor,
    max_siblings: int,
) -> Rule:
    """Return the rule that selects one of m draws from ``draft`` for ``target`` to accept.

    Args:
        ratio: ``[G, B]`` float64 in rising order: target / draft in each bin.
        target: ``[G, B]`` float64 masses, of any sum up to 1.
        draft: ``[G, B]`` float64 masses, of sum 1.
        num_siblings: ``[G]``, m from 1 to ``max_siblings``.
    """
    count = num_siblings.unsqueeze(1)
    ranked = _rank(ratio, target, draft, count)
    levels = _levels(ranked, _best_density(ranked, count), count)
    density = _level_density(levels, ranked.draft, count, max_siblings)
    return Rule(levels, density.gather(1, levels))


def _rank(
    ratio: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, count: torch.Tensor
) -> _Ranked:
    """Sum the bins, and find the set of tokens in which q exceeds the target most."""
    mass = torch.nn.functional.pad(torch.stack([target, draft]).cumsum(2), (1, 0))
    drafted = mass[1] / mass[1, :, -1:]
    excess = (drafted**count - mass[0] - TINY).clamp_min(0.0)  # less is rounding: no cut
    return _Ranked(ratio, mass[0], drafted, cut=excess.argmax(1, keepdim=True))


def _best_density(ranked: _Ranked, count: torch.Tensor) -> torch.Tensor:
    """Return the density over the draft ``[G, B]`` of the best rule that rises least.

    All draws fall below the cut with probability forced = draft^m, more than the target has there;
    else a draw above the cut is selected, which the target accepts. So the selected token's
    probability may exceed the target's only below the cut, where it is raised to a floor; above
    the cut it is limited by a ceiling.
    """
    below = _below_cut(ranked)
    draft, target = ranked.draft, ranked.target
    forced = draft.gather(1, ranked.cut) ** count
    taken = target.gather(1, ranked.cut)
    floors = (forced - taken + target[:, 1:]) / draft[:, 1:]
    floor = floors.masked_fill(~below | (draft[:, 1:] <= 0), torch.inf).amin(1, keepdim=True)
    rest = 1.0 - draft[:, :-1]
    ceilings = (1.0 - forced + taken - target[:, :-1]) / rest
    ceiling = ceilings.masked_fill(below | (rest <= TINY), 0.0).amax(1, keepdim=True)
    return torch.where(
        below, torch.maximum(ranked.ratio, floor), torch.minimum(ranked.ratio, ceiling)
    )


def _below_cut(ranked: _Ranked) -> torch.Tensor:
    """Return which of the ordered bins lie below the cut, ``[G, B]`` bool."""
    return torch.arange(ranked.ratio.shape[1], device=ranked.cut.device) < ranked.cut


def _levels(ranked: _Ranked, density: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the levels ``[G, B]`` that give the density by their tiers.

    A threshold between tiers at draft mass t, on a side of the cut that spans lo to hi, makes the
    density jump by J(t) = (hi^m - t^m) / (hi - t) - (t^m - lo^m) / (t - lo). So it is placed there
    with probability (target jump) / J(t). That gives the density exactly while the probabilities of
    a side sum to at most 1, and approximately where there are several thresholds at once.
    """
    below = _below_cut(ranked)
    at_cut, at = ranked.draft.gather(1, ranked.cut), ranked.draft[:, 1:]
    low, high = torch.where(below, 0.0, at_cut), torch.where(below, at_cut, 1.0)
    rise = (high**count - at**count) / (high - at).clamp_min(TINY)
    rise = rise - (at**count - low**count) / (at - low).clamp_min(TINY)
    wanted = density.diff(dim=1, append=density[:, -1:])
    splits = (wanted / rise.clamp_min(TINY)).clamp(0.0, 1.0)
    splits = splits.masked_fill((high - at <= TINY) | (at - low <= TINY), 0.0)
    place = splits.cumsum(1) - splits  # in tiers, of both sides one after the other
    first_above = place.gather(1, ranked.cut.clamp_max(place.shape[1] - 1))
    place = torch.where(below, place, place - first_above)
    spans = torch.stack([place.masked_fill(below, 0.0), place.masked_fill(~below, 0.0)])
    above_span, below_span = spans.amax(2, keepdim=True)
    shrink = MAX_TIERS / torch.where(below, below_span, above_span).clamp_min(MAX_TIERS)
    levels = (place * shrink * OFFSETS + NUDGE).long().clamp(0, MAX_TIERS * OFFSETS)
    # No tier crosses the cut. The running maximum undoes rounding errors of a parallel sum.
    levels = torch.where(below, levels, levels + (MAX_TIERS + 1) * OFFSETS)
    return levels.cummax(1).values


def _level_density(
    levels: torch.Tensor, draft: torch.Tensor, count: torch.Tensor, max_siblings: int
) -> torch.Tensor:
    """Return the selected token's density over the draft, per level, ``[G, levels]``.

    A tier of draft mass x to y is selected with probability y^m - x^m, and then gives the draft
    restricted to it: density (y^m - x^m) / (y - x), here as a sum of powers, which needs no
    division. A level's density is the mean over the offsets of the tier that contains it.
    """
    size = len(levels)
    edges = torch.arange(1 - OFFSETS, NUM_LEVELS + OFFSETS, device=levels.device)
    num_below = torch.searchsorted(levels, edges.expand(size, -1).contiguous())
    mass_below = draft.gather(1, num_below)
    start, stop = mass_below[:, :-OFFSETS], mass_below[:, OFFSETS:]
    density, power = torch.ones_like(start), torch.ones_like(start)
    for n in range(1, max_siblings):
        power = power * start
        density = torch.where(n < count, density * stop + power, density)
    total = torch.nn.functional.pad(density.cumsum(1), (1, 0))
    return (total[:, OFFSETS:] - total[:, :-OFFSETS]) / OFFSETS


NUM_BINS = 128
BINS_PER_NAT = 16  # a power of two, so that rounding does not move the bins' edges
_UNIT = 2.0**48  # masses are summed as multiples of 1 / _UNIT


class Verified(NamedTuple):
    """Accepted prefix of a walk, per group, and the distribution of the next token."""

    num_columns: torch.Tensor  # [G] int64 in 0..num_steps: draft tokens accepted
    winner: torch.Tensor  # [G] int64: a chain that carries them
    rejects: torch.Tensor  # [G] bool: the next token is drawn from the residual; else from p
    left: torch.Tensor  # [G] int64: the group's row of `residuals`
    residuals: torch.Tensor  # [R, V] float32: residual distributions, not normalised


class Chains(NamedTuple):
    """The drafted chains, as inputs of `verify`."""

    tokens: torch.Tensor  # [G, N, K] int64
    ends: torch.Tensor  # [G, N, K] bool
    uniforms: torch.Tensor  # [G, N, K] float64
    num_steps: torch.Tensor  # [G] int64 in 0..K


class Walk(NamedTuple):
    """The selected path so far, per group."""

    follows: torch.Tensor  # [G, N] bool: the chains that start with it
    chance: torch.Tensor  # [G] float64: its acceptance probability a
    walking: torch.Tensor  # [G] bool: the path continues
    p_row: torch.Tensor  # [G] int64: the row of p that follows it, of G * N * (K + 1)
    q_row: torch.Tensor  # [G] int64: the row of this column's q, of G * N
    found: Verified  # the longest prefix accepted so far


def verify(
    begin_walk: Callable[..., Walk],
    walk_on: Callable[..., Walk],
    tokens: torch.Tensor,
    ends: torch.Tensor,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    uniforms: torch.Tensor,
    num_steps: torch.Tensor | None = None,
    num_chains: torch.Tensor | None = None,
) -> Verified:
    """Follow a selected path of each group, and accept a prefix of it.

    Each round needs fresh random numbers, for the draft tokens as well as ``uniforms``: where a
    round stops depends on all its columns, so the numbers of later columns must not be reused.

    Args:
        begin_walk, walk_on: the functions of this module, or kernels.
        tokens: ``[G, N, K]`` int64, drafted from q.
        ends: ``[G, N, K]`` bool: the sequence ends with this token, and with it the walk.
        p: of ``G * N * (K + 1)`` draws; that of column k follows a chain's first k tokens.
        q: K distributions of ``G * N`` draws, from which each chain's token k was drawn.
        uniforms: ``[G, N, K]`` float64.
        num_steps: ``[G]`` int64 in 0..K: a group's columns; None for K.
        num_chains: ``[G]`` int64 in 1..N: a group's chains; None for N.
    """
    size, max_chains, max_steps = tokens.shape
    if num_steps is None:
        num_steps = tokens.new_full((size,), max_steps)
    if num_chains is None:
        num_chains = tokens.new_full((size,), max_chains)
    chains = Chains(tokens, ends, uniforms, num_steps)
    walk = begin_walk(chains, num_chains, p.scores.shape[1])
    for step in range(max_steps):
        log_p = p._replace(rows=walk.p_row).log_probs()  # [G, V]
        log_q = q[step]._replace(rows=walk.q_row).log_probs()
        walk = walk_on(walk, chains, log_p, log_q, step)
    return walk.found


def verify_one(
    tokens: torch.Tensor,
    ends: torch.Tensor,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    uniforms: torch.Tensor,
    num_steps: torch.Tensor,
) -> Verified:
    """Verify a single chain per group as `verify` does, up to rounding, in one pass over columns.

    With one chain nothing is selected, so its path is known before the walk. Arguments as there,
    with N = 1.
    """
    size, _, max_steps = tokens.shape
    tokens, ends, uniforms = tokens[:, 0], ends[:, 0], uniforms[:, 0]  # [G, K]
    rows = torch.arange(size * (max_steps + 1), device=tokens.device).view(size, -1)[:, :-1]
    p_of = p._replace(rows=rows.flatten()).log_probs().exp().view(size, max_steps, -1)  # [G, K, V]
    q_of = torch.stack([of.log_probs() for of in q], 1).exp()
    own_p, own_q = (of.gather(2, tokens.unsqueeze(2)).squeeze(2).double() for of in (p_of, q_of))
    # a = min(1, a p / q) after each token: the sum of logs, less its largest so far above 0.
    gained = torch.where(own_q > 0, own_p / own_q, 0.0).log().cumsum(1)
    after = (gained - gained.cummax(1).values.clamp_min(0.0)).exp()  # [G, K]
    before = torch.nn.functional.pad(after[:, :-1], (1, 0), value=1.0)
    residuals = (p_of * before.unsqueeze(2).to(p_of.dtype)).sub_(q_of).clamp_min_(0.0)
    mass = residuals.sum(2, dtype=torch.float64)
    column = torch.arange(max_steps, device=tokens.device)
    at_end = ends | (column + 1 == num_steps.unsqueeze(1))
    goes_on = ~at_end & (after > 0)
    drafted = num_steps > 0
    walking = torch.cat([drafted.unsqueeze(1), goes_on[:, :-1]], 1).cumprod(1).bool()
    stop_chance = torch.where(before < 1, mass / (mass + 1 - before), 1.0)
    of_stops = torch.cat([uniforms[:, :1], uniforms[:, :-1]], 1)
    stop = torch.where(walking & (of_stops < stop_chance), column, 0).amax(1)  # at 0 it may
    accepted = walking & at_end & (uniforms < after)
    whole = accepted.any(1)
    group = torch.arange(size, device=tokens.device)
    return Verified(
        num_columns=torch.where(whole, accepted.long().argmax(1) + 1, stop),
        winner=torch.zeros_like(stop),
        rejects=drafted & ~whole & (mass[group, stop] > 0),
        left=group,
        residuals=residuals[group, stop],
    )


def nothing(num_steps: torch.Tensor) -> Verified:
    """Return the result in which no draft token is accepted or rejected; ``num_steps`` ``[G]``."""
    none = torch.zeros_like(num_steps)
    return Verified(none, none, none.bool(), none, none.new_empty(0, 0).float())


def begin_walk(chains: Chains, num_chains: torch.Tensor, vocab_size: int) -> Walk:
    """Return the walk at the root, with all ``num_chains`` ``[G]`` int64 >= 1 of each group."""
    size, max_chains, max_steps = chains.tokens.shape
    device = num_chains.device
    group, none = torch.arange(size, device=device), torch.zeros_like(num_chains)
    return Walk(
        follows=torch.arange(max_chains, device=device) < num_chains.unsqueeze(1),
        chance=torch.ones_like(none, dtype=torch.float64),
        walking=chains.num_steps > 0,
        p_row=group * max_chains * (max_steps + 1),
        q_row=group * max_chains,
        found=Verified(none, none, none.bool(), group, none.new_zeros(size, vocab_size).float()),
    )


def walk_on(
    walk: Walk, chains: Chains, log_p: torch.Tensor, log_q: torch.Tensor, step: int
) -> Walk:
    """Stop at the end of the path, or select its next token.

    Args:
        walk: of `begin_walk` or the step before; it may be overwritten. Groups that have stopped
            stay as they are.
        chains: of all groups.
        log_p, log_q: ``[G, V]`` float32, next-token log-probabilities of the path: rows
            ``walk.p_row`` of p and ``walk.q_row`` of column ``step`` of q. Arbitrary where a group
            has stopped.
        step: the column, 0 to K - 1.
    """
    bins, levels, target, selected = _fork(walk, log_p, log_q)
    residual = (target - selected).clamp_min_(0.0)
    mass = residual.sum(1, dtype=torch.float64)
    # Accept the path up to here with probability S / (S + 1 - a), unless a longer part of it is.
    # While a = 1 some prefix is certainly accepted, so this one may be: at the root it must.
    stop_chance = torch.where(walk.chance < 1, mass / (mass + 1 - walk.chance), 1.0)
    stops = walk.walking & (chains.uniforms[:, 0, max(step - 1, 0)] < stop_chance)
    follows = walk.follows & walk.walking.unsqueeze(1)
    # Absent chains may hold any values, but the gather needs a valid token.
    tokens = torch.where(follows, chains.tokens[:, :, step], 0)
    # A number that no acceptance uses; a single chain needs none.
    offset = chains.uniforms[:, min(1, tokens.shape[1] - 1), step]
    chosen = select(levels.gather(1, bins.gather(1, tokens)), follows, offset).unsqueeze(1)
    token = tokens.gather(1, chosen)
    of_p, of_q = (of.gather(1, token).squeeze(1).double() for of in (target, selected))
    chance = torch.where(of_q > 0, of_p / of_q, 0.0).clamp_max(1.0)
    # At the path's end accept all of it, with probability a.
    ends = chains.ends[:, :, step].gather(1, chosen).squeeze(1)
    at_end = walk.walking & (ends | (step + 1 == chains.num_steps))
    accepted = at_end & (chains.uniforms[:, 0, step] < chance)
    still = follows & (tokens == token)
    first = still.long().argmax(1)  # any of them: their prefixes are equal, hence p and q
    num_chains, num_columns = tokens.shape[1], chains.tokens.shape[2] + 1
    q_row = torch.arange(len(tokens), device=tokens.device) * num_chains + first
    found = walk.found
    columns = torch.where(stops, step, found.num_columns)
    winner = torch.where(stops, walk.follows.long().argmax(1), found.winner)
    # Up to rounding, the residual is empty only where the path continues with certainty.
    rejects = torch.where(stops, mass > 0, found.rejects)
    return Walk(
        follows=still,
        chance=chance,
        walking=walk.walking & ~at_end & (chance > 0),
        p_row=q_row * num_columns + step + 1,
        q_row=q_row,
        found=Verified(
            num_columns=torch.where(accepted, step + 1, columns),
            winner=torch.where(accepted, chosen.squeeze(1), winner),
            rejects=rejects & ~accepted,
            left=found.left,
            residuals=torch.where(stops.unsqueeze(1), residual, found.residuals),
        ),
    )


def _fork(
    walk: Walk, log_p: torch.Tensor, log_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the distributions after the path, and the rule that selects its next token.

    Returns:
        The bin of each token ``[G, V]`` int64, the levels of the rule ``[G, B]`` int64, p times the
        path's chance ``[G, V]``, and the probability that each token is the selected one.
    """
    bins = bins_of(log_p, log_q, walk.chance)
    p, q = log_p.exp(), log_q.exp()
    p_masses, q_masses = _bin_masses(p, bins), _bin_masses(q, bins)
    p_total, q_total = p_masses.sum(1), q_masses.sum(1)  # 1, but for rounding
    scale = walk.chance / p_total
    target, draft = p_masses * scale.unsqueeze(1), q_masses / q_total.unsqueeze(1)
    ratio = torch.where(draft > 0, target / draft, middle_ratios(draft.device))
    rule = selection_rule(ratio, target, draft, walk.follows.sum(1), walk.follows.shape[1])
    density = (rule.density / q_total.unsqueeze(1)).to(q.dtype)
    return bins, rule.levels, p * scale.unsqueeze(1).to(p.dtype), q * density.gather(1, bins)


def bins_of(log_p: torch.Tensor, log_q: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Return the bin of each token by its ratio ``chance * p / q``, ``[G, V]`` int64.

    Bin ``NUM_BINS / 2`` starts at ratio 1. The outermost bins hold all ratios beyond: the selected
    token's density over the draft is at most m, so larger ratios need not be distinguished, and
    tokens of smaller ones have hardly any target mass.
    """
    log_ratio = log_p - log_q + chance.log().to(log_p.dtype).unsqueeze(1)
    half = NUM_BINS // 2
    # A token of probability zero under both p and q is NaN, and may be in any bin.
    return (log_ratio.nan_to_num_() * BINS_PER_NAT).floor_().clamp_(-half, half - 1).long() + half


def middle_ratios(device: torch.device) -> torch.Tensor:
    """Return the ratio in the middle of each bin, ``[B]`` float64."""
    place = torch.arange(NUM_BINS, dtype=torch.float64, device=device)
    return ((place + 0.5 - NUM_BINS // 2) / BINS_PER_NAT).exp()


def _bin_masses(probs: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """Return the mass of the tokens in each bin, ``[G, B]`` float64.

    Masses are integers times a unit, so that their sums do not depend on the order, which differs
    between runs on a GPU.
    """
    masses = torch.zeros(len(bins), NUM_BINS, dtype=torch.float64, device=bins.device)
    return masses.scatter_add_(1, bins, (probs * _UNIT).round_().double()) / _UNIT


class Kept(NamedTuple):
    """Kept part of each group's chains, and the distribution of the next token."""

    num_columns: torch.Tensor  # [G] int64 in 0..K
    winner: torch.Tensor  # [G] int64: the chain that carries them
    by_block: torch.Tensor  # [G] bool: by the block's evidence, not by exact verification
    rejects: torch.Tensor  # [G] bool: the next token comes from the residual
    row: torch.Tensor  # [G] int64: the row of p after them, of G * N * (K + 1)
    ess: torch.Tensor  # [G] float64 effective sample size of the block; N where none may be kept


def keep(
    found: Verified,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    up_to_end: torch.Tensor,
    ends: torch.Tensor,
    present: torch.Tensor,
    num_steps: torch.Tensor,
    evidence_threshold: torch.Tensor,
    keep_uniforms: torch.Tensor,
    uniforms: torch.Tensor,
) -> Kept:
    """Keep the columns that the block's evidence covers, or those accepted, if they are more.

    One chain is drawn by weight in the last column that the evidence covers.

    Args:
        found: the prefix that exact verification accepts.
        log_p: ``[G, N, K + 1]`` of the draft tokens, and one more column of arbitrary values.
        log_q: ``[G, N, K]`` of the draft tokens.
        up_to_end, ends: ``[G, N, K]`` bool: up to each chain's end, and only at its last token.
        present: ``[G, N]`` bool.
        num_steps: ``[G]`` K of each group.
        evidence_threshold: ``[G]`` float64 c >= 0; infinite to keep no column.
        keep_uniforms, uniforms: ``[G]`` float64 in [0, 1), for the columns and for the chain.
    """
    start = torch.where(present, 0.0, -torch.inf).double()
    gained = torch.where(up_to_end, log_p[:, :, :-1].double() - log_q, 0.0)
    running = accumulate(start, gained).transpose(1, 2)  # [G, K + 1, N]
    covered = covered_columns(running, evidence_threshold, num_steps, keep_uniforms)
    weighed = column_of(running, covered)  # equal weights where nothing is kept by evidence
    drawn = draw(normalized(weighed), uniforms)
    group = torch.arange(len(drawn), device=running.device)
    column = torch.arange(ends.shape[2], device=running.device)
    # A sequence that has ended counts as reaching through all columns: counting its tokens instead
    # would disfavour sequences that end early.
    has_ended = (ends[group, found.winner] & (column < found.num_columns.unsqueeze(1))).any(1)
    by_block = covered > torch.where(has_ended, num_steps, found.num_columns)
    of_block = torch.minimum(covered, up_to_end[group, drawn].sum(1))
    num_columns = torch.where(by_block, of_block, found.num_columns)
    winner = torch.where(by_block, drawn, found.winner)
    return Kept(
        num_columns=num_columns,
        winner=winner,
        by_block=by_block,
        rejects=found.rejects & ~by_block,
        row=(group * log_p.shape[1] + winner) * log_p.shape[2] + num_columns,
        ess=effective_sample_size(weighed),
    )
