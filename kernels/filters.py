"""Apply top-k, top-p and min-p without a sort: find where a row of logits is cut, in five launches.

Tokens have keys (`sglang_smc.smc.filters`), and the key at which a row is cut is found digit by
digit. Every tile of a row stores how many of its tokens have each digit, and their mass; the next
launch adds the tiles up, always in the same order, finds the digit, and reads the tokens that have
it. Most tiles have none of those and are not read again. The last launch finds how many tokens of
the last key are kept, and which is the last of them.

That takes 520 bytes of memory for each tile of a row, 17 KB for 128,256 tokens. For a row that no
filter cuts every launch returns at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tensors import check_contiguous, contiguous
from sglang_smc.smc import filters

_TILE = 4096  # logits per program; a row of 152k has 38 tiles
_CHUNK = 128  # logits counted at once, one a thread
_UNROLL = tl.constexpr(4)  # chunks with independent loads
_NUM_DIGITS = tl.constexpr(32)
_LEVELS = tl.constexpr(3)
NUM_KEYS = tl.constexpr(filters.NUM_KEYS)
EXTENT = tl.constexpr(filters.EXTENT)
assert _NUM_DIGITS.value**_LEVELS.value == filters.NUM_KEYS


class _Rows(NamedTuple):
    """The rows and their filters: the first argument of every kernel of this file."""

    logits: torch.Tensor
    stride: int
    vocab_size: int
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    highest: torch.Tensor  # [R, tiles] the largest logit; NaN with a NaN or +inf among them
    lowest: torch.Tensor  # [R, tiles] the smallest logit above -inf
    num_tiles: int


class _Level(NamedTuple):
    """The counts and masses of tokens with some leading digits of the key, for `_find_digit`."""

    counts: torch.Tensor  # [R, tiles, digits] int32 tokens
    masses: torch.Tensor  # [R, tiles, digits] float32, relative to the likeliest token's
    state: torch.Tensor  # [R, 4] float64: `_Cut`'s key, rank, before and target


class _Cut(NamedTuple):
    """The partial key at which a row is cut."""

    key: int  # its digits so far; -1 where nothing is cut
    rank: int  # number of tokens of smaller keys
    before: float  # their mass
    target: float  # tokens with more mass before them are dropped
    count: int  # number of tokens of keys with these digits
    mass: float


def keep_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> filters.KeptTokens:
    """Return the tokens that the filters of each request keep.

    Reference: `sglang_smc.smc.filters.keep_tokens`, same arguments. It keeps the same tokens,
    except where the mass before a token equals top-p's to rounding (1e-6). Where it cuts
    nothing, the numbers other than ``lowest`` and ``key`` may differ.
    """
    check_contiguous(logits)
    num_rows, vocab_size = logits.shape
    tile = max(_UNROLL.value, min(_TILE, triton.next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, tile)

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    rows = _Rows(
        logits,
        logits.stride(0),
        vocab_size,
        *contiguous((temperature, top_k, top_p, min_p)),
        highest=room(torch.float32, num_tiles),
        lowest=room(torch.float32, num_tiles),
        num_tiles=num_tiles,
    )
    size = num_tiles, _NUM_DIGITS.value
    # Each level reads the results of the one before it.
    levels = [
        _Level(room(torch.int32, *size), room(torch.float32, *size), room(torch.float64, 4))
        for _ in range(2)
    ]
    kept = filters.KeptTokens(
        peak=room(torch.float32),
        rate=room(torch.float32),
        lowest=room(torch.float32),
        key=room(torch.int32),
        last=room(torch.int32),
    )
    padded_tiles = triton.next_power_of_2(num_tiles)
    grid = (num_rows, num_tiles)
    rows_each = num_rows // len(temperature)
    _survey[grid](rows, rows_each, tile=tile)
    sizes = {"padded_tiles": padded_tiles, "tile": tile}
    chunk = min(_CHUNK, tile // _UNROLL.value)
    for level in range(_LEVELS.value):
        found = levels[1 - level % 2]
        leaves = levels[level % 2]
        _count[grid](rows, rows_each, found, leaves, level=level, chunk=chunk, **sizes)
    _settle[(num_rows,)](rows, rows_each, levels[(_LEVELS.value - 1) % 2], kept, **sizes)
    return kept


@triton.jit
def cut_of(kept, row):
    """Load where a row is cut, for `dropped`."""
    return filters.KeptTokens(
        tl.load(kept.peak + row),
        tl.load(kept.rate + row),
        tl.load(kept.lowest + row),
        tl.load(kept.key + row).to(tl.float32),
        tl.load(kept.last + row),
    )


@triton.jit
def dropped(cut, raw, columns):
    """Return which of a row's tokens are cut, as `KeptTokens.dropped` does."""
    place = _key(raw, cut.peak, cut.rate)
    behind = (place > cut.key) | ((place == cut.key) & (columns > cut.last))
    return behind | (raw < cut.lowest)


@triton.jit
def _key(raw, peak, rate):
    """Return the key of a logit as a float, so that comparisons with NaN are false."""
    return tl.floor(tl.minimum((peak - raw) * rate, NUM_KEYS - 1.0))


@triton.jit
def _searches(rows, group):
    """Return whether top-k or top-p may cut."""
    limit = tl.load(rows.top_k + group)
    return (limit > 1) & ((limit < rows.vocab_size) | (tl.load(rows.top_p + group) < 1.0))


@triton.jit
def _filters(rows, group):
    """Return whether any filter may cut."""
    by_min_p = (tl.load(rows.top_k + group) > 1) & (tl.load(rows.min_p + group) > 0)
    return by_min_p | _searches(rows, group)


@triton.jit
def _load(rows, row, columns):
    at = rows.logits + row * rows.stride + columns
    return tl.load(at, mask=columns < rows.vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit(do_not_specialize=["rows_each"])
def _survey(rows, rows_each, tile: tl.constexpr):
    """Store the largest and the smallest finite logit of one tile."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if _filters(rows, row // rows_each):
        raw = _load(rows, row, part * tile + tl.arange(0, tile))
        is_broken = tl.sum(((raw != raw) | (raw == float("inf"))).to(tl.int32), 0) > 0
        at = row * rows.num_tiles + part
        tl.store(rows.highest + at, tl.where(is_broken, float("nan"), tl.max(raw, 0)))
        tl.store(rows.lowest + at, tl.min(tl.where(raw > -float("inf"), raw, float("inf")), 0))


@triton.jit
def _peak_and_rate(rows, row, heat, share, padded_tiles: tl.constexpr):
    """Return a row's largest logit and its keys per unit (`smc.filters._rate`); NaN if broken."""
    part = tl.arange(0, padded_tiles)
    at = row * rows.num_tiles + part
    inside = part < rows.num_tiles
    of_tiles = tl.load(rows.highest + at, mask=inside, other=-float("inf"))
    low = tl.min(tl.load(rows.lowest + at, mask=inside, other=float("inf")), 0)
    is_broken = tl.sum((of_tiles != of_tiles).to(tl.int32), 0) > 0
    peak = tl.where(is_broken, float("nan"), tl.max(of_tiles, 0))
    tail = heat.to(tl.float64) * tl.log((rows.vocab_size + 0.0) / (1.0 - share.to(tl.float64)))
    extent = tl.minimum(tl.minimum(heat * EXTENT, tail.to(tl.float32)), peak - low)
    exponent = extent.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 14), 255)
    return peak, ((268 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _find_digit(rows, found, row, limit, share, is_first: tl.constexpr, padded_tiles: tl.constexpr):
    """Return the next digit of the key at which a row is cut, a `_Cut`, from all tiles."""
    digit = tl.arange(0, _NUM_DIGITS)
    part = tl.arange(0, padded_tiles)[:, None]
    at = (row * rows.num_tiles + part) * _NUM_DIGITS + digit[None, :]
    inside = part < rows.num_tiles
    count = tl.sum(tl.load(found.counts + at, mask=inside, other=0), 0)  # [digits]
    mass = tl.sum(tl.load(found.masses + at, mask=inside, other=0.0).to(tl.float64), 0)
    if is_first:
        key = 0
        rank = 0
        before = 0.0
        target = tl.where(share < 1.0, share.to(tl.float64) * tl.sum(mass, 0), float("inf"))
        is_cut = (share < 1.0) | (tl.sum(count, 0) >= limit)
    else:
        state = found.state + row * 4
        key = tl.load(state).to(tl.int32)
        rank = tl.load(state + 1).to(tl.int32)
        before = tl.load(state + 2)
        target = tl.load(state + 3)
        is_cut = key >= 0
    exists = count > 0
    reached = (rank + tl.cumsum(count, 0) >= limit) | (before + tl.cumsum(mass, 0) > target)
    here = tl.min(tl.where(reached & exists, digit, _NUM_DIGITS), 0)
    # If rounding leaves none, the last digit with tokens.
    here = tl.minimum(here, tl.max(tl.where(exists, digit, 0), 0))
    return _Cut(
        tl.where(is_cut, key * _NUM_DIGITS + here, -1),
        rank + tl.sum(tl.where(digit < here, count, 0), 0),
        before + tl.sum(tl.where(digit < here, mass, 0.0), 0),
        target,
        tl.sum(tl.where(digit == here, count, 0), 0),
        tl.sum(tl.where(digit == here, mass, 0.0), 0),
    )


@triton.jit(do_not_specialize=["rows_each"])
def _count(
    rows,
    rows_each,
    found,
    leaves,
    level: tl.constexpr,
    padded_tiles: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
):
    """Count one tile's tokens, and their mass, by the digit after the digits ``found``."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    group = row // rows_each
    if _searches(rows, group):
        heat = tl.load(rows.temperature + group)
        share = tl.load(rows.top_p + group)
        peak, rate = _peak_and_rate(rows, row, heat, share, padded_tiles)
        of_tile = (row * rows.num_tiles + part) * _NUM_DIGITS
        if level == 0:
            before = tl.full([], 0, tl.int32)
            has_any = peak - peak == 0  # false for NaN and infinite peaks
        else:
            limit = tl.load(rows.top_k + group)
            cut = _find_digit(rows, found, row, limit, share, level == 1, padded_tiles)
            before = cut.key
            if part == 0:
                state = leaves.state + row * 4
                tl.store(state, cut.key)
                tl.store(state + 1, cut.rank)
                tl.store(state + 2, cut.before)
                tl.store(state + 3, cut.target)
            own = tl.load(found.counts + of_tile + (cut.key & (_NUM_DIGITS - 1)))
            has_any = (cut.key >= 0) & (own > 0)
        # Counts are floats, so that a token and a digit take three instructions: ==, + and fma.
        count = tl.zeros([_NUM_DIGITS, chunk], tl.float32)
        mass = tl.zeros([_NUM_DIGITS, chunk], tl.float32)
        digit = tl.arange(0, _NUM_DIGITS)
        unit: tl.constexpr = 1.0 / _NUM_DIGITS ** (_LEVELS - 1 - level)
        base = (before * _NUM_DIGITS).to(tl.float32)
        if has_any:
            for start in range(0, tile, _UNROLL * chunk):
                for i in tl.static_range(_UNROLL):
                    columns = part * tile + start + i * chunk + tl.arange(0, chunk)
                    raw = _load(rows, row, columns)
                    place = tl.floor(_key(raw, peak, rate) * unit) - base
                    # Tokens with other digits before this one match none.
                    place = tl.where(raw > -float("inf"), place, -1.0)
                    here = (place[None, :] == digit.to(tl.float32)[:, None]).to(tl.float32)
                    count += here
                    mass += here * tl.exp(tl.div_rn(raw - peak, heat))[None, :]
        tl.store(leaves.counts + of_tile + digit, tl.sum(count, 1).to(tl.int32))
        tl.store(leaves.masses + of_tile + digit, tl.sum(mass, 1))


@triton.jit(do_not_specialize=["rows_each"])
def _settle(rows, rows_each, found, kept, padded_tiles: tl.constexpr, tile: tl.constexpr):
    """Store the tokens that a row keeps."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows_each
    tl.store(kept.peak + row, 0.0)
    tl.store(kept.rate + row, 0.0)
    tl.store(kept.lowest + row, -float("inf"))
    tl.store(kept.key + row, NUM_KEYS)
    tl.store(kept.last + row, 0)
    if _filters(rows, group):
        heat = tl.load(rows.temperature + group)
        share = tl.load(rows.top_p + group)
        peak, rate = _peak_and_rate(rows, row, heat, share, padded_tiles)
        if peak - peak == 0:
            tl.store(kept.peak + row, peak)
            tl.store(kept.rate + row, rate)
            least = tl.load(rows.min_p + group).to(tl.float64)
            if least > 0:
                lowest = peak + heat.to(tl.float64) * tl.log(least)
                tl.store(kept.lowest + row, lowest.to(tl.float32))
            if _searches(rows, group):
                limit = tl.load(rows.top_k + group)
                cut = _find_digit(rows, found, row, limit, share, False, padded_tiles)
                if cut.key >= 0:
                    num_left = _num_left(cut, limit)
                    last = _last(
                        rows, found, row, peak, rate, cut.key, num_left, padded_tiles, tile
                    )
                    tl.store(kept.key + row, cut.key)
                    tl.store(kept.last + row, last)


@triton.jit
def _num_left(cut, limit):
    """Return how many tokens of the key at which a row is cut are kept."""
    by_mass = tl.floor((cut.target - cut.before) / (cut.mass / cut.count)) + 1
    by_mass = tl.where(cut.mass > 0, by_mass, cut.count)
    num_left = tl.minimum(tl.minimum(by_mass, limit - cut.rank), cut.count)
    return tl.maximum(num_left, 1).to(tl.int32)


@triton.jit
def _last(
    rows, found, row, peak, rate, key, num_left, padded_tiles: tl.constexpr, tile: tl.constexpr
):
    """Return the id of the ``num_left``-th token of a key."""
    part = tl.arange(0, padded_tiles)
    at = (row * rows.num_tiles + part) * _NUM_DIGITS + (key & (_NUM_DIGITS - 1))
    of_tiles = tl.load(found.counts + at, mask=part < rows.num_tiles, other=0)
    here = tl.min(tl.where(tl.cumsum(of_tiles, 0) >= num_left, part, rows.num_tiles - 1), 0)
    rank = num_left - tl.sum(tl.where(part < here, of_tiles, 0), 0)
    columns = here * tile + tl.arange(0, tile)
    raw = _load(rows, row, columns)
    own = (_key(raw, peak, rate) == key) & (raw > -float("inf"))
    is_left = own & (tl.cumsum(own.to(tl.int32), 0) <= rank)
    return tl.max(tl.where(is_left, columns, 0), 0)
