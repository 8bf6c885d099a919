"""Grow the tree of drafted chains, and read rows of p and q at its nodes.

A kernel that reads rows of q is compiled once for any number of columns. The first launch lists how
far each column's tensors lie from those of the first one, and a program takes those of its column.
Every kernel that needs a token's bin recomputes it, from operations that no compiler rounds
differently: differences, and a product with a power of two.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.sample import RowSums, Source, log_probs_at, row_of, summed
from sglang_smc.kernels.tensors import padded_columns, padded_particles, tiles
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.filters import KeptTokens
from sglang_smc.smc.verification import Tree

NUM_BINS = tl.constexpr(verification.NUM_BINS)
_PER_NAT = tl.constexpr(verification.BINS_PER_NAT)
_LOWEST = tl.constexpr(-verification.NATS_BELOW * verification.BINS_PER_NAT)
_TILE = 4096  # tokens per program
EXACT = {"enable_fp_fusion": False}  # all kernels compute bit-identical probabilities
NUMBERS = ["num_chains", "num_steps"]  # for which no kernel is compiled again


class _Tensors(NamedTuple):
    """The tensors of a column's q, whose places are listed; the last ones may be missing."""

    logits: Any
    temperature: Any
    highest: Any  # of `RowSums`, as the next one, and `first`
    total: Any
    greedy: Any = None
    first: Any = None
    above: Any = None  # of `KeptTokens`, as the next two
    lowest: Any = None
    last: Any = None
    rows: Any = None


_NUM_FIELDS = tl.constexpr(len(_Tensors._fields) + 1)  # with the stride of logits
_AT_LOGITS, _AT_TEMPERATURE, _AT_HIGHEST, _AT_TOTAL = (tl.constexpr(field) for field in range(4))
_AT_GREEDY, _AT_FIRST = (tl.constexpr(field) for field in range(4, 6))
_AT_ABOVE, _AT_LOWEST, _AT_LAST = (tl.constexpr(field) for field in range(6, 9))
_AT_ROWS, _AT_STRIDE = (tl.constexpr(field) for field in range(9, 11))


class Laws(NamedTuple):
    """The distributions of all columns."""

    p: Source
    p_sums: RowSums
    q: Source  # of the first column; of the others tensors and strides differ
    q_sums: RowSums
    # [K, fields] int64, K padded: elements of `_Tensors` from the first column's, and the stride
    # of logits.
    places: torch.Tensor


class Sizes(NamedTuple):
    """Hold the sizes that kernels are compiled for."""

    padded_chains: Any
    padded_tiles: Any
    tile: Any
    num_tiles: Any
    unit: Any  # which divides the places and strides of logits


class Columns(NamedTuple):
    """The distributions of all columns, and what kernels are compiled for."""

    laws: Laws
    # [K], padded, up to the last field that is there; whoever holds this keeps their addresses.
    tensors: tuple[tuple[torch.Tensor, ...], ...]
    strides: tuple[int, ...]  # [K], padded, of logits
    sizes: Sizes

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
        shape = len(padded_columns(of_q)), _NUM_FIELDS.value
        places = torch.empty(shape, dtype=torch.int64, device=p.scores.device)
        strides = tuple(of.stride for of, _ in of_q)
        tile, num_tiles = tiles(p.scores.shape[1], _TILE)
        padded_chains = 1 if num_chains == 1 else padded_particles(num_chains)
        padded_tiles = triton.next_power_of_2(num_tiles)
        numbers = padded_chains, padded_tiles, tile, num_tiles, _unit_of(given, strides)
        sizes = Sizes(*map(tl.constexpr, numbers))
        laws = Laws(of_p, p_sums, *of_q[0], places)
        return cls(laws, padded_columns(tensors), padded_columns(strides), sizes)


def _unit_of(given: Sequence[_Tensors], strides: Sequence[int]) -> int:
    """Return how many logits make 16 bytes where all rows begin at such a boundary, else 1."""
    size = given[0].logits.itemsize
    steps = *strides, *(of.logits.storage_offset() for of in given)
    return 16 // size if all(step * size % 16 == 0 for step in steps) else 1


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


class Column(NamedTuple):
    """A column, and all that is read there."""

    laws: Any
    column: Any
    num_nodes: Any  # G * N
    num_chains: Any
    num_steps: Any
    unit: Any  # of `Sizes`


def grow(tokens: torch.Tensor, lengths: torch.Tensor, columns: Columns) -> Tree:
    """Return the tree of chains, and list where the tensors of ``columns`` are, in one launch.

    Reference: `sglang_smc.smc.verification.grow`, of the first two arguments.
    """
    size, num_chains, num_steps = tokens.shape
    nodes = tokens.new_empty(size, num_chains, num_steps + 1)
    tree = Tree(tokens.contiguous(), lengths.contiguous(), nodes)
    padded = padded_particles(num_chains)
    places = columns.laws.places
    listed = columns.tensors, columns.strides
    _grow[(size,)](tree, num_chains, num_steps, places, listed, padded_chains=padded, num_warps=1)
    return tree


@triton.jit
def _apart(first, second):
    """Return how many elements lie between two addresses."""
    size: tl.constexpr = (first.dtype.element_ty.primitive_bitwidth + 7) // 8
    return (second.to(tl.int64) - first.to(tl.int64)) // size


@triton.jit(do_not_specialize=NUMBERS)
def _grow(tree, num_chains, num_steps, places, listed, padded_chains: tl.constexpr):
    group = tl.program_id(0)
    if group == 0:
        tensors, strides = listed
        for column in tl.static_range(len(strides)):
            if column < num_steps:  # others pad
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
def goes_on(tree, at, node, padded_chains: tl.constexpr):
    """Return the chains of a node that have a token here, and their places."""
    chain = tl.arange(0, padded_chains)
    place = node // at.num_chains * at.num_chains + chain
    here = chain < at.num_chains
    has = here & (at.column < tl.load(tree.lengths + place, mask=here, other=0))
    nodes = tree.nodes + place * (at.num_steps + 1) + at.column
    return place, has & (tl.load(nodes, mask=here, other=-1).to(tl.int32) == node)


@triton.jit
def bin_of(log_p, log_q):
    """Compute `smc.verification.bins_of`; where that has NaN, the bin is arbitrary."""
    ratio = log_p - log_q
    place = tl.floor(tl.where(ratio == ratio, ratio, 0.0) * _PER_NAT)
    place = tl.minimum(tl.maximum(place, _LOWEST), _LOWEST + NUM_BINS - 1)
    return place.to(tl.int32) - _LOWEST


@triton.jit
def rows_at(at, node, padded_tiles: tl.constexpr):
    """Load what `read_tokens` needs of a node: a row of p, and one of the column's q."""
    laws = at.laws
    like = laws.q
    places = laws.places + at.column * _NUM_FIELDS
    kept = None
    if like.kept is not None:
        kept = KeptTokens(
            like.kept.above + tl.load(places + _AT_ABOVE),
            like.kept.lowest + tl.load(places + _AT_LOWEST),
            like.kept.last + tl.load(places + _AT_LAST),
        )
    of_q = Source(
        # Divided and multiplied, so that the compiler knows how many are loaded at once.
        like.logits + tl.load(places + _AT_LOGITS) // at.unit * at.unit,
        like.temperature + tl.load(places + _AT_TEMPERATURE),
        like.draws_each,
        None if like.rows is None else like.rows + tl.load(places + _AT_ROWS),
        None if like.greedy is None else like.greedy + tl.load(places + _AT_GREEDY),
        kept,
        tl.load(places + _AT_STRIDE) // at.unit * at.unit,
        like.vocab_size,
    )
    sums = laws.q_sums
    q_sums = RowSums(
        sums.highest + tl.load(places + _AT_HIGHEST),
        sums.total + tl.load(places + _AT_TOTAL),
        None if sums.first is None else sums.first + tl.load(places + _AT_FIRST),
        sums.num_tiles,
        None if sums.rows is None else sums.rows + tl.load(places + _AT_ROWS),
    )
    draw = node * (at.num_steps + 1) + at.column
    p_row = row_of(laws.p, laws.p_sums, draw, padded_tiles)
    return p_row, row_of(of_q, q_sums, node, padded_tiles)


@triton.jit
def read_tokens(at, p_row, q_row, columns):
    """Return log p, log q and bins of some tokens at a node; its rows are of `rows_at`."""
    log_p = log_probs_at(at.laws.p, p_row, columns)
    log_q = log_probs_at(at.laws.q, q_row, columns)
    return log_p, log_q, bin_of(log_p, log_q)
