"""Apply temperature, sample tokens and compute log-probabilities, in about one pass.

Two launches: each tile of each row stores its largest logit and its sum of exponentials, so that a
few rows of a large vocabulary keep the whole GPU busy; then one program a row adds these up, finds
the tile that a uniform falls into, and reads that tile alone again. Where one distribution is
sampled more than once, `row_sums` runs the first launch for all. Only `log_probs`, of all tokens,
allocates a tensor of the logits' size.

Tokens that filters drop (`kernels.filters.filtered`) are masked as logits are read. A greedy
group's token is the first of its tiles' largest logits, with no launch of its own.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tensors import as_float, check_contiguous, tiles
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.filters import KeptTokens

_TILE = 4096  # logits per program; a row of 152k has 38 tiles


def sample_and_score(
    law: TokenDistribution, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each draw with uniforms ``[D]``, and return its log-probability.

    Reference: `sglang_smc.smc.distribution.TokenDistribution`, as of the other functions here.
    Tokens are equal unless a uniform is within rounding (1e-6) of the boundary between two.
    """
    tokens = torch.empty_like(uniforms, dtype=torch.int64)  # [D]
    log_probs = torch.empty_like(uniforms, dtype=torch.float32)  # [D]
    source, sums, sizes = summed(law)
    _draw[(len(tokens),)](
        source, sums, uniforms.contiguous(), tokens, log_probs, **sizes, num_warps=8
    )
    return tokens, log_probs


def score_tokens(law: TokenDistribution, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of given tokens ``[D]``."""
    found = torch.empty_like(tokens, dtype=torch.float32)  # [D]
    source, sums, sizes = summed(law)
    _score[(len(tokens),)](source, sums, tokens.contiguous(), found, **sizes)
    return found


def log_probs(law: TokenDistribution) -> torch.Tensor:
    """Return the log-probabilities of all tokens, ``[D, V]``."""
    source, sums, sizes = summed(law)
    shape = law.num_draws, source.vocab_size
    found = torch.empty(shape, dtype=torch.float32, device=law.scores.device)  # [D, V]
    _spread[shape[0], sums.num_tiles](source, sums, found, **sizes, num_warps=8)
    return found


def log_sums(law: TokenDistribution) -> torch.Tensor:
    """Return the logarithms of the normalizing constants, ``[D]``."""
    source, sums, sizes = summed(law)
    found = torch.empty(law.num_draws, dtype=torch.float64, device=law.scores.device)  # [D]
    _add_up[(len(found),)](source, sums, found, **sizes)
    return found


def row_sums(law: TokenDistribution) -> "RowSums":
    """Add up each row once, for the sums of all draws from it, in one launch."""
    return summed(law._replace(rows=None))[1]


class Source(NamedTuple):
    """The distributions to sample: the first argument of every kernel of this file."""

    logits: torch.Tensor
    temperature: torch.Tensor
    draws_each: float  # of a group; see `as_float`
    rows: torch.Tensor | None
    greedy: torch.Tensor | None
    kept: KeptTokens | None
    stride: int
    vocab_size: int


class RowSums(NamedTuple):
    """The partial sums of each draw's row; or of each row, where ``rows`` maps draws to rows."""

    highest: torch.Tensor  # [D, tiles] the largest logit over its temperature
    total: torch.Tensor  # [D, tiles] the sum of exponentials relative to it
    first: torch.Tensor | None  # [D, tiles] its first token; None: no group is greedy
    num_tiles: int
    rows: torch.Tensor | None = None  # [D] row of these for each draw; None: its own


class Row(NamedTuple):
    """Hold what the logits of a draw have in common, loaded once; 0 where there is none of it."""

    logits: Any  # address of the first
    temperature: Any
    is_greedy: Any
    cut: Any  # a `KeptTokens` of this row
    largest: Any  # logit over temperature
    mass: Any  # relative to that
    likeliest: Any  # token


def summed(law: TokenDistribution) -> tuple[Source, RowSums, dict[str, int]]:
    """Return the source, its sums, and the compile-time sizes of the kernels that read them."""
    source, sums, sizes = unsummed(law)
    if law.sums is not None:
        return source, law.sums._replace(rows=source.rows), sizes
    _sum_tile[sums.highest.shape](source, sums, tile=sizes["tile"], num_warps=8)
    return source, sums, sizes


def unsummed(law: TokenDistribution) -> tuple[Source, RowSums, dict[str, int]]:
    """Return what `summed` does, with sums that no program has written."""
    logits = law.scores
    rows = law.rows
    greedy = law.greedy
    check_contiguous(logits)
    vocab_size = logits.shape[1]
    size = law.num_draws
    source = Source(
        logits,
        law.temperature.contiguous(),
        as_float(size // len(law.temperature)),
        None if rows is None else rows.contiguous(),
        None if greedy is None else greedy.contiguous(),
        law.kept,
        logits.stride(0),
        vocab_size,
    )
    tile, num_tiles = tiles(vocab_size, _TILE)
    sizes = {"padded_tiles": triton.next_power_of_2(num_tiles), "tile": tile}
    highest = torch.empty(size, num_tiles, dtype=torch.float32, device=logits.device)
    first = None if greedy is None else torch.empty_like(highest, dtype=torch.int32)
    return source, RowSums(highest, torch.empty_like(highest), first, num_tiles), sizes


@triton.jit
def group_of(source, draw):
    """Return the group of a draw, whose temperature it has."""
    return draw // tl.cast(source.draws_each, tl.int32)


@triton.jit
def _row_of(source, draw):
    return draw.to(tl.int64) if source.rows is None else tl.load(source.rows + draw)


@triton.jit
def _place(sums, draw):
    """Return the row of the sums for a draw."""
    return draw if sums.rows is None else tl.load(sums.rows + draw).to(tl.int32)


@triton.jit
def _is_greedy(source, draw):
    return tl.load(source.greedy + group_of(source, draw)) != 0


@triton.jit
def _cut_of(kept, row):
    """Load where a row is cut, for `_dropped`."""
    return KeptTokens(
        tl.load(kept.above + row), tl.load(kept.lowest + row), tl.load(kept.last + row)
    )


@triton.jit
def _dropped(cut, raw, columns):
    """Return which of a row's tokens are cut, as `KeptTokens.dropped` does."""
    return ((raw < cut.above) & (columns > cut.last)) | (raw < cut.lowest)


@triton.jit
def own_of(source, draw):
    """Load what `scaled_at` needs of a draw: the first fields of `Row`."""
    row = _row_of(source, draw)
    temperature = tl.load(source.temperature + group_of(source, draw)).to(tl.float32)
    is_greedy = 0
    if source.greedy is not None:
        is_greedy = _is_greedy(source, draw)
        temperature = tl.where(is_greedy, 1.0, temperature)
    cut = 0
    if source.kept is not None:
        cut = _cut_of(source.kept, row)
    return Row(source.logits + row * source.stride, temperature, is_greedy, cut, 0, 0, 0)


@triton.jit
def raw_at(source, own, columns):
    """Load logits of some tokens."""
    at = own.logits + columns
    return tl.load(at, mask=columns < source.vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit
def scaled_at(source, own, columns):
    """Return logits over temperature, with torch's rounding, so that they are bit-identical."""
    raw = raw_at(source, own, columns)
    scaled = tl.div_rn(raw, own.temperature)
    if source.kept is not None:
        scaled = tl.where(_dropped(own.cut, raw, columns), -float("inf"), scaled)
    return scaled


@triton.jit
def _sum_tile(source, sums, tile: tl.constexpr):
    draw = tl.program_id(0)
    add_up_tile(source, own_of(source, draw), sums, draw, tl.program_id(1), tile)


@triton.jit
def add_up_tile(source, own, sums, draw, part, tile: tl.constexpr):
    """Store the sums of one tile of a draw, and return them: a row of `RowSums`."""
    columns = part * tile + tl.arange(0, tile)
    scaled = scaled_at(source, own, columns)
    largest = tl.max(scaled, 0)
    at = draw * sums.num_tiles + part
    tl.store(sums.highest + at, largest)
    total = tl.sum(_relative(scaled, largest), 0)
    tl.store(sums.total + at, total)
    if source.greedy is not None:
        tl.store(sums.first + at, tl.min(tl.where(scaled == largest, columns, 0x7FFFFFFF), 0))
    return largest, total


@triton.jit
def _relative(scaled, largest):
    """Return exponentials; all zero, not NaN, where everything is forbidden."""
    return tl.exp(scaled - tl.where(largest == -float("inf"), 0.0, largest))


@triton.jit
def _tile_masses(sums, draw, padded_tiles: tl.constexpr):
    """Return each tile's mass and scale, relative to the row's largest logit, and that logit."""
    part = tl.arange(0, padded_tiles)
    at = _place(sums, draw) * sums.num_tiles + part
    inside = part < sums.num_tiles
    of_tile = tl.load(sums.highest + at, mask=inside, other=-float("inf"))
    totals = tl.load(sums.total + at, mask=inside, other=0.0)
    largest = tl.max(of_tile, 0)
    factors = _relative(of_tile.to(tl.float64), largest.to(tl.float64))
    return totals.to(tl.float64) * factors, factors, largest


@triton.jit
def _likeliest(sums, draw, largest, padded_tiles: tl.constexpr):
    """Return the first token with the row's largest logit; 0 if the row has no distribution."""
    part = tl.arange(0, padded_tiles)
    at = _place(sums, draw) * sums.num_tiles + part
    inside = part < sums.num_tiles
    has_largest = tl.load(sums.highest + at, mask=inside, other=float("nan")) == largest
    token = tl.min(tl.load(sums.first + at, mask=has_largest, other=0x7FFFFFFF), 0)
    return tl.where(token == 0x7FFFFFFF, 0, token)


@triton.jit
def _find(masses, places, target):
    """Return the first place of nonzero mass where the cumulative mass exceeds the target.

    If rounding leaves none, it is the last place of nonzero mass.
    """
    reached = (tl.cumsum(masses, 0) > target) & (masses > 0)
    found = tl.min(tl.where(reached, places, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(masses > 0, places, 0), 0)
    return tl.minimum(found, last)


@triton.jit
def _log_prob(scaled, largest, mass):
    return scaled.to(tl.float64) - largest - tl.log(mass)


@triton.jit
def _sure(tokens, likeliest, mass):
    """Return log-probabilities of a point mass on the likeliest token; NaN without mass."""
    return tl.where(mass > 0, tl.where(tokens == likeliest, 0.0, -float("inf")), float("nan"))


@triton.jit
def _draw(
    source, sums, uniforms, tokens, log_probs, padded_tiles: tl.constexpr, tile: tl.constexpr
):
    draw = tl.program_id(0)
    masses, factors, largest = _tile_masses(sums, draw, padded_tiles)
    mass = tl.sum(masses, 0)  # NaN where some logit is NaN or infinite
    target = tl.load(uniforms + draw) * mass
    part = tl.arange(0, padded_tiles)
    found = _find(masses, part, target)
    before = tl.sum(tl.where(part < found, masses, 0.0), 0)
    factor = tl.sum(tl.where(part == found, factors, 0.0), 0)

    columns = found * tile + tl.arange(0, tile)
    own = own_of(source, draw)
    scaled = scaled_at(source, own, columns)
    # Relative to the tile's own largest logit: relative to the row's, it may underflow float32.
    inner = _relative(scaled, tl.max(scaled, 0)).to(tl.float64)
    token = tl.where(mass == mass, _find(inner, columns, (target - before) / factor), 0)
    log_prob = _log_prob(scaled_at(source, own, token), largest, mass)
    if source.greedy is not None:
        likeliest = tl.where(mass > 0, _likeliest(sums, draw, largest, padded_tiles), 0)
        token = tl.where(own.is_greedy, likeliest, token)
        log_prob = tl.where(own.is_greedy, _sure(token, likeliest, mass), log_prob)
    tl.store(tokens + draw, token.to(tl.int64))
    tl.store(log_probs + draw, log_prob.to(tl.float32))


@triton.jit
def _score(source, sums, tokens, log_probs, padded_tiles: tl.constexpr, tile: tl.constexpr):
    draw = tl.program_id(0)
    masses, _, largest = _tile_masses(sums, draw, padded_tiles)
    mass = tl.sum(masses, 0)
    token = tl.load(tokens + draw)
    own = own_of(source, draw)
    log_prob = _log_prob(scaled_at(source, own, token), largest, mass)
    if source.greedy is not None:
        likeliest = _likeliest(sums, draw, largest, padded_tiles)
        log_prob = tl.where(own.is_greedy, _sure(token, likeliest, mass), log_prob)
    tl.store(log_probs + draw, log_prob.to(tl.float32))


@triton.jit
def row_of(source, sums, draw, padded_tiles: tl.constexpr):
    """Load what `log_probs_at` needs of a draw: a `Row`."""
    masses, _, largest = _tile_masses(sums, draw, padded_tiles)
    own = own_of(source, draw)
    likeliest = 0
    if source.greedy is not None:
        likeliest = _likeliest(sums, draw, largest, padded_tiles)
    mass = tl.sum(masses, 0)
    return Row(own.logits, own.temperature, own.is_greedy, own.cut, largest, mass, likeliest)


@triton.jit
def log_probs_at(source, row, columns):
    """Return the log-probabilities of some tokens; ``row`` is of `row_of`."""
    # In float32, as in torch: nothing is summed here.
    found = (scaled_at(source, row, columns) - row.largest) - tl.log(row.mass).to(tl.float32)
    if source.greedy is not None:
        found = tl.where(row.is_greedy, _sure(columns, row.likeliest, row.mass), found)
    return found


@triton.jit
def _spread(source, sums, log_probs, padded_tiles: tl.constexpr, tile: tl.constexpr):
    """Store the log-probabilities of a tile's tokens."""
    draw = tl.program_id(0)
    row = row_of(source, sums, draw, padded_tiles)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    of_tokens = log_probs_at(source, row, columns)
    at = log_probs + draw.to(tl.int64) * source.vocab_size + columns
    tl.store(at, of_tokens, mask=columns < source.vocab_size)


@triton.jit
def _add_up(source, sums, found, padded_tiles: tl.constexpr, tile: tl.constexpr):
    """Store the log of the sum of a row's exponentials."""
    draw = tl.program_id(0)
    masses, _, largest = _tile_masses(sums, draw, padded_tiles)
    mass = tl.sum(masses, 0)
    log_sum = largest + tl.log(tl.where(mass > 0, mass, float("nan")))
    if source.greedy is not None:
        log_sum = tl.where(_is_greedy(source, draw) & (mass > 0), 0.0, log_sum)
    tl.store(found + draw, log_sum)
