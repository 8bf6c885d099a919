"""Verify N drafted chains as a tree: accept draft tokens exactly, or by the block's evidence.

Exact verification accepts a prefix of one chain such that the output follows p, whatever q is. It
is *layer verification* (Cha et al. 2026), which decides from the deepest layer up. Chains with
equal first tokens share a *node*, a prefix of the tree. The nodes v of one length j are a layer,
and have *shares* w_v >= 0; the root's is 1. With T_j all that is drawn up to layer j:

*Down* (`share_out`). The shares w_vx of the next layer may be any functions of T_{j+1} with a sum
of at most 1, and a *flow* F_v(x) = E[w_vx 1{x is a child of v} | T_j] of at most w_v p(x | v).

*Up* (`exits`). R_v(x) = w_v p(x | v) - F_v(x) is the residual, r_j its sum over the layer, and f_j
= 1 - sum w_v. Stop at layer j with probability r_j / (r_j + f_j), and then draw v and x from R; the
root stops always. The output is v, then x. Nodes without children have F = 0.

The output follows p: r_j + f_j = 1 - E[sum of the next layer's shares | T_j] = E[f_{j+1} | T_j].
So, by induction from the deepest layer, the decision comes to layer j with probability r_j + f_j
given T_j, and stops at (v, x) with R_v(x). With W(v) = E[w_v 1{v is drawn}] a text y_1 y_2 ... has
the probability sum_j [W(y_1..y_j) p(y_{j+1}) - W(y_1..y_{j+1})] times p of its rest, and that
telescopes to p. This holds for any q, any number of chains, and any shape of the tree that depends
on earlier layers alone.

*The shares*. Children divide a layer by a race: a chain whose token has the rate c gets c g(S),
where S is the sum of all chains' rates and g(S) is 1 / S or a little less. As g is a sum of
exponentials, F is a product of means over single chains. Shares are trimmed to F <= w_v p, so any
rates are exact. They are equal within a bin of p / q, and near importance weights: `race`. With one
chain this is block verification (Sun et al. 2025, arXiv 2403.10444).

*Verification by evidence* (`keep`), of mode auto, keeps as many columns as the block's
evidence covers, and draws one chain there by weight; or as many as exact verification accepts, if
those are more.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.weighing import (
    Block,
    accumulate,
    column_of,
    covered_columns,
    draw,
    effective_sample_size,
    normalized,
)

# Of log p / q; finer bins change nothing.
NUM_BINS = 64
BINS_PER_NAT = 8
NATS_BELOW = 5
# Of the quadrature of 1 / S.
NUM_POINTS = 16
LOWEST_POINT = -7.03921
# Of the rates; more steps leave later layers too few nodes.
NUM_STEPS = 2
SPEED = 1.3
LARGEST_STEP = 20.0
LARGEST_RATE = 1e4
LEAST_SHARE = 1e-3  # a node with less has no children
ROUNDING = 1e-6  # so much of a layer is missing by rounding alone
TINY = 1e-30
_UNIT = 2.0**48  # masses are summed as multiples of 1 / _UNIT
_ENTRIES = 1 << 20  # of the largest tensors that are made at once


class Tree(NamedTuple):
    """Drafted chains. A node is numbered by the first chain that goes through it."""

    tokens: torch.Tensor  # [G, N, K] int64
    lengths: torch.Tensor  # [G, N] int64 in 0..K: draft tokens of each chain
    nodes: torch.Tensor  # [G, N, K + 1] int64: each chain's node in each layer, g * N + number


class Layers(NamedTuple):
    """All layers from the root down; 0 where no node has that number."""

    shares: torch.Tensor  # [K + 1, G, N] float64
    residual: torch.Tensor  # [K + 1, G, N] float64: sum over x of R_v(x)
    density: torch.Tensor  # [K, G, N, B] float64: F / q in each bin, before the trim


class Fork(NamedTuple):
    """The chains of one layer, on their way to the next."""

    parent: torch.Tensor  # [G, N] int64 in 0..G * N - 1: each chain's node
    child: torch.Tensor  # [G, N] int64: its node in the next layer
    tokens: torch.Tensor  # [G, N] int64
    live: torch.Tensor  # [G, N] bool: goes on, from a node with a share
    counts: torch.Tensor  # [G, N] float64, by node: chains that go on there


class Rows(NamedTuple):
    """Next-token distributions of M nodes."""

    p: torch.Tensor  # [M, V] float32
    q: torch.Tensor  # [M, V] float32
    bins: torch.Tensor  # [M, V] int64
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [G, N] p, q and bins of chains' tokens


class Verified(NamedTuple):
    """Accepted prefix, per group, and the distribution of the next token."""

    num_columns: torch.Tensor  # [G] int64 in 0..K: draft tokens accepted
    winner: torch.Tensor  # [G] int64: a chain that carries them
    rejects: torch.Tensor  # [G] bool: the next token is drawn from the residual; else from p
    left: torch.Tensor  # [G] int64: the group's row of `residuals`
    residuals: torch.Tensor  # [R, V] float32: residual distributions, not normalised


def every_place(flags: torch.Tensor) -> torch.Tensor:
    """Return at least the places of true ``flags``: all, since to read them is a wait."""
    return torch.arange(flags.numel(), device=flags.device)


Places = Callable[[torch.Tensor], torch.Tensor]  # `every_place`, or fewer


def verify(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    uniforms: torch.Tensor,
    places: Places = every_place,
) -> Verified:
    """Accept a prefix of one of the chains, with the residual of the token that follows.

    Each round needs fresh random numbers, for the draft tokens as well as ``uniforms``.

    Args:
        tokens: ``[G, N, K]`` int64.
        lengths: ``[G, N]`` int64 in 0..K: draft tokens of each chain, up to its end.
        p: of ``G * N * (K + 1)`` draws; that of column k follows a chain's first k tokens.
        q: K distributions of ``G * N`` draws.
        uniforms: ``[G]`` float64 in [0, 1).
        places: returns the nodes and bins that are computed.
    """
    size, num_chains, num_steps = tokens.shape
    vocab_size = p.scores.shape[1]
    most = max(1, _ENTRIES // (num_chains * max(vocab_size, NUM_BINS * NUM_POINTS)))

    def part(first: int) -> tuple[torch.Tensor, ...]:
        def rows(of_group: int) -> slice:
            return slice(first * of_group, min(first + most, size) * of_group)

        some = rows(1)
        tree = grow(tokens[some], lengths[some])
        of_p = p.at(rows(num_chains * (num_steps + 1)))
        of_q = [of_column.at(rows(num_chains)) for of_column in q]
        layers = descend(tree, of_p, of_q, places)
        num_columns, winner = leave(layers, uniforms[some])
        rejects, residuals = residual_of(
            tree, layers, of_p, of_q, num_columns=num_columns, winner=winner, places=places
        )
        return num_columns, winner, rejects, residuals

    parts = zip(*map(part, range(0, size, most)), strict=True)
    num_columns, winner, rejects, residuals = map(torch.cat, parts)
    left = torch.arange(size, device=tokens.device)
    return Verified(num_columns, winner, rejects, left, residuals)


def nothing(num_steps: torch.Tensor) -> Verified:
    """Return the result in which no draft token is accepted or rejected; ``num_steps`` ``[G]``."""
    none = torch.zeros_like(num_steps)
    return Verified(none, none, none.bool(), none, none.new_empty(0, 0).float())


def grow(tokens: torch.Tensor, lengths: torch.Tensor) -> Tree:
    """Return the tree of chains; behind its end a chain has nodes of its own."""
    size, num_chains, num_steps = tokens.shape
    chain = torch.arange(num_chains, device=tokens.device).view(-1, 1)
    has = torch.arange(num_steps, device=tokens.device) < lengths.unsqueeze(2)  # [G, N, K]
    equal = (tokens.unsqueeze(1) == tokens.unsqueeze(2)) & has.unsqueeze(1) & has.unsqueeze(2)
    first = equal.long().cumprod(3).argmax(2)  # [G, N, K]
    nodes = torch.nn.functional.pad(torch.where(has, first, chain), (1, 0))
    offset = torch.arange(0, size * num_chains, num_chains, device=tokens.device)
    return Tree(tokens, lengths, nodes + offset.view(-1, 1, 1))


def descend(
    tree: Tree,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    places: Places = every_place,
) -> Layers:
    """Share out each layer in turn; p and q are of `verify`."""
    if tree.tokens.shape[1] == 1:
        return descend_single(tree, p, q)
    root = torch.zeros_like(tree.lengths, dtype=torch.float64)
    root[:, 0] = 1.0
    shares = [root]
    residuals = []
    densities = []
    for column, of_column in enumerate(q):
        residual, density, below = share_out(
            tree, shares[-1], p, of_column, column=column, places=places
        )
        shares.append(below)
        residuals.append(residual)
        densities.append(density)
    residuals.append(shares[-1])
    return Layers(torch.stack(shares), torch.stack(residuals), torch.stack(densities))


def descend_single(tree: Tree, p: TokenDistribution, q: Sequence[TokenDistribution]) -> Layers:
    """Return what `share_out` gives layer by layer, for trees of one chain each.

    A child's share is min(1, w p / q), and a node's residual the sum of max(w p - q, 0): block
    verification (arXiv 2403.10444, algorithm 2).
    """
    size, _, num_steps = tree.tokens.shape
    log_p = p.log_probs().unflatten(0, (size, num_steps + 1))[:, :-1]  # [G, K, V]
    log_q = torch.stack([of_column.log_probs() for of_column in q], 1)
    at = tree.tokens.transpose(1, 2)  # [G, K, 1]
    ratio = (log_p.gather(2, at).double() - log_q.gather(2, at)).exp().squeeze(2)
    shares = [torch.ones_like(ratio[:, 0])]
    lives = []
    for column in range(num_steps):
        lives.append((shares[-1] > LEAST_SHARE) & (column < tree.lengths[:, 0]))
        claim = (shares[-1] * ratio[:, column]).clamp_max(1.0)
        shares.append(torch.where(lives[-1], claim, 0.0))
    every = torch.stack(shares)  # [K + 1, G]
    splits = torch.stack(lives)  # [K, G]
    # R_v(x), in place: it is as large as p.
    left = log_p.exp().mul_(every[:-1].T.unsqueeze(2).float()).sub_(log_q.exp_()).clamp_min_(0.0)
    residual = torch.where(splits, left.sum(2, dtype=torch.float64).T, every[:-1])
    density = splits.double().view(num_steps, size, 1, 1).expand(-1, -1, -1, NUM_BINS)
    return Layers(every.unsqueeze(2), torch.cat([residual, every[-1:]]).unsqueeze(2), density)


def share_out(
    tree: Tree,
    shares: torch.Tensor,
    p: TokenDistribution,
    q: TokenDistribution,
    *,
    column: int,
    places: Places = every_place,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide the shares of a layer among its children, which have the tokens of a column.

    Args:
        shares: ``[G, N]`` float64 of the layer.
        p, q: of `verify`; q of the column.
        column: in 0..K - 1.

    Returns:
        The layer's residual and density, and the shares of the next one; see `Layers`.
    """
    fork = forked(tree, shares, column)
    rates = shares.new_zeros((*shares.shape, NUM_BINS))  # [G, N, B]
    density = torch.zeros_like(rates)
    splits = fork.counts > 0
    nodes = places(splits)
    below = torch.zeros_like(shares)
    if not len(nodes):
        return shares, density, below
    rows = read(fork, nodes, p, q, column, tree.nodes.shape[2])
    own_p, own_q, own_bin = rows.own
    raced = race(
        shares.take(nodes),
        fork.counts.take(nodes),
        nodes.div(shares.shape[1], rounding_mode="floor"),
        bin_masses(rows.p, rows.bins),
        bin_masses(rows.q, rows.bins),
        num_groups=len(shares),
        places=places,
    )
    for of_layer, of_nodes in zip((rates, density), raced, strict=True):
        of_layer.flatten(0, 1)[nodes] = of_nodes
    left = residual(rows, shares.take(nodes), density.flatten(0, 1)[nodes])
    left = shares.put(nodes, left.sum(1, dtype=torch.float64)).where(splits, shares)
    at = fork.parent * NUM_BINS + own_bin
    rate = torch.where(fork.live, rates.take(at), 0.0)
    claim = rate * per_rate(rate.sum(1, keepdim=True))
    target = shares.take(fork.parent) * own_p  # [G, N]
    trim = (target / (density.take(at) * own_q).clamp_min(TINY)).clamp_max(1.0)
    claim = torch.where(fork.live, claim * trim, 0.0)
    return left, density, below.put_(fork.child, claim, accumulate=True)


def forked(tree: Tree, shares: torch.Tensor, column: int) -> Fork:
    """Return the chains between the layers ``column`` and the next; ``shares`` ``[G, N]``."""
    parent = tree.nodes[:, :, column]  # [G, N]
    child = tree.nodes[:, :, column + 1]
    live = (shares.take(parent) > LEAST_SHARE) & (column < tree.lengths)
    counts = torch.zeros_like(shares).put_(parent, live.double(), accumulate=True)
    return Fork(parent, child, torch.where(live, tree.tokens[:, :, column], 0), live, counts)


def read(
    fork: Fork,
    nodes: torch.Tensor,
    p: TokenDistribution,
    q: TokenDistribution,
    column: int,
    num_columns: int,
) -> Rows:
    """Return the distributions at ``nodes`` ``[M]`` int64, of all of the layer."""
    log_p = p.at(nodes * num_columns + column).log_probs()  # [M, V]
    log_q = q.at(nodes).log_probs()
    bins = bins_of(log_p, log_q)
    row = torch.zeros_like(fork.parent).put_(nodes, torch.arange(len(nodes), device=nodes.device))
    at = row.take(fork.parent) * log_p.shape[1] + fork.tokens  # [G, N]
    own = log_p.take(at).double().exp(), log_q.take(at).double().exp(), bins.take(at)
    return Rows(log_p.exp_(), log_q.exp_(), bins, own)


def residual(rows: Rows, shares: torch.Tensor, density: torch.Tensor) -> torch.Tensor:
    """Return R_v(x) of the nodes of ``rows``, ``[M, V]``: shares ``[M]``, density ``[M, B]``."""
    flow = rows.q * density.to(rows.q.dtype).gather(1, rows.bins)
    return (rows.p * shares.unsqueeze(1).to(rows.p.dtype)).sub_(flow).clamp_min_(0.0)


def race(
    shares: torch.Tensor,
    counts: torch.Tensor,
    group: torch.Tensor,
    p_masses: torch.Tensor,
    q_masses: torch.Tensor,
    *,
    num_groups: int,
    places: Places = every_place,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rates that divide a layer among its children, and the flow over q, both ``[M, B]``.

    Rates begin at importance weights, w p / (n q), and rise where the flow is short of w p. More
    steps lead to the largest flow into the next layer, but through few nodes, from which less flows
    on. A group's only chain takes all, whatever its token.

    Args:
        shares: ``[M]`` float64 of M nodes.
        counts: ``[M]`` float64: n chains that draw a token at each.
        group: ``[M]`` int64 of these nodes.
        p_masses, q_masses: ``[M, B]`` float64.
        num_groups: G.
    """

    def total(of_nodes: torch.Tensor) -> torch.Tensor:
        """Add up ``[M, C]`` by group, and return each node's group's sum."""
        sums = of_nodes.new_zeros(num_groups, of_nodes.shape[1])
        return sums.index_add_(0, group, of_nodes)[group]

    def in_node(of_bins: torch.Tensor) -> torch.Tensor:
        """Add up ``[U, C]`` by node."""
        return of_bins.new_zeros(len(shares), of_bins.shape[1]).index_add_(0, node, of_bins)

    points, weights = quadrature(shares.device)
    used = places(q_masses > 0)  # [U] bins, of all nodes
    node = used.div(NUM_BINS, rounding_mode="floor")
    q = (q_masses / q_masses.sum(1, keepdim=True)).take(used).unsqueeze(1)  # [U, 1]
    counts = counts.unsqueeze(1)
    demand = shares.unsqueeze(1) * p_masses
    wanted = demand.take(used).unsqueeze(1) / q.clamp_min(TINY)
    wanted = wanted / total(demand.sum(1, keepdim=True)).clamp_min(TINY)[node]
    supply = counts[node] * q
    is_alone = total(counts)[node] == 1
    races = (used % NUM_BINS > 0).unsqueeze(1)
    rates = wanted / counts[node].clamp_min(1.0)
    density = wanted
    for step in range(NUM_STEPS + 1):
        if step > 0:
            lack = wanted / density.clamp_min(TINY)
            rates = rates * lack.clamp(1 / LARGEST_STEP, LARGEST_STEP) ** SPEED
        mean = total(in_node(supply * rates))[node]  # of S
        rates = (rates / mean.clamp_min(TINY)).clamp(1 / LARGEST_RATE, LARGEST_RATE) * races
        rates = torch.where(is_alone, 1.0, rates)
        decay = (-rates * points).exp()  # [U, T]
        log_mean = in_node(q * decay).clamp_min(TINY).log()  # [M, T]
        others = weights * (total(counts * log_mean) - log_mean).exp()
        density = counts[node] * rates * (decay * others[node]).sum(1, keepdim=True)
    spread = torch.zeros_like(q_masses)
    return spread.put(used, rates.squeeze(1)), spread.put(used, density.squeeze(1))


def per_rate(sums: torch.Tensor) -> torch.Tensor:
    """Return g(S), of sums S of any shape."""
    points, weights = quadrature(sums.device)
    return (-sums.unsqueeze(-1) * points).exp() @ weights


def quadrature(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points t and weights of g(S) = sum_k weight_k exp(-t_k S), both ``[T]`` float64.

    They are trapezoids over log t, one nat wide, whose first stands for all below. S g(S) is 1 at S
    = 1, where all chains have the mean rate, above 0.98 from e^-7 to e^5, and at most 1 (to 1e-6).
    """
    points = (torch.arange(NUM_POINTS, device=device).double() + LOWEST_POINT).exp()
    weights = points.clone()
    weights[:1] /= 1 - math.exp(-1)
    return points, weights / (weights * (-points).exp()).sum()


def bins_of(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the bin of each token by p / q, int64; any where both are zero."""
    ratio = (log_p - log_q).nan_to_num_(nan=0.0)
    place = ratio.mul_(BINS_PER_NAT).floor_().add_(NATS_BELOW * BINS_PER_NAT)
    return place.clamp_(0, NUM_BINS - 1).long()


def bin_masses(probs: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """Return the mass of the tokens in each bin, ``[M, B]`` float64.

    Masses are integers times a unit, so that their sums do not depend on the order, which differs
    between runs on a GPU.
    """
    masses = torch.zeros(len(bins), NUM_BINS, dtype=torch.float64, device=bins.device)
    return masses.scatter_add_(1, bins, (probs * _UNIT).round_().double()) / _UNIT


def leave(layers: Layers, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a node of each group by `exits`: its layer and number, both ``[G]`` int64."""
    chances = exits(layers).flip(1)  # from the deepest layer up
    num_steps = chances.shape[1] - 1
    num_chains = chances.shape[2]
    through = chances.flatten(1).cumsum(1)
    place = (through <= uniforms.unsqueeze(1)).sum(1)
    place = place.minimum((through < through[:, -1:]).sum(1))  # the last of all, to rounding
    return num_steps - place.div(num_chains, rounding_mode="floor"), place % num_chains


def exits(layers: Layers) -> torch.Tensor:
    """Return the probability that each node is the accepted prefix, ``[G, K + 1, N]`` float64."""
    chances: list[torch.Tensor] = []
    reach = torch.ones_like(layers.shares[0, :, 0])
    for shares, residual in zip(layers.shares.flip(0), layers.residual.flip(0), strict=True):
        missing = 1.0 - shares.sum(1)
        missing = missing.masked_fill(missing < ROUNDING, 0.0)
        total = residual.sum(1) + missing
        scale = torch.where(total > 0, reach / total, 0.0)
        chances.append(residual * scale.unsqueeze(1))
        reach = torch.where(total > 0, missing * scale, reach)
    chances[-1][:, 0] += reach  # zero, but for rounding
    return torch.stack(chances[::-1], 1)


def residual_of(
    tree: Tree,
    layers: Layers,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    *,
    num_columns: torch.Tensor,
    winner: torch.Tensor,
    places: Places = every_place,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether R of one node per group is not p but for its sum ``[G]``, and R ``[G, V]``.

    The node is of the layer ``num_columns`` and has the number ``winner``, both ``[G]``.
    """
    size, num_chains, _ = tree.tokens.shape
    nodes = torch.arange(0, size * num_chains, num_chains, device=winner.device) + winner
    rejects = torch.zeros_like(nodes, dtype=torch.bool)
    found = torch.zeros(size, p.scores.shape[1], device=winner.device)
    for column, of_column in enumerate(q):
        shares = layers.shares[column]
        density = layers.density[column]
        is_here = num_columns == column
        here = places(is_here)
        if not len(here):
            continue
        fork = forked(tree, shares, column)
        at = nodes[here]
        splits = fork.counts.take(nodes) > 0
        rejects |= is_here & splits & (layers.residual[column].take(nodes) > 0)
        rows = read(fork, at, p, of_column, column, len(layers.shares))
        new = residual(rows, shares.take(at), density.flatten(0, 1)[at])
        found[here] = new.where(is_here[here].unsqueeze(1), found[here])
    return rejects, found


class Kept(NamedTuple):
    """Kept part of each group's chains, and the distribution of the next token."""

    num_columns: torch.Tensor  # [G] int64 in 0..K
    winner: torch.Tensor  # [G] int64: the chain that carries them
    by_block: torch.Tensor  # [G] bool: by the block's evidence, not by exact verification
    rejects: torch.Tensor  # [G] bool: the next token comes from the residual
    row: torch.Tensor  # [G] int64: the row of p after them, of G * N * (K + 1)
    ess: torch.Tensor  # [G] float64 effective sample size of the block; N where none may be kept


def keep(verified: Verified, block: Block, ends: torch.Tensor) -> Kept:
    """Keep the columns that the block's evidence covers, or those accepted, if they are more.

    One chain is drawn by weight in the last column that the evidence covers.

    Args:
        block: of the drafts, whose chains have equal weights before it, and power 1.
        ends: ``[G, N, K]`` bool: the sequence ends with this token.
    """
    num_steps = block.num_steps
    start = torch.where(block.present, 0.0, -torch.inf).double()
    gained = torch.where(block.up_to_end, block.log_p.double() - block.log_q, 0.0)
    running = accumulate(start, gained).transpose(1, 2)  # [G, K + 1, N]
    threshold = block.evidence_threshold
    covered = covered_columns(running, threshold, num_steps, block.keep_uniforms)
    weighed = column_of(running, covered)  # equal weights where nothing is kept by evidence
    drawn = draw(normalized(weighed), block.uniforms[:, 0])
    group = torch.arange(len(drawn), device=running.device)
    column = torch.arange(ends.shape[2], device=running.device)
    # A sequence that has ended counts as reaching through all columns: counting its tokens instead
    # would disfavour sequences that end early.
    has_ended = (ends[group, verified.winner] & (column < verified.num_columns.unsqueeze(1))).any(1)
    by_block = covered > torch.where(has_ended, num_steps, verified.num_columns)
    of_block = torch.minimum(covered, block.up_to_end[group, drawn].sum(1))
    num_columns = torch.where(by_block, of_block, verified.num_columns)
    winner = torch.where(by_block, drawn, verified.winner)
    return Kept(
        num_columns=num_columns,
        winner=winner,
        by_block=by_block,
        rejects=verified.rejects & ~by_block,
        row=(group * ends.shape[1] + winner) * (ends.shape[2] + 1) + num_columns,
        ess=effective_sample_size(weighed),
    )
