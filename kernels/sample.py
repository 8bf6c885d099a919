"""Temperature, draw and log-probability in about one pass over the logits.

Two launches: each tile of each row leaves its largest logit and its sum of exponentials, so that a
few rows of a large vocabulary keep the whole GPU busy; then one program a row adds these up, finds
the tile that a draw falls into, and reads that tile alone again.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits a program reads; a row of 152k has 38 tiles


def sample_and_score(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token a row, and say how probable it was.

    Reference: `sglang_smc.smc.distribution.sample_and_score`, same arguments. Tokens are its tokens
    unless a uniform lies within rounding (1e-6) of the boundary between two.

    Raises:
        ValueError: the vocabulary does not lie contiguously in memory.
    """
    tokens = torch.empty_like(uniforms, dtype=torch.int64)  # [D]
    log_probs = torch.empty_like(uniforms, dtype=torch.float32)  # [D]
    source = _source(logits, temperature, rows)
    highest, total, tile = _sum_tiles(source)
    _draw[(len(tokens),)](
        *source,
        highest,
        total,
        uniforms.contiguous(),
        tokens,
        log_probs,
        highest.shape[1],
        padded_tiles=triton.next_power_of_2(highest.shape[1]),
        tile=tile,
        num_warps=8,
    )
    return tokens, log_probs


def score_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities of given tokens.

    Reference: `sglang_smc.smc.distribution.score_tokens`, same arguments.

    Raises:
        ValueError: the vocabulary does not lie contiguously in memory.
    """
    log_probs = torch.empty_like(tokens, dtype=torch.float32)  # [D]
    source = _source(logits, temperature, rows)
    highest, total, _ = _sum_tiles(source)
    _score[(len(tokens),)](
        *source,
        highest,
        total,
        tokens.contiguous(),
        log_probs,
        highest.shape[1],
        padded_tiles=triton.next_power_of_2(highest.shape[1]),
    )
    return log_probs


class _Source(NamedTuple):
    """Where logits are read: the first arguments of every kernel of this file."""

    logits: torch.Tensor
    temperature: torch.Tensor
    draws_each: int
    rows: torch.Tensor | None
    stride: int
    vocab_size: int


def _source(logits: torch.Tensor, temperature: torch.Tensor, rows: torch.Tensor | None) -> _Source:
    if logits.stride(1) != 1:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} have stride {logits.stride(1)} along the "
            "vocabulary, which must be 1: pass logits.contiguous()"
        )
    rows = rows if rows is None else rows.contiguous()
    draws_each = len(logits if rows is None else rows) // len(temperature)
    return _Source(
        logits, temperature.contiguous(), draws_each, rows, logits.stride(0), logits.shape[1]
    )


def _sum_tiles(source: _Source) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Largest scaled logit and sum of exponentials relative to it, of each tile ``[D, tiles]``."""
    tile = min(_TILE, triton.next_power_of_2(source.vocab_size))
    num_draws = len(source.temperature) * source.draws_each
    shape = num_draws, triton.cdiv(source.vocab_size, tile)
    highest = torch.empty(shape, dtype=torch.float32, device=source.logits.device)  # [D, tiles]
    total = torch.empty_like(highest)
    _sum_tile[shape](*source, highest, total, tile=tile, num_warps=8)
    return highest, total, tile


@triton.jit
def _row_of(rows, draw):
    return draw.to(tl.int64) if rows is None else tl.load(rows + draw)


@triton.jit
def _scaled(logits, temperature, group, row, stride, columns, inside):
    """Logits over temperature, divided as torch does: then they agree bit for bit."""
    raw = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf"))
    return tl.div_rn(raw.to(tl.float32), tl.load(temperature + group).to(tl.float32))


@triton.jit
def _sum_tile(
    logits,
    temperature,
    draws_each,
    rows,
    stride,
    vocab_size,
    highest,
    total,
    tile: tl.constexpr,
):
    draw = tl.program_id(0)
    group = draw // draws_each
    part = tl.program_id(1)
    columns = part * tile + tl.arange(0, tile)
    row = _row_of(rows, draw)
    scaled = _scaled(logits, temperature, group, row, stride, columns, columns < vocab_size)
    largest = tl.max(scaled, 0)
    at = draw * tl.num_programs(1) + part
    tl.store(highest + at, largest)
    tl.store(total + at, tl.sum(_relative(scaled, largest), 0))


@triton.jit
def _relative(scaled, largest):
    """Exponentials; all zero, not NaN, where everything is forbidden."""
    return tl.exp(scaled - tl.where(largest == -float("inf"), 0.0, largest))


@triton.jit
def _tile_masses(highest, total, draw, num_tiles, padded_tiles: tl.constexpr):
    """Mass of each tile and the factor it was scaled by, relative to the row's largest logit."""
    part = tl.arange(0, padded_tiles)
    inside = part < num_tiles
    of_tile = tl.load(highest + draw * num_tiles + part, mask=inside, other=-float("inf"))
    sums = tl.load(total + draw * num_tiles + part, mask=inside, other=0.0)
    largest = tl.max(of_tile, 0)
    factors = _relative(of_tile.to(tl.float64), largest.to(tl.float64))
    return sums.to(tl.float64) * factors, factors, largest


@triton.jit
def _find(masses, places, target):
    """First place whose cumulative mass exceeds the target, and that has mass itself.

    Where rounding leaves none, the last that has mass: no other is ever found.
    """
    reached = (tl.cumsum(masses, 0) > target) & (masses > 0)
    found = tl.min(tl.where(reached, places, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(masses > 0, places, 0), 0)
    return tl.minimum(found, last)


@triton.jit
def _store_score(scaled, largest, masses, log_probs, draw):
    log_prob = scaled.to(tl.float64) - largest - tl.log(tl.sum(masses, 0))
    tl.store(log_probs + draw, log_prob.to(tl.float32))


@triton.jit
def _draw(
    logits,
    temperature,
    draws_each,
    rows,
    stride,
    vocab_size,
    highest,
    total,
    uniforms,
    tokens,
    log_probs,
    num_tiles,
    padded_tiles: tl.constexpr,
    tile: tl.constexpr,
):
    draw = tl.program_id(0)
    group = draw // draws_each
    row = _row_of(rows, draw)
    masses, factors, largest = _tile_masses(highest, total, draw, num_tiles, padded_tiles)
    mass = tl.sum(masses, 0)  # NaN where some logit is NaN or infinite
    target = tl.load(uniforms + draw) * mass
    part = tl.arange(0, padded_tiles)
    found = _find(masses, part, target)
    before = tl.sum(tl.where(part < found, masses, 0.0), 0)
    factor = tl.sum(tl.where(part == found, factors, 0.0), 0)

    columns = found * tile + tl.arange(0, tile)
    inside = columns < vocab_size
    scaled = _scaled(logits, temperature, group, row, stride, columns, inside)
    # Relative to the tile's own largest: a tile far below the row's would vanish in float32.
    inner = _relative(scaled, tl.max(scaled, 0)).to(tl.float64)
    token = tl.where(mass == mass, _find(inner, columns, (target - before) / factor), 0)
    tl.store(tokens + draw, token.to(tl.int64))
    of_token = _scaled(logits, temperature, group, row, stride, token, token < vocab_size)
    _store_score(of_token, largest, masses, log_probs, draw)


@triton.jit
def _score(
    logits,
    temperature,
    draws_each,
    rows,
    stride,
    vocab_size,
    highest,
    total,
    tokens,
    log_probs,
    num_tiles,
    padded_tiles: tl.constexpr,
):
    draw = tl.program_id(0)
    masses, _, largest = _tile_masses(highest, total, draw, num_tiles, padded_tiles)
    token = tl.load(tokens + draw)
    row = _row_of(rows, draw)
    scaled = _scaled(
        logits, temperature, draw // draws_each, row, stride, token, token < vocab_size
    )
    _store_score(scaled, largest, masses, log_probs, draw)
