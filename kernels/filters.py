"""Apply top-k, top-p and min-p without a sort, where rows are added up.

Three launches take the place of `sample.row_sums`. The first alone reads all logits: each tile
adds up what no filter cuts, and counts its tokens, and their mass, by bucket
(`sglang_smc.smc.filters`). The second finds the bucket in which a row is cut, and counts the tokens
of that one by cell; most tiles have none and are not read again. The last finds the cell, how many
of its tokens are kept, and the last of them. What a tile keeps is the sum of what it counted; only
the tile of that last token, and tiles that min-p cuts, are read for it.

That takes 3 KB of memory for each tile of a row, 99 KB for 128,256 tokens. In a row that no filter
cuts, the first launch does what `row_sums` does, and the others next to nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.sample import Row, add_up_tile, group_of, own_of, raw_at, unsummed
from sglang_smc.kernels.shares import leading
from sglang_smc.kernels.tensors import contiguous
from sglang_smc.kernels.tree import EXACT
from sglang_smc.smc import filters
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.filters import KeptTokens

_NUM_BUCKETS = tl.constexpr(filters.NUM_BUCKETS)
_NUM_CELLS = tl.constexpr(filters.NUM_CELLS)
_EXTENT = tl.constexpr(filters.EXTENT)
_SPREAD = tl.constexpr(filters.SPREAD)
_WIDER = tl.constexpr(filters.NUM_BUCKETS / (filters.NUM_BUCKETS - 2))
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_SETS = tl.constexpr(8)  # of tokens that are counted apart, one a warp
_TURN = tl.constexpr(256)  # tokens counted at once, one a thread
_ROWS = tl.constexpr(16)  # of digits in the table that products of matrices fill
_PROGRAMS = 256  # of the second launch, which share out tiles of a row; one a row at least


class _Rules(NamedTuple):
    """The filters of each group."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class _Counts(NamedTuple):
    """Hold what tiles count; masses are relative to the likeliest token of each tile."""

    peak: torch.Tensor  # [R, tiles] float32 the largest logit, in whose bucket numbers begin
    size: torch.Tensor  # [R, tiles] int32 tokens that are not forbidden
    of_buckets: torch.Tensor  # [R, tiles, buckets] int32 tokens, of all but the last bucket
    in_buckets: torch.Tensor  # [R, tiles, buckets] float32 their mass
    of_cells: torch.Tensor  # [R, tiles, cells] int32 tokens of the bucket where the row is cut
    in_cells: torch.Tensor  # [R, tiles, cells] float32 their mass; undefined where there is none


class _Cut(NamedTuple):
    """The digit, a bucket or a cell, at which a row is cut."""

    digit: Any  # -1 where top-k and top-p cut nothing
    rank: Any  # number of tokens before it
    before: Any  # their mass
    target: Any  # tokens with more mass before them are dropped
    count: Any  # number of its tokens
    mass: Any


class _Scale(NamedTuple):
    """Hold what a row's keys are counted from."""

    peak: Any  # the largest logit; NaN in a row without a distribution
    top: Any  # its bucket, from zero
    unit: Any  # buckets per unit of logits


def filtered(
    law: TokenDistribution, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> TokenDistribution:
    """Return distributions with the tokens that filters of each request keep, added up.

    Reference: `sglang_smc.smc.distribution.TokenDistribution.filtered`, same arguments. It keeps
    the same tokens, except where the mass before a token equals top-p's to rounding (1e-6).
    """
    source, found, sizes = unsummed(law._replace(rows=None, kept=None))
    num_rows, num_tiles = found.highest.shape

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=law.scores.device)

    of_buckets = num_tiles, _NUM_BUCKETS.value
    of_cells = num_tiles, _NUM_CELLS.value
    counts = _Counts(
        peak=room(torch.float32, num_tiles),
        size=room(torch.int32, num_tiles),
        of_buckets=room(torch.int32, *of_buckets),
        in_buckets=room(torch.float32, *of_buckets),
        of_cells=room(torch.int32, *of_cells),
        in_cells=room(torch.float32, *of_cells),
    )
    kept = KeptTokens(room(torch.float32), room(torch.float32), room(torch.int32))
    sums = found._replace(
        highest=torch.empty_like(found.highest), total=torch.empty_like(found.total)
    )
    rules = _Rules(*contiguous((top_k, top_p, min_p)))
    how = {"num_warps": _SETS.value, **EXACT}
    each = min(num_tiles, triton.cdiv(_PROGRAMS, num_rows))
    _count_buckets[num_rows, num_tiles](source, rules, found, counts, tile=sizes["tile"], **how)
    _count_cells[num_rows, each](source, rules, found, counts, **sizes, **how)
    source = source._replace(kept=kept)  # which the last launch writes
    _settle[(num_rows,)](source, rules, found, counts, sums, **sizes, num_warps=16, **EXACT)
    return law._replace(kept=kept, sums=sums)


@triton.jit
def _searches(source, rules, group):
    """Return whether top-k or top-p may cut."""
    limit = tl.load(rules.top_k + group)
    return (limit > 1) & ((limit < source.vocab_size) | (tl.load(rules.top_p + group) < 1.0))


@triton.jit
def _filters(source, rules, group):
    """Return whether any filter may cut."""
    by_min_p = (tl.load(rules.top_k + group) > 1) & (tl.load(rules.min_p + group) > 0)
    return by_min_p | _searches(source, rules, group)


@triton.jit
def _unit(source, temperature, share):
    """Return the buckets per unit of logits (`smc.filters.unit_of`)."""
    tail = temperature.to(tl.float64)
    tail *= tl.log((source.vocab_size + 0.0) / (1.0 - share.to(tl.float64)))
    extent = tl.minimum(tl.minimum(temperature * _EXTENT, tail.to(tl.float32)), _SPREAD) * _WIDER
    exponent = tl.maximum(extent.to(tl.int32, bitcast=True) >> 23, 120)
    return ((260 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _places(raw, top, unit):
    """Return buckets and cells of logits (`smc.filters.keys_of`), as floats."""
    steps = raw * unit
    whole = tl.floor(steps)
    bucket = tl.minimum(top - whole, _NUM_BUCKETS - 1.0)
    cell = _NUM_CELLS - 1.0 - tl.floor((steps - whole) * _NUM_CELLS)
    return bucket, tl.where(bucket < _NUM_BUCKETS - 1, cell, 0.0)


@triton.jit
def _count(source, own, scale, highest, bucket, part, num_digits: tl.constexpr, tile: tl.constexpr):
    """Count a tile's tokens of each bucket, or of one bucket those of each cell, and their mass.

    Both ``[16, digits / 16]``, by products of matrices on tensor cores, as in
    `shares._masses_of_tile`: a token has a one in the row of its digit's leading bits, and a one,
    and its mass in two pieces, in the column of its last bits.
    """
    each: tl.constexpr = _TURN // _SETS
    num_columns: tl.constexpr = num_digits // _ROWS
    row = tl.arange(0, _ROWS)[None, :, None].to(tl.float32)
    column = tl.arange(0, num_columns)[None, None, :].to(tl.float32)
    count = tl.zeros([_SETS, _ROWS, num_columns], tl.float32)
    mass = tl.zeros([_SETS, _ROWS, num_columns], tl.float32)
    for start in tl.range(0, tile, _TURN, num_stages=1):
        raw = raw_at(source, own, part * tile + start + tl.arange(0, _TURN))
        digit, cell = _places(raw, scale.top, scale.unit)
        if num_digits == _NUM_CELLS:
            digit = tl.where(digit == bucket, cell, num_digits)
        digit = tl.where(raw > -float("inf"), digit, num_digits)  # whose row is none
        value = tl.exp(tl.div_rn(raw, own.temperature) - highest)
        in_row = tl.floor(digit * (1.0 / num_columns))
        in_column = tl.reshape(digit - in_row * num_columns, [_SETS, each, 1])
        ones = (tl.reshape(in_row, [_SETS, 1, each]) == row).to(tl.float32)
        of_token = (in_column == column).to(tl.float32)
        value = tl.reshape(value, [_SETS, each, 1])
        high = leading(value)
        count = tl.dot(ones, of_token, count, input_precision="tf32")
        of_turn = tl.dot(ones, of_token * leading(value - high), input_precision="tf32")
        mass += tl.dot(ones, of_token * high, of_turn, input_precision="tf32")
    return tl.sum(count, 0).to(tl.int32), tl.sum(mass, 0)


@triton.jit
def _count_buckets(source, rules, found, counts, tile: tl.constexpr):
    """Add up one tile, and where a filter may cut, count its tokens by bucket."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    own = own_of(source, row)
    highest, total = add_up_tile(source, own, found, row, part, tile)
    group = group_of(source, row)
    if _filters(source, rules, group):
        raw = raw_at(source, own, part * tile + tl.arange(0, tile))
        peak = tl.where(total == total, tl.max(raw, 0), float("nan"))
        at = row * found.num_tiles + part
        tl.store(counts.peak + at, peak)
        tl.store(counts.size + at, tl.sum((raw > -float("inf")).to(tl.int32), 0))
        if _searches(source, rules, group) & (peak - peak == 0):
            unit = _unit(source, own.temperature, tl.load(rules.top_p + group))
            scale = _Scale(peak, tl.floor(peak * unit), unit)
            count, mass = _count(source, own, scale, highest, 0, part, _NUM_BUCKETS, tile)
            places = at.to(tl.int64) * _NUM_BUCKETS + _digits(_NUM_BUCKETS)
            tl.store(counts.of_buckets + places, count)
            tl.store(counts.in_buckets + places, mass)


@triton.jit
def _digits(num_digits: tl.constexpr):
    """Return the digits of what `_count` returns."""
    num_columns: tl.constexpr = num_digits // _ROWS
    return tl.arange(0, _ROWS)[:, None] * num_columns + tl.arange(0, num_columns)[None, :]


@triton.jit
def _scale_of(source, found, counts, row, temperature, share, padded_tiles: tl.constexpr):
    """Return a row's `_Scale`."""
    part = tl.arange(0, padded_tiles)
    at = row * found.num_tiles + part
    peaks = tl.load(counts.peak + at, mask=part < found.num_tiles, other=-float("inf"))
    is_broken = tl.sum((peaks != peaks).to(tl.int32), 0) > 0
    peak = tl.where(is_broken, float("nan"), tl.max(peaks, 0))
    unit = _unit(source, temperature, share)
    return _Scale(peak, tl.floor(peak * unit), unit)


@triton.jit
def _factors(found, at, inside):
    """Return the mass of each tile's likeliest token, relative to the row's: [tiles] float32."""
    highest = tl.load(found.highest + at, mask=inside, other=-float("inf"))
    return tl.exp(highest - tl.max(highest, 0))


@triton.jit
def _cut_at(count, mass, rank, before, target, limit, num_digits: tl.constexpr):
    """Return where a row is cut, from its tokens of each digit and their mass.

    The first digit at which top-k or top-p is reached; the last with tokens if rounding leaves
    none.
    """
    digit = tl.arange(0, num_digits)
    mass = mass.to(tl.float64)
    reached = (rank + tl.cumsum(count, 0) >= limit) | (before + tl.cumsum(mass, 0) > target)
    here = tl.min(tl.where(reached & (count > 0), digit, num_digits), 0)
    here = tl.minimum(here, tl.max(tl.where(count > 0, digit, 0), 0))
    return _Cut(
        here,
        rank + tl.sum(tl.where(digit < here, count, 0), 0),
        before + tl.sum(tl.where(digit < here, mass, 0.0), 0),
        target,
        tl.sum(tl.where(digit == here, count, 0), 0),
        tl.sum(tl.where(digit == here, mass, 0.0), 0),
    )


@triton.jit
def _load_buckets(found, counts, row, scale, padded_tiles: tl.constexpr):
    """Load what tiles have counted, by the row's buckets but the last: ``[tiles, buckets]`` each.

    A tile numbers buckets from that of its own largest logit.
    """
    part = tl.arange(0, padded_tiles)
    inside = part < found.num_tiles
    at = row * found.num_tiles + part
    peaks = tl.load(counts.peak + at, mask=inside, other=-float("inf"))
    lower = tl.minimum(scale.top - tl.floor(peaks * scale.unit), _NUM_BUCKETS * 1.0)
    first = at.to(tl.int64) * _NUM_BUCKETS - lower.to(tl.int32)
    bucket = tl.arange(0, _NUM_BUCKETS)[None, :]
    mask = inside[:, None] & (bucket >= lower[:, None]) & (bucket < _NUM_BUCKETS - 1)
    count = tl.load(counts.of_buckets + first[:, None] + bucket, mask=mask, other=0)
    mass = tl.load(counts.in_buckets + first[:, None] + bucket, mask=mask, other=0.0)
    return count, mass


@triton.jit
def _find_bucket(source, rules, found, counts, row, group, scale, padded_tiles: tl.constexpr):
    """Return where a row is cut, and of each tile the tokens there, and the mass before them.

    Masses of a tile are relative to that of its likeliest token.
    """
    part = tl.arange(0, padded_tiles)
    inside = part < found.num_tiles
    at = row * found.num_tiles + part
    count, mass = _load_buckets(found, counts, row, scale, padded_tiles)
    size = tl.load(counts.size + at, mask=inside, other=0)
    total = tl.load(found.total + at, mask=inside, other=0.0)
    factors = _factors(found, at, inside)
    whole = tl.sum(total * factors, 0)
    bucket = tl.arange(0, _NUM_BUCKETS)
    of_row = tl.sum(count, 0)
    in_row = tl.sum(mass * factors[:, None], 0)
    is_last = bucket == _NUM_BUCKETS - 1  # which has what is left
    of_row += tl.where(is_last, tl.sum(size, 0) - tl.sum(of_row, 0), 0)
    in_row += tl.where(is_last, tl.maximum(whole - tl.sum(in_row, 0), 0.0), 0.0)
    share = tl.load(rules.top_p + group).to(tl.float64)
    limit = tl.load(rules.top_k + group)
    target = tl.where(share < 1.0, share * whole, float("inf"))
    cut = _cut_at(of_row, in_row, 0, 0.0, target, limit, _NUM_BUCKETS)
    is_cut = (share < 1.0) | (tl.sum(size, 0) >= limit)
    is_cut &= scale.peak - scale.peak == 0
    here = tl.where(is_cut, cut.digit, -1)

    own = tl.sum(tl.where(bucket[None, :] == here, count, 0), 1)
    if here == _NUM_BUCKETS - 1:
        own = size - tl.sum(count, 1)
    before = tl.sum(tl.where(bucket[None, :] < here, mass, 0.0), 1)
    return _Cut(here, cut.rank, cut.before, target, cut.count, cut.mass), own, before


@triton.jit
def _count_cells(source, rules, found, counts, padded_tiles: tl.constexpr, tile: tl.constexpr):
    """Count the tokens of the bucket at which a row is cut by cell, in some tiles of the row."""
    row = tl.program_id(0)
    group = group_of(source, row)
    if _searches(source, rules, group):
        own = own_of(source, row)
        share = tl.load(rules.top_p + group)
        scale = _scale_of(source, found, counts, row, own.temperature, share, padded_tiles)
        cut, of_tiles, _ = _find_bucket(
            source, rules, found, counts, row, group, scale, padded_tiles
        )
        if cut.digit >= 0:
            parts = tl.arange(0, padded_tiles)
            for part in range(tl.program_id(1), found.num_tiles, tl.num_programs(1)):
                if tl.sum(tl.where(parts == part, of_tiles, 0), 0) > 0:
                    at = row * found.num_tiles + part
                    highest = tl.load(found.highest + at)
                    count, mass = _count(
                        source, own, scale, highest, cut.digit, part, _NUM_CELLS, tile
                    )
                    places = at.to(tl.int64) * _NUM_CELLS + _digits(_NUM_CELLS)
                    tl.store(counts.of_cells + places, count)
                    tl.store(counts.in_cells + places, mass)


@triton.jit
def _find_cell(found, counts, row, cut, of_tiles, limit, padded_tiles: tl.constexpr):
    """Return where a row is cut in its bucket, and of each tile as `_find_bucket` does.

    And the mass of these tokens.
    """
    part = tl.arange(0, padded_tiles)
    at = row * found.num_tiles + part
    has = of_tiles > 0
    cell = tl.arange(0, _NUM_CELLS)
    firsts = at.to(tl.int64) * _NUM_CELLS
    places = firsts[:, None] + cell[None, :]
    mask = has[:, None] & (cell >= 0)[None, :]
    count = tl.load(counts.of_cells + places, mask=mask, other=0)
    mass = tl.load(counts.in_cells + places, mask=mask, other=0.0)
    factors = _factors(found, at, part < found.num_tiles)
    in_row = tl.sum(mass * factors[:, None], 0)
    found_cut = _cut_at(
        tl.sum(count, 0), in_row, cut.rank, cut.before, cut.target, limit, _NUM_CELLS
    )
    own = tl.load(counts.of_cells + firsts + found_cut.digit, mask=has, other=0)
    own_mass = tl.load(counts.in_cells + firsts + found_cut.digit, mask=has, other=0.0)
    before = tl.sum(tl.where(cell[None, :] < found_cut.digit, mass, 0.0), 1)
    return found_cut, own, before, own_mass


@triton.jit
def _num_left(cut, limit):
    """Return how many tokens of the cell at which a row is cut are kept."""
    by_mass = tl.floor((cut.target - cut.before) / (cut.mass / cut.count)) + 1
    by_mass = tl.where(cut.mass > 0, by_mass, cut.count)
    num_left = tl.minimum(tl.minimum(by_mass, limit - cut.rank), cut.count)
    return tl.maximum(num_left, 1).to(tl.int32)


@triton.jit
def _bounds(scale, bucket, cell):
    """Return the least logits above a cell and in it (`smc.filters.bounds_of`)."""
    lowest = (scale.top - bucket + (_NUM_CELLS - 1 - cell) / _NUM_CELLS) / scale.unit
    bits = lowest.to(tl.int32, bitcast=True)
    following = (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    above = tl.maximum(lowest + 1.0 / (scale.unit * _NUM_CELLS), following)
    return above, tl.where(bucket < _NUM_BUCKETS - 1, lowest, -float("inf"))


@triton.jit
def _last_of(source, own, scale, bucket, cell, part, rank, tile: tl.constexpr):
    """Return the id of a tile's ``rank``-th token of a cell."""
    columns = part * tile + tl.arange(0, tile)
    raw = raw_at(source, own, columns)
    its_bucket, its_cell = _places(raw, scale.top, scale.unit)
    is_own = (its_bucket == bucket) & (its_cell == cell) & (raw > -float("inf"))
    is_left = is_own & (tl.cumsum(is_own.to(tl.int32), 0) <= rank)
    return tl.max(tl.where(is_left, columns, 0), 0)


@triton.jit
def _search(
    source,
    rules,
    found,
    counts,
    own,
    scale,
    total,
    padded_tiles: tl.constexpr,
    tile: tl.constexpr,
):
    """Apply top-k and top-p to a row: return bounds and last token, and what each tile keeps.

    And the tile of that token, which is to be read for it; -1 where none is.
    """
    row = tl.program_id(0)
    group = group_of(source, row)
    part = tl.arange(0, padded_tiles)
    above = tl.full([], -float("inf"), tl.float32)
    lowest = above
    last = tl.full([], _NO_TOKEN, tl.int32)
    here = tl.full([], -1, tl.int32)
    if _searches(source, rules, group):
        cut, of_tiles, total_before = _find_bucket(
            source, rules, found, counts, row, group, scale, padded_tiles
        )
        if cut.digit >= 0:
            limit = tl.load(rules.top_k + group)
            cell, of_tiles, before, mass = _find_cell(
                found, counts, row, cut, of_tiles, limit, padded_tiles
            )
            above, lowest = _bounds(scale, cut.digit, cell.digit)
            num_left = _num_left(cell, limit)
            total = total_before + before + mass
            if num_left < cell.count:
                through = tl.cumsum(of_tiles, 0)
                here = tl.min(tl.where(through >= num_left, part, padded_tiles - 1), 0)
                rank = num_left - tl.sum(tl.where(part < here, of_tiles, 0), 0)
                last = _last_of(source, own, scale, cut.digit, cell.digit, here, rank, tile)
                total -= tl.where(part > here, mass, 0.0)
    return above, lowest, last, here, total


@triton.jit
def _settle(source, rules, found, counts, sums, padded_tiles: tl.constexpr, tile: tl.constexpr):
    """Store what a row keeps, and add up what its tiles keep."""
    row = tl.program_id(0)
    group = group_of(source, row)
    part = tl.arange(0, padded_tiles)
    inside = part < found.num_tiles
    at = row * found.num_tiles + part
    highest = tl.load(found.highest + at, mask=inside, other=-float("inf"))
    total = tl.load(found.total + at, mask=inside, other=0.0)
    own = own_of(source, row)
    above = tl.full([], -float("inf"), tl.float32)
    lowest = above
    last = tl.full([], _NO_TOKEN, tl.int32)
    first = tl.full([], 0, tl.int32)  # tile that is to be read, and the one behind the last
    end = first
    is_read = part < 0
    if _filters(source, rules, group):
        share = tl.load(rules.top_p + group)
        scale = _scale_of(source, found, counts, row, own.temperature, share, padded_tiles)
        if scale.peak - scale.peak == 0:
            above, lowest, last, here, total = _search(
                source, rules, found, counts, own, scale, total, padded_tiles, tile
            )
            first = tl.maximum(here, 0)
            end = here + 1
            least = tl.load(rules.min_p + group).to(tl.float64)
            by_min_p = (scale.peak + own.temperature.to(tl.float64) * tl.log(least)).to(tl.float32)
            if (least > 0) & (by_min_p > lowest):
                lowest = by_min_p
                first *= 0
                end = first + found.num_tiles
            peaks = tl.load(counts.peak + at, mask=inside, other=-float("inf"))
            total = tl.where(peaks < lowest, 0.0, total)
            highest = tl.where(total > 0, highest, -float("inf"))
            is_read = (part >= first) & (part < end) & (peaks >= lowest)
    tl.store(source.kept.above + row, above)
    tl.store(source.kept.lowest + row, lowest)
    tl.store(source.kept.last + row, last)
    tl.store(sums.highest + at, highest, mask=inside & ~is_read)
    tl.store(sums.total + at, total, mask=inside & ~is_read)
    own = Row(own.logits, own.temperature, 0, KeptTokens(above, lowest, last), 0, 0, 0)
    for one in range(first, end):
        if tl.load(counts.peak + row * found.num_tiles + one) >= lowest:
            add_up_tile(source, own, sums, row, one, tile)
