"""Verify drafted chains as a tree: six launches, and rows of the vocabulary are read twice.

Tiles of each node store the mass of p and q in each bin, also of nodes that get no share; one
program a group goes down: it has a layer's chains race, and shares it out among its children. Then
tiles of all columns store parts of residuals' sums, one program a group goes up and draws where it
stops, and tiles store the residual there.

Every kernel that needs a token's bin recomputes it, from operations that no compiler rounds
differently: differences, and a product with a power of two.

A kernel that reads rows of q is compiled once for any number of columns. The first launch lists how
far each column's tensors lie from those of the first one, and a program takes those of its column.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.sample import RowSums, Source, log_probs_at, row_scale, summed
from sglang_smc.kernels.tensors import tiles
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.filters import KeptTokens
from sglang_smc.smc.verification import Layers, Tree, Verified

NUM_BINS = tl.constexpr(verification.NUM_BINS)
_PER_NAT = tl.constexpr(verification.BINS_PER_NAT)
_LOWEST = tl.constexpr(-verification.NATS_BELOW * verification.BINS_PER_NAT)
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
_ROUNDING = tl.constexpr(verification.ROUNDING)
_TINY = tl.constexpr(verification.TINY)
_TILE = 4096  # tokens per program
_CHUNK = tl.constexpr(64)  # tokens binned at once
_EXACT = {"enable_fp_fusion": False}  # all kernels compute bit-identical probabilities
_NUMBERS = ["num_chains", "num_steps"]  # for which no kernel is compiled again


class _Tensors(NamedTuple):
    """The tensors of a column's q, whose places are listed; the last ones may be missing."""

    logits: Any
    temperature: Any
    highest: Any  # of `RowSums`, as the next one, and `first`
    total: Any
    greedy: Any = None
    first: Any = None
    peak: Any = None  # of `KeptTokens`, as the next four
    rate: Any = None
    lowest: Any = None
    key: Any = None
    last: Any = None
    rows: Any = None


_NUM_FIELDS = tl.constexpr(len(_Tensors._fields) + 1)  # with the stride of logits
_AT_LOGITS, _AT_TEMPERATURE, _AT_HIGHEST, _AT_TOTAL = (tl.constexpr(field) for field in range(4))
_AT_GREEDY, _AT_FIRST = (tl.constexpr(field) for field in range(4, 6))
_AT_PEAK, _AT_RATE, _AT_LOWEST, _AT_KEY, _AT_LAST = (tl.constexpr(field) for field in range(6, 11))
_AT_ROWS, _AT_STRIDE = (tl.constexpr(field) for field in range(11, 13))


class _Laws(NamedTuple):
    """The distributions of all columns."""

    p: Source
    p_sums: RowSums
    q: Source  # of the first column; of the others tensors and strides differ
    q_sums: RowSums
    # [K, fields] int64: elements of `_Tensors` from the first column's, and the stride of logits.
    places: torch.Tensor


class _Sizes(NamedTuple):
    """Hold the sizes that kernels are compiled for."""

    padded_chains: Any
    padded_tiles: Any
    tile: Any
    num_tiles: Any
    unit: Any  # which divides the places and strides of logits


class Columns(NamedTuple):
    """The distributions of all columns, and what kernels are compiled for."""

    laws: _Laws
    # [K] up to the last field that is there; whoever holds this keeps them at their addresses.
    tensors: tuple[tuple[torch.Tensor, ...], ...]
    strides: tuple[int, ...]  # [K] of logits
    sizes: _Sizes

    @classmethod
    def of(cls, p: TokenDistribution, q: Sequence[TokenDistribution], num_chains: int) -> "Columns":
        """Return the columns' distributions; p and q are of `verify`, for N chains."""
        of_p, p_sums, _ = summed(p)
        of_q = [(of, sums) for of, sums, _ in map(summed, q)]
        given = [_tensors_of(*law) for law in of_q]
        kinds = {(of.draws_each, of.vocab_size, sums.num_tiles) for of, sums in of_q}
        assert len(kinds) == 1, "all columns have distributions of the same sizes"
        kinds = {tuple(one if one is None else one.dtype for one in of) for of in given}
        assert len(kinds) == 1, "and of the same types"
        count = 1 + max(nth for nth, one in enumerate(given[0]) if one is not None)
        # Of what is missing between others no kernel reads the place.
        tensors = tuple(
            tuple(of.logits if one is None else one for one in of[:count]) for of in given
        )
        shape = len(of_q), _NUM_FIELDS.value
        places = torch.empty(shape, dtype=torch.int64, device=p.scores.device)
        strides = tuple(of.stride for of, _ in of_q)
        tile, num_tiles = tiles(p.scores.shape[1], _TILE)
        size = given[0].logits.itemsize
        steps = *strides, *(of.logits.storage_offset() for of in given)
        aligned = all(step * size % 16 == 0 for step in steps)
        padded = map(triton.next_power_of_2, (num_chains, num_tiles))
        numbers = *padded, tile, num_tiles, 16 // size if aligned else 1
        sizes = _Sizes(*map(tl.constexpr, numbers))
        return cls(_Laws(of_p, p_sums, *of_q[0], places), tensors, strides, sizes)


def _tensors_of(source: Source, sums: RowSums) -> _Tensors:
    return _Tensors(
        logits=source.logits,
        temperature=source.temperature,
        highest=sums.highest,
        total=sums.total,
        greedy=source.greedy,
        first=sums.first,
        rows=source.rows,
        **({} if source.kept is None else source.kept._asdict()),
    )


class _Column(NamedTuple):
    """A column, and all that is read there."""

    laws: Any
    column: Any
    num_nodes: Any  # G * N
    num_chains: Any
    num_steps: Any
    unit: Any  # of `_Sizes`


class _Uniforms(NamedTuple):
    """Hold a uniform of each group."""

    tensor: torch.Tensor  # [G] float64
    stride: int


class _Read(NamedTuple):
    """Hold what tiles of nodes hand to `_share_out`."""

    masses: torch.Tensor  # [K, G, N, tiles, 2, B] float32 of p and of q
    log_p: torch.Tensor  # [K, G, N] float32 of each chain's token
    log_q: torch.Tensor  # [K, G, N] float32


def verify(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    uniforms: torch.Tensor,
) -> Verified:
    """Accept a prefix of one of the chains, with the residual of the token that follows.

    Reference: `sglang_smc.smc.verification.verify`, same arguments. Residuals agree to rounding
    (1e-5), and so do decisions, unless a uniform is within that of a boundary between two. Where
    the next token is not drawn from it, a residual is undefined.
    """
    size, num_chains, num_steps = tokens.shape
    columns = Columns.of(p, q, num_chains)
    tree = grow(tokens, lengths, columns)
    layers = descend(tree, columns)

    def of_groups(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(size, *shape, dtype=dtype, device=tokens.device)

    found = Verified(
        num_columns=of_groups(torch.int64),
        winner=of_groups(torch.int64),
        rejects=of_groups(torch.bool),
        left=of_groups(torch.int64),
        residuals=of_groups(torch.float32, p.scores.shape[1]),
    )
    sizes = columns.sizes
    of_group = _Uniforms(uniforms, uniforms.stride(0))
    _leave[(size,)](tree, layers, of_group, found, num_chains, num_steps, sizes, num_warps=1)
    grid = size, layers.residual.shape[3]
    _store_residual[grid](
        layers, columns.laws, found, num_chains, num_steps, sizes, num_warps=8, **_EXACT
    )
    return found


def grow(tokens: torch.Tensor, lengths: torch.Tensor, columns: Columns) -> Tree:
    """Return the tree of chains, and list where the tensors of ``columns`` are, in one launch.

    Reference: `sglang_smc.smc.verification.grow`, of the first two arguments.
    """
    size, num_chains, num_steps = tokens.shape
    nodes = tokens.new_empty(size, num_chains, num_steps + 1)
    tree = Tree(tokens.contiguous(), lengths.contiguous(), nodes)
    padded = columns.sizes.padded_chains.value
    places = columns.laws.places
    listed = columns.tensors, columns.strides
    _grow[(size,)](tree, num_chains, num_steps, places, listed, padded_chains=padded, num_warps=1)
    return tree


def descend(tree: Tree, columns: Columns) -> Layers:
    """Share out each layer in turn, in three launches.

    Reference: `sglang_smc.smc.verification.descend`, with the p and q of ``columns``, which
    `grow` has listed. Here residuals are parts of their sums, ``[K, G, N, tiles]``
    float32, of all layers but the last; shares and densities are float32, and agree to rounding
    (1e-5). They are undefined where no node has that number.
    """
    size, num_chains, num_steps = tree.tokens.shape
    laws = columns.laws
    sizes = columns.sizes
    num_tiles = sizes.num_tiles.value

    def of_nodes(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=tree.tokens.device)

    layers = Layers(
        shares=of_nodes(num_steps + 1, size, num_chains),
        residual=of_nodes(num_steps, size, num_chains, num_tiles),
        density=of_nodes(num_steps, size, num_chains, NUM_BINS.value),
    )
    shape = num_steps, size, num_chains
    masses = of_nodes(*shape, num_tiles, 2, NUM_BINS.value)
    read = _Read(masses, of_nodes(*shape), of_nodes(*shape))
    warps = min(8, max(1, sizes.padded_chains.value // 2))  # of some hundred rates each
    grid = size * num_chains, num_tiles, num_steps
    _read_nodes[grid](tree, laws, read, num_chains, sizes, num_warps=8, **_EXACT)
    _share_out[(size,)](tree, layers, read, num_chains, num_steps, sizes, num_warps=warps, **_EXACT)
    _add_up_residual[grid](tree, layers, laws, num_chains, sizes, num_warps=8, **_EXACT)
    return layers


@triton.jit
def _apart(first, second):
    """Return how many elements lie between two addresses."""
    size: tl.constexpr = (first.dtype.element_ty.primitive_bitwidth + 7) // 8
    return (second.to(tl.int64) - first.to(tl.int64)) // size


@triton.jit(do_not_specialize=_NUMBERS)
def _grow(tree, num_chains, num_steps, places, listed, padded_chains: tl.constexpr):
    group = tl.program_id(0)
    if group == 0:
        tensors, strides = listed
        for column in tl.static_range(len(strides)):
            tl.store(places + column * _NUM_FIELDS + _AT_STRIDE, strides[column])
            for field in tl.static_range(len(tensors[0])):
                place = _apart(tensors[0][field], tensors[column][field])
                tl.store(places + column * _NUM_FIELDS + field, place)
    chain = tl.arange(0, padded_chains)
    here = chain < num_chains
    place = group * num_chains + chain
    lengths = tl.load(tree.lengths + place, mask=here, other=0)
    nodes = tree.nodes + place * (num_steps + 1)
    tl.store(nodes, (group * num_chains + chain * 0).to(tl.int64), mask=here)
    equal = here[:, None] & here[None, :]
    for column in range(num_steps):
        has = column < lengths
        tokens = tl.load(tree.tokens + place * num_steps + column, mask=has, other=-1)
        equal = equal & has[:, None] & (tokens[:, None] == tokens[None, :])
        first = tl.min(tl.where(equal, chain[None, :], padded_chains), 1)
        node = group * num_chains + tl.where(has, first, chain)
        tl.store(nodes + column + 1, node.to(tl.int64), mask=here)


@triton.jit
def _goes_on(tree, at, node, padded_chains: tl.constexpr):
    """Return the chains of a node that have a token here, and their places."""
    chain = tl.arange(0, padded_chains)
    place = node // at.num_chains * at.num_chains + chain
    here = chain < at.num_chains
    has = here & (at.column < tl.load(tree.lengths + place, mask=here, other=0))
    nodes = tree.nodes + place * (at.num_steps + 1) + at.column
    return place, has & (tl.load(nodes, mask=here, other=-1).to(tl.int32) == node)


@triton.jit
def _token(tree, at, place, mask):
    return tl.load(tree.tokens + place * at.num_steps + at.column, mask=mask, other=0)


@triton.jit
def _bin_of(log_p, log_q):
    """Compute `smc.verification.bins_of`; where that has NaN, the bin is arbitrary."""
    ratio = log_p - log_q
    place = tl.floor(tl.where(ratio == ratio, ratio, 0.0) * _PER_NAT)
    place = tl.minimum(tl.maximum(place, _LOWEST), _LOWEST + NUM_BINS - 1)
    return place.to(tl.int32) - _LOWEST


@triton.jit
def _own_q(at):
    """Return the tensors of the column's q for `_log_q`: logits again for those that are None."""
    like = at.laws.q
    places = at.laws.places + at.column * _NUM_FIELDS
    # Divided and multiplied, so that the compiler knows how many are loaded at once.
    logits = like.logits + tl.load(places + _AT_LOGITS) // at.unit * at.unit
    has_kept: tl.constexpr = like.kept is not None
    return (
        logits,
        tl.load(places + _AT_STRIDE) // at.unit * at.unit,
        like.temperature + tl.load(places + _AT_TEMPERATURE),
        like.rows + tl.load(places + _AT_ROWS) if like.rows is not None else logits,
        like.greedy + tl.load(places + _AT_GREEDY) if like.greedy is not None else logits,
        like.kept.peak + tl.load(places + _AT_PEAK) if has_kept else logits,
        like.kept.rate + tl.load(places + _AT_RATE) if has_kept else logits,
        like.kept.lowest + tl.load(places + _AT_LOWEST) if has_kept else logits,
        like.kept.key + tl.load(places + _AT_KEY) if has_kept else logits,
        like.kept.last + tl.load(places + _AT_LAST) if has_kept else logits,
    )


@triton.jit
def _log_q(at, own, node, row, tokens):
    """Return log q of some tokens; ``own`` is of `_own_q`, ``row`` of `_rows`."""
    like = at.laws.q
    logits, stride, temperature, rows, greedy, peak, rate, lowest, key, last = own
    law = Source(
        logits,
        temperature,
        like.draws_each,
        rows if like.rows is not None else None,
        greedy if like.greedy is not None else None,
        KeptTokens(peak, rate, lowest, key, last) if like.kept is not None else None,
        stride,
        like.vocab_size,
    )
    return log_probs_at(law, node, row, tokens)


@triton.jit
def _read_tokens(at, own, node, p_row, q_row, columns):
    """Return log p, log q and bins of some tokens at a node."""
    log_p = log_probs_at(at.laws.p, node * (at.num_steps + 1) + at.column, p_row, columns)
    log_q = _log_q(at, own, node, q_row, columns)
    return log_p, log_q, _bin_of(log_p, log_q)


@triton.jit
def _rows(at, node, padded_tiles: tl.constexpr):
    """Return what `log_probs_at` needs of a node's rows of p and q."""
    laws = at.laws
    draw = node * (at.num_steps + 1) + at.column
    like = laws.q_sums
    places = laws.places + at.column * _NUM_FIELDS
    sums = RowSums(
        like.highest + tl.load(places + _AT_HIGHEST),
        like.total + tl.load(places + _AT_TOTAL),
        None if like.first is None else like.first + tl.load(places + _AT_FIRST),
        like.num_tiles,
        None if like.rows is None else like.rows + tl.load(places + _AT_ROWS),
    )
    of_p = row_scale(laws.p, laws.p_sums, draw, padded_tiles)
    return of_p, row_scale(laws.q, sums, node, padded_tiles)


@triton.jit(do_not_specialize=_NUMBERS)
def _read_nodes(tree, laws, read, num_chains, sizes):
    """Store the masses of a tile, and the probabilities of the tokens of chains that go on."""
    num_nodes = tl.num_programs(0)
    num_steps = tl.num_programs(2)
    at = _Column(laws, tl.program_id(2), num_nodes, num_chains, num_steps, sizes.unit)
    node, part = tl.program_id(0), tl.program_id(1)
    place, goes = _goes_on(tree, at, node, sizes.padded_chains)
    if tl.max(goes.to(tl.int32), 0) != 0:
        p_row, q_row = _rows(at, node, sizes.padded_tiles)
        own = _own_q(at)
        first = at.column * at.num_nodes  # of this column's nodes
        if part == 0:
            tokens = _token(tree, at, place, goes)
            to = first + place
            log_p, log_q, _ = _read_tokens(at, own, node, p_row, q_row, tokens)
            tl.store(read.log_p + to, log_p, mask=goes)
            tl.store(read.log_q + to, log_q, mask=goes)
        in_p, in_q = _masses_of_tile(at, own, node, p_row, q_row, part, sizes.tile)
        of_tile = ((first + node) * sizes.num_tiles + part) * (2 * NUM_BINS)
        masses = read.masses + of_tile + tl.arange(0, NUM_BINS)
        tl.store(masses, in_p)
        tl.store(masses + NUM_BINS, in_q)


@triton.jit
def _masses_of_tile(at, own, node, p_row, q_row, part, tile: tl.constexpr):
    """Return the masses of p and of q that a tile of a node's tokens has in each bin, ``[B]``."""
    numbers = tl.arange(0, NUM_BINS)
    chunk: tl.constexpr = _CHUNK if tile > _CHUNK else tile
    in_p = tl.zeros([NUM_BINS, chunk], dtype=tl.float32)
    in_q = tl.zeros([NUM_BINS, chunk], dtype=tl.float32)
    for start in range(0, tile, chunk):
        columns = part * tile + start + tl.arange(0, chunk)
        log_p, log_q, bins = _read_tokens(at, own, node, p_row, q_row, columns)
        in_bin = bins[None, :] == numbers[:, None]
        in_p += tl.where(in_bin, tl.exp(log_p)[None, :], 0.0)
        in_q += tl.where(in_bin, tl.exp(log_q)[None, :], 0.0)
    return tl.sum(in_p, 1), tl.sum(in_q, 1)


@triton.jit
def _all_masses(read, place, mask, sizes):
    """Return the masses of p and q in each bin of a group's nodes, summed over tiles: [N, B]."""
    numbers = tl.arange(0, NUM_BINS)[None, :]
    in_p = tl.zeros([sizes.padded_chains, NUM_BINS], dtype=tl.float32)
    in_q = tl.zeros([sizes.padded_chains, NUM_BINS], dtype=tl.float32)
    for part in range(sizes.num_tiles):
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
    bins = _bin_of(log_p, log_q)
    rate = tl.where(live, _at(rates, parent, bins), 0.0)
    flow = _at(density, parent, bins) * tl.exp(log_q)
    target = tl.where(live, w_parent * tl.exp(log_p), 0.0)
    trim = tl.minimum(target / tl.maximum(flow, _TINY), 1.0)
    return tl.where(live, rate * _per_rate(tl.sum(rate, 0)) * trim, 0.0)


@triton.jit(do_not_specialize=_NUMBERS)
def _share_out(tree, layers, read, num_chains, num_steps, sizes):
    """Share out each layer of a group in turn, and store the shares w_v and densities F_v / q.

    A turn is that of `smc.verification.share_out`. Chains that go on from a node v race for its
    share; a race gives each token a rate c, by its bin of p / q. A chain claims c g(S), where S is
    the sum of all chains' rates, and a child's share w_vx is the sum of what its chains claim.
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

        # `race`: rates, and the density F_v / q of each bin.
        at = column * num_nodes + place
        in_p, in_q = _all_masses(read, at, splits, sizes)
        rates, density = _race(w_v, counts, in_p, in_q)
        table = layers.density + (at * NUM_BINS)[:, None] + tl.arange(0, NUM_BINS)[None, :]
        tl.store(table, density, mask=splits[:, None])

        # Claims, and the shares of the next layer.
        log_p = tl.load(read.log_p + at, mask=live, other=-float("inf"))
        log_q = tl.load(read.log_q + at, mask=live, other=-float("inf"))
        claim = _claims(rates, density, parent, live, w_parent, log_p, log_q)
        is_child = (chain[:, None] == child[None, :]) & live[None, :]
        w_v = tl.sum(tl.where(is_child, claim[None, :], 0.0), 1)
        parent = tl.where(here, child, chain)
        tl.store(layers.shares + at + num_nodes, w_v, mask=here)


@triton.jit
def _residual(layers, at, node, share, columns, padded_tiles: tl.constexpr):
    """Return R of some tokens at a node."""
    p_row, q_row = _rows(at, node, padded_tiles)
    log_p, log_q, bins = _read_tokens(at, _own_q(at), node, p_row, q_row, columns)
    density = tl.load(layers.density + (at.column * at.num_nodes + node) * NUM_BINS + bins)
    difference = share * tl.exp(log_p) - tl.exp(log_q) * density
    # NaN propagates, unlike through a maximum.
    return tl.where(difference < 0, 0.0, difference)


@triton.jit(do_not_specialize=_NUMBERS)
def _add_up_residual(tree, layers, laws, num_chains, sizes):
    """Store a tile's part of a node's residual; a node without children keeps its share."""
    num_nodes = tl.num_programs(0)
    num_steps = tl.num_programs(2)
    at = _Column(laws, tl.program_id(2), num_nodes, num_chains, num_steps, sizes.unit)
    node, part = tl.program_id(0), tl.program_id(1)
    splits = tl.max(_goes_on(tree, at, node, sizes.padded_chains)[1].to(tl.int32), 0) != 0
    of_layer = at.column * at.num_nodes + node
    share = tl.load(layers.shares + of_layer)
    left = tl.where(part == 0, share, 0.0)
    if splits & (share > _LEAST_SHARE):
        columns = part * sizes.tile + tl.arange(0, sizes.tile)
        left = tl.sum(_residual(layers, at, node, share, columns, sizes.padded_tiles), 0)
    tl.store(layers.residual + of_layer * sizes.num_tiles + part, left)


@triton.jit
def _shares_and_residuals(layers, layer, place, here, num_nodes, num_steps, sizes):
    """Return w_v and r_v, the sum over x of R_v(x), of a group's nodes in a layer: [N] float64.

    In the last layer no node has children, and r_v is w_v.
    """
    of_layer = layer * num_nodes + place
    w_v = tl.load(layers.shares + of_layer, mask=here, other=0.0).to(tl.float64)
    r_v = w_v
    if layer < num_steps:
        part = tl.arange(0, sizes.padded_tiles)[None, :]
        parts = layers.residual + (of_layer * sizes.num_tiles)[:, None] + part
        inside = here[:, None] & (part < sizes.num_tiles)
        r_v = tl.sum(tl.load(parts, mask=inside, other=0.0).to(tl.float64), 1)
    return w_v, r_v


@triton.jit
def _stops(w_v, r_v, reach):
    """Return the probabilities to stop at each node of a layer, and to come to the one above.

    A turn of `smc.verification.exits`. The decision comes to layer j with probability ``reach``,
    and stops there with r_j / (r_j + f_j), where r_j is the sum of r_v, and f_j = 1 - sum w_v.
    """
    f_j = 1.0 - tl.sum(w_v, 0)
    f_j = tl.where(f_j < _ROUNDING, 0.0, f_j)
    total = tl.sum(r_v, 0) + f_j
    scale = tl.where(total > 0, reach / tl.where(total > 0, total, 1.0), 0.0)
    return r_v * scale, tl.where(total > 0, f_j * scale, reach)


@triton.jit
def _has_children(tree, node, place, here, column, num_steps):
    """Return whether some chain of a group goes on from a node."""
    lengths = tl.load(tree.lengths + place, mask=here, other=0)
    nodes = tl.load(tree.nodes + place * (num_steps + 1) + column, mask=here, other=-1)
    goes = (nodes == node) & (column < lengths)
    return tl.max(goes.to(tl.int32), 0) != 0


@triton.jit(do_not_specialize=_NUMBERS)
def _leave(tree, layers, uniforms, found, num_chains, num_steps, sizes):
    """Draw where a group stops, from the deepest layer up: `smc.verification.leave`.

    The first node at which the probabilities to stop exceed the uniform; by rounding they may all
    stay below it, and then the last node at which there is one.
    """
    num_nodes = tl.num_programs(0) * num_chains
    group = tl.program_id(0)
    chain = tl.arange(0, sizes.padded_chains)
    here = chain < num_chains
    place = group * num_chains + chain
    uniform = tl.load(uniforms.tensor + group * uniforms.stride)
    reach = tl.full([], 1.0, tl.float64)
    passed = tl.full([], 0.0, tl.float64)  # sum of the probabilities so far
    column = tl.full([], 0, tl.int32)
    winner = tl.full([], 0, tl.int32)
    searches = column == 0
    for up in range(num_steps + 1):
        layer = num_steps - up
        w_v, r_v = _shares_and_residuals(layers, layer, place, here, num_nodes, num_steps, sizes)
        chance, reach = _stops(w_v, r_v, reach)
        chance += tl.where((layer == 0) & (chain == 0), reach, 0.0)  # zero, but for rounding
        through = passed + tl.cumsum(chance, 0)
        first = tl.min(tl.where(here & (through > uniform), chain, sizes.padded_chains), 0)
        last = tl.max(tl.where(chance > 0, chain, -1), 0)
        stop = tl.where(first < sizes.padded_chains, first, last)
        may_stop = searches & (stop >= 0)
        column = tl.where(may_stop, layer, column)
        winner = tl.where(may_stop, stop, winner)
        searches = searches & (first == sizes.padded_chains)
        passed += tl.sum(chance, 0)
    node = group * num_chains + winner
    share = tl.load(layers.shares + column * num_nodes + node)
    rejects = _has_children(tree, node, place, here, column, num_steps) & (share > _LEAST_SHARE)
    tl.store(found.num_columns + group, column.to(tl.int64))
    tl.store(found.winner + group, winner.to(tl.int64))
    tl.store(found.rejects + group, rejects)
    tl.store(found.left + group, group.to(tl.int64))


@triton.jit(do_not_specialize=_NUMBERS)
def _store_residual(layers, laws, found, num_chains, num_steps, sizes):
    group, part = tl.program_id(0), tl.program_id(1)
    if tl.load(found.rejects + group) == 0:
        return
    num_nodes = tl.num_programs(0) * num_chains
    stop = tl.load(found.num_columns + group).to(tl.int32)
    at = _Column(laws, stop, num_nodes, num_chains, num_steps, sizes.unit)
    node = group * num_chains + tl.load(found.winner + group).to(tl.int32)
    share = tl.load(layers.shares + stop * num_nodes + node)
    columns = part * sizes.tile + tl.arange(0, sizes.tile)
    residual = _residual(layers, at, node, share, columns, sizes.padded_tiles)
    row = found.residuals + group.to(tl.int64) * laws.p.vocab_size + columns
    tl.store(row, residual, mask=columns < laws.p.vocab_size)
