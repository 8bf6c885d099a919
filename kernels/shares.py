"""Share out the layers of a tree from the root down, and add up what is left at each node.

Tiles of each node store the mass of p and q in each bin, also of nodes that get no share; one
program a group has each layer's chains race, and shares it out among its children; then tiles of
all columns store parts of residuals' sums.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tree import (
    EXACT,
    NUM_BINS,
    NUMBERS,
    Column,
    Columns,
    bin_of,
    goes_on,
    read_tokens,
    rows_at,
)
from sglang_smc.smc import verification
from sglang_smc.smc.verification import Layers, Tree

_NUM_POINTS = tl.constexpr(verification.NUM_POINTS)
_FIRST_POINT = tl.constexpr(math.exp(verification.LOWEST_POINT))
_FIRST_WEIGHT = tl.constexpr(float(verification.quadrature(torch.device("cpu"))[1][0]))
_WEIGHT = tl.constexpr(_FIRST_WEIGHT.value / _FIRST_POINT.value * (1 - math.exp(-1)))  # of a point
_E = tl.constexpr(math.e)
_NUM_STEPS = tl.constexpr(verification.NUM_STEPS)
_SPEED = tl.constexpr(verification.SPEED)
_LARGEST_STEP = tl.constexpr(verification.LARGEST_STEP)
_LARGEST_RATE = tl.constexpr(verification.LARGEST_RATE)
_LEAST_SHARE = tl.constexpr(verification.LEAST_SHARE)
_TINY = tl.constexpr(verification.TINY)
_SETS = tl.constexpr(8)  # of tokens whose masses are added up apart, one a warp
_TURN = tl.constexpr(256)  # tokens binned at once, one a thread
_BITS = tl.constexpr(2)  # of a bin: its column in `_masses_of_tile`; the others are its row
_IN_ROW = tl.constexpr(1 << _BITS.value)


class _Read(NamedTuple):
    """Hold what tiles of nodes hand to `_share_out`."""

    masses: torch.Tensor  # [K, G, N, tiles, 2, B] float32 of p and of q; of N = 1 none
    log_p: torch.Tensor  # [K, G, N] float32 of each chain's token
    log_q: torch.Tensor  # [K, G, N] float32


def descend(tree: Tree, columns: Columns) -> Layers:
    """Share out each layer in turn, in three launches.

    Reference: `sglang_smc.smc.verification.descend`, with the p and q of ``columns``, which
    `grow` has listed. Here residuals are parts of their sums, ``[K, G, N, tiles]``
    float32, of all layers but the last; shares and densities are float32, and agree to rounding
    (1e-6). They are undefined where no node has that number; densities of one chain are none.
    """
    size, num_chains, num_steps = tree.tokens.shape
    laws = columns.laws
    sizes = columns.sizes
    num_tiles = sizes.num_tiles.value
    num_raced = 0 if num_chains == 1 else num_chains  # a chain alone takes all

    def of_nodes(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=tree.tokens.device)

    layers = Layers(
        shares=of_nodes(num_steps + 1, size, num_chains),
        residual=of_nodes(num_steps, size, num_chains, num_tiles),
        density=of_nodes(num_steps, size, num_raced, NUM_BINS.value),
    )
    shape = num_steps, size, num_chains
    masses = of_nodes(num_steps, size, num_raced, num_tiles, 2, NUM_BINS.value)
    read = _Read(masses, of_nodes(*shape), of_nodes(*shape))
    padded = triton.next_power_of_2(num_chains)
    own = sizes._replace(padded_chains=tl.constexpr(padded))  # their rates take the time
    warps = min(8, padded)  # with 64 rates each
    num_read = num_tiles if num_raced else 1
    grid = size * num_chains, num_read, num_steps
    _read_nodes[grid](tree, laws, read, num_chains, sizes, num_warps=_SETS.value, **EXACT)
    _share_out[(size,)](tree, layers, read, num_chains, num_steps, own, num_warps=warps, **EXACT)
    grid = size * num_chains, num_tiles, num_steps
    _add_up_residual[grid](tree, layers, laws, num_chains, sizes, num_warps=8, **EXACT)
    return layers


@triton.jit
def _token(tree, at, place, mask):
    return tl.load(tree.tokens + place * at.num_steps + at.column, mask=mask, other=0)


@triton.jit(do_not_specialize=NUMBERS)
def _read_nodes(tree, laws, read, num_chains, sizes):
    """Store the masses of a tile, and the probabilities of the tokens of chains that go on."""
    num_nodes = tl.num_programs(0)
    num_steps = tl.num_programs(2)
    at = Column(laws, tl.program_id(2), num_nodes, num_chains, num_steps, sizes.unit)
    node = tl.program_id(0)
    part = tl.program_id(1)
    place, goes = goes_on(tree, at, node, sizes.padded_chains)
    if tl.max(goes.to(tl.int32), 0) != 0:
        p_row, q_row = rows_at(at, node, sizes.padded_tiles)
        first = at.column * at.num_nodes  # of this column's nodes
        if part == 0:
            tokens = _token(tree, at, place, goes)
            to = first + place
            log_p, log_q, _ = read_tokens(at, p_row, q_row, tokens)
            tl.store(read.log_p + to, log_p, mask=goes)
            tl.store(read.log_q + to, log_q, mask=goes)
        if sizes.padded_chains > 1:
            of_tile = ((first + node) * sizes.num_tiles + part) * (2 * NUM_BINS)
            masses = _masses_of_tile(at, p_row, q_row, part, sizes.tile)
            tl.store(read.masses + of_tile + _places_of_masses(), masses)


@triton.jit
def _masses_of_tile(at, p_row, q_row, part, tile: tl.constexpr):
    """Return the masses of a tile of a node's tokens in each bin, ``[B / 4, 8]``.

    A product of matrices on tensor cores: tokens have a one in the row of their bin, by p and q in
    its columns. TF32 has 11 bits of a number, so that p and q are sums of two, to half a unit of
    the last place of float32.
    """
    each: tl.constexpr = _TURN // _SETS
    row = tl.arange(0, NUM_BINS // _IN_ROW)[None, :, None]
    column = tl.arange(0, 2 * _IN_ROW)[None, None, :]
    masses = tl.zeros([_SETS, NUM_BINS // _IN_ROW, 2 * _IN_ROW], dtype=tl.float32)
    # Other programs hide the wait for loads; copies ahead would cost as much as a third of a turn.
    for start in tl.range(0, tile, _TURN, num_stages=1):
        tokens = part * tile + start + tl.arange(0, _TURN)
        log_p, log_q, bins = read_tokens(at, p_row, q_row, tokens)
        p = tl.reshape(tl.exp(log_p), [_SETS, each, 1])
        q = tl.reshape(tl.exp(log_q), [_SETS, each, 1])
        p_high = leading(p)
        q_high = leading(q)
        is_in = tl.reshape(bins & (_IN_ROW - 1), [_SETS, each, 1]) == column % _IN_ROW
        high = tl.where(column < _IN_ROW, p_high, q_high)
        low = tl.where(column < _IN_ROW, leading(p - p_high), leading(q - q_high))
        ones = tl.where(tl.reshape(bins >> _BITS, [_SETS, 1, each]) == row, 1.0, 0.0)
        of_turn = tl.dot(ones, tl.where(is_in, low, 0.0), input_precision="tf32")
        of_turn = tl.dot(ones, tl.where(is_in, high, 0.0), of_turn, input_precision="tf32")
        masses += of_turn  # which rounds; tensor cores truncate sums
    return tl.sum(masses, 0)


@triton.jit
def leading(values):
    """Round to the 11 leading bits of 24 (Veltkamp's splitting); NaN stays."""
    scaled = values * (2.0**13 + 1.0)
    return scaled - (scaled - values)


@triton.jit
def _places_of_masses():
    """Return where `_Read.masses` has what is of a tile: ``[B / 4, 8]``, of p before of q."""
    row = tl.arange(0, NUM_BINS // _IN_ROW)[:, None]
    column = tl.arange(0, 2 * _IN_ROW)[None, :]
    return column // _IN_ROW * NUM_BINS + row * _IN_ROW + column % _IN_ROW


@triton.jit
def _all_masses(read, place, mask, sizes):
    """Return the masses of p and q in each bin of a group's nodes, summed over tiles: [N, B]."""
    numbers = tl.arange(0, NUM_BINS)[None, :]
    in_p = tl.zeros([sizes.padded_chains, NUM_BINS], dtype=tl.float32)
    in_q = tl.zeros([sizes.padded_chains, NUM_BINS], dtype=tl.float32)
    for part in tl.range(sizes.num_tiles, loop_unroll_factor=4):  # loads of four at once
        masses = (
            read.masses + ((place * sizes.num_tiles + part) * (2 * NUM_BINS))[:, None] + numbers
        )
        in_p += tl.load(masses, mask=mask[:, None], other=0.0)
        in_q += tl.load(masses + NUM_BINS, mask=mask[:, None], other=0.0)
    return in_p, in_q


@triton.jit
def _quadrature():
    """Return the first point and its weight, and by what they are multiplied: all in float64."""
    point = tl.full([], _FIRST_POINT, tl.float64)
    weight = tl.full([], _FIRST_WEIGHT, tl.float64)
    return point, weight, tl.full([], _E, tl.float64), tl.full([], _WEIGHT, tl.float64)


@triton.jit
def _race(shares, counts, in_p, in_q):
    """Compute `smc.verification.race` of the nodes of one group, ``[N]`` and ``[N, B]``."""
    total_q = tl.sum(in_q, 1)
    q = in_q / tl.where(total_q > 0, total_q, 1.0)[:, None]
    demand = shares[:, None] * in_p
    is_used = q > 0
    wanted = tl.where(is_used, demand / tl.where(is_used, q, 1.0), 0.0)
    wanted /= tl.maximum(tl.sum(tl.sum(demand, 1), 0), _TINY)
    races = tl.arange(0, NUM_BINS)[None, :] > 0
    is_alone = tl.sum(counts, 0) == 1
    each = counts[:, None]
    rates = wanted / tl.maximum(each, 1.0)
    density = wanted
    for step in tl.static_range(_NUM_STEPS + 1):
        if step > 0:
            lack = wanted / tl.maximum(density, _TINY)
            lack = tl.minimum(tl.maximum(lack, 1 / _LARGEST_STEP), _LARGEST_STEP)
            rates *= tl.exp(tl.log(lack) * _SPEED)
        mean = tl.sum(tl.sum(each * q * rates, 1), 0)
        rates = rates / tl.maximum(mean, _TINY)
        rates = tl.minimum(tl.maximum(rates, 1 / _LARGEST_RATE), _LARGEST_RATE)
        rates = tl.where(is_alone, 1.0, tl.where(races, rates, 0.0))
        density = tl.zeros_like(rates)
        point, weight, per_point, of_point = _quadrature()
        for _ in range(_NUM_POINTS):  # unrolled, it takes seconds to compile
            decay = tl.exp(-rates * point.to(tl.float32))
            log_mean = tl.log(tl.maximum(tl.sum(q * decay, 1), _TINY))
            log_mean = tl.where(total_q > 0, log_mean, 0.0)
            others = tl.exp(tl.sum(counts * log_mean, 0) - log_mean)
            density += decay * (others * weight.to(tl.float32))[:, None]
            point *= per_point
            weight = point * of_point
        density *= each * rates
    return rates, density


@triton.jit
def _per_rate(total):
    """Compute `smc.verification.per_rate`."""
    point, weight, per_point, of_point = _quadrature()
    found = total * 0.0
    for _ in range(_NUM_POINTS):
        found += tl.exp(-total * point.to(tl.float32)) * weight.to(tl.float32)
        point *= per_point
        weight = point * of_point
    return found


@triton.jit
def _at(table, nodes, bins):
    """Return each chain's entry of a table ``[N, B]``, by its node and its token's bin."""
    numbers = tl.arange(0, NUM_BINS)[None, :]
    rows = tl.gather(table, nodes[:, None] + numbers * 0, 0)
    return tl.sum(tl.where(numbers == bins[:, None], rows, 0.0), 1)


@triton.jit
def _claims(rates, density, parent, live, w_parent, log_p, log_q):
    """Return what each chain claims for its child: c g(S), trimmed to F_v(x) <= w_v p(x | v)."""
    bins = bin_of(log_p, log_q)
    rate = tl.where(live, _at(rates, parent, bins), 0.0)
    flow = _at(density, parent, bins) * tl.exp(log_q)
    target = tl.where(live, w_parent * tl.exp(log_p), 0.0)
    trim = tl.minimum(target / tl.maximum(flow, _TINY), 1.0)
    return tl.where(live, rate * _per_rate(tl.sum(rate, 0)) * trim, 0.0)


@triton.jit(do_not_specialize=NUMBERS)
def _share_out(tree, layers, read, num_chains, num_steps, sizes):
    """Share out each layer of a group in turn, and store the shares w_v and densities F_v / q.

    A turn is that of `smc.verification.share_out`. Chains that go on from a node v race for its
    share; a race gives each token a rate c, by its bin of p / q. A chain claims c g(S), where S is
    the sum of all chains' rates, and a child's share w_vx is the sum of what its chains claim. One
    chain alone claims min(1, w p / q), as `smc.verification.descend_single` says.
    """
    num_nodes = tl.num_programs(0) * num_chains
    group = tl.program_id(0)
    chain = tl.arange(0, sizes.padded_chains)
    here = chain < num_chains
    place = group * num_chains + chain
    lengths = tl.load(tree.lengths + place, mask=here, other=0)
    w_v = tl.where(chain == 0, 1.0, 0.0)
    parent = chain * 0
    tl.store(layers.shares + place, w_v, mask=here)
    for column in range(num_steps):
        # `forked`: which chains go on, and from how many a node gets children.
        child = tl.load(tree.nodes + place * (num_steps + 1) + column + 1, mask=here, other=-1)
        child = child.to(tl.int32) - group * num_chains
        w_parent = tl.gather(w_v, parent, 0)
        live = here & (column < lengths) & (w_parent > _LEAST_SHARE)
        is_parent = (chain[:, None] == parent[None, :]) & live[None, :]
        splits = tl.max(is_parent.to(tl.int32), 1) != 0
        counts = tl.sum(tl.where(is_parent, 1.0, 0.0), 1)

        # Claims, and the shares of the next layer.
        at = column * num_nodes + place
        log_p = tl.load(read.log_p + at, mask=live, other=-float("inf"))
        log_q = tl.load(read.log_q + at, mask=live, other=-float("inf"))
        if sizes.padded_chains == 1:
            claim = tl.where(live, tl.minimum(w_parent * tl.exp(log_p - log_q), 1.0), 0.0)
        else:
            in_p, in_q = _all_masses(read, at, splits, sizes)
            rates, density = _race(w_v, counts, in_p, in_q)
            table = layers.density + (at * NUM_BINS)[:, None] + tl.arange(0, NUM_BINS)[None, :]
            tl.store(table, density, mask=splits[:, None])
            claim = _claims(rates, density, parent, live, w_parent, log_p, log_q)
        is_child = (chain[:, None] == child[None, :]) & live[None, :]
        w_v = tl.sum(tl.where(is_child, claim[None, :], 0.0), 1)
        parent = tl.where(here, child, chain)
        tl.store(layers.shares + at + num_nodes, w_v, mask=here)


@triton.jit
def residual_at(layers, at, node, share, columns, sizes):
    """Return R of some tokens at a node."""
    p_row, q_row = rows_at(at, node, sizes.padded_tiles)
    log_p, log_q, bins = read_tokens(at, p_row, q_row, columns)
    flow = tl.exp(log_q)
    if sizes.padded_chains > 1:
        flow *= tl.load(layers.density + (at.column * at.num_nodes + node) * NUM_BINS + bins)
    difference = share * tl.exp(log_p) - flow
    # NaN propagates, unlike through a maximum.
    return tl.where(difference < 0, 0.0, difference)


@triton.jit(do_not_specialize=NUMBERS)
def _add_up_residual(tree, layers, laws, num_chains, sizes):
    """Store a tile's part of a node's residual; a node without children keeps its share."""
    num_nodes = tl.num_programs(0)
    num_steps = tl.num_programs(2)
    at = Column(laws, tl.program_id(2), num_nodes, num_chains, num_steps, sizes.unit)
    node = tl.program_id(0)
    part = tl.program_id(1)
    splits = tl.max(goes_on(tree, at, node, sizes.padded_chains)[1].to(tl.int32), 0) != 0
    of_layer = at.column * at.num_nodes + node
    share = tl.load(layers.shares + of_layer)
    left = tl.where(part == 0, share, 0.0)
    if splits & (share > _LEAST_SHARE):
        columns = part * sizes.tile + tl.arange(0, sizes.tile)
        left = tl.sum(residual_at(layers, at, node, share, columns, sizes), 0)
    tl.store(layers.residual + of_layer * sizes.num_tiles + part, left)
