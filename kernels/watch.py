"""Compare p and q at a measured position: a copy for each draft step, and three launches.

A row of p and one of q are read twice: tiles store the normalizing sums, and then their parts of
the moments; one program a particle adds these up. Where nothing is measured, or a sequence does not
reach the position, no row is read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.filters import dropped
from sglang_smc.kernels.sample import _relative
from sglang_smc.kernels.tensors import check_contiguous, contiguous, tiles
from sglang_smc.smc import fidelity
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.fidelity import Path
from sglang_smc.smc.filters import KeptTokens

_TILE = 4096  # logits of each distribution that a program reads
_MOST = tl.constexpr(fidelity.MOST)
_LEAST = tl.constexpr(fidelity.LEAST)


def keep_column(
    held: torch.Tensor | None,
    scores: torch.Tensor,
    coins: torch.Tensor,
    num_steps: torch.Tensor,
    step: int,
) -> torch.Tensor:
    """Store a step's draft scores where a group measures that step, in one launch.

    Reference: `sglang_smc.smc.fidelity.keep_column`, same arguments; the tensor is allocated at the
    first step, and rows of later steps are undefined until then.
    """
    check_contiguous(scores)
    num_rows, vocab_size = scores.shape
    if held is None:
        held = torch.empty(num_rows, vocab_size, dtype=scores.dtype, device=scores.device)
    tile, num_tiles = tiles(vocab_size, _TILE)
    _keep[(num_rows, num_tiles)](
        coins.contiguous(),
        num_steps.contiguous(),
        held,
        scores,
        scores.stride(0),
        vocab_size,
        num_rows // len(num_steps),
        step,
        tile=tile,
        num_warps=8,
    )
    return held


def watch(
    sums: torch.Tensor, path: Path, p: TokenDistribution, q: TokenDistribution
) -> torch.Tensor:
    """Add a round's measurements, in three launches.

    Reference: `sglang_smc.smc.fidelity.watch`, same arguments, to rounding (1e-4 of each term).
    """
    size, num_particles, _ = sums.shape
    at = _At(
        Path._make((*contiguous(path[:-1]), path.tails)),
        path.tails.stride(),
        num_particles,
        len(p.scores) // len(q.scores),
    )
    of_p, of_q = _of(p), _of(q)
    vocab_size = p.scores.shape[1]
    tile, num_tiles = tiles(vocab_size, _TILE)
    num_draws = size * num_particles
    found = _Found(
        *torch.empty(7, num_draws, num_tiles, device=sums.device).unbind(), num_tiles, vocab_size
    )
    grid = num_draws, num_tiles
    _sum_tile[grid](at, of_p, of_q, found, tile=tile, num_warps=8)
    padded = triton.next_power_of_2(num_tiles)
    _compare[grid](at, of_p, of_q, found, padded_tiles=padded, tile=tile, num_warps=8)
    after = torch.empty_like(sums, memory_format=torch.contiguous_format)  # [G, N, 4]
    _add[(num_draws,)](at, of_p, of_q, found, sums.contiguous(), after, padded_tiles=padded)
    return after


class _At(NamedTuple):
    """The rows to read: the first argument of every kernel of `watch`."""

    path: Path
    strides: tuple[int, ...]  # of its tails
    num_particles: int
    num_columns: int  # K + 1


class _Law(NamedTuple):
    scores: torch.Tensor
    stride: int
    temperature: torch.Tensor
    kept: KeptTokens | None


class _Found(NamedTuple):
    """The partial results of the tiles of each particle's two rows, ``[D, tiles]`` float32 each."""

    p_highest: torch.Tensor  # the largest logit over its temperature
    p_total: torch.Tensor  # the sum of exponentials relative to `p_highest`
    q_highest: torch.Tensor
    q_total: torch.Tensor
    ratio: torch.Tensor  # parts of E l, E l^2 and E log p
    square: torch.Tensor
    log_p: torch.Tensor
    num_tiles: int
    vocab_size: int


def _of(law: TokenDistribution) -> _Law:
    check_contiguous(law.scores)
    return _Law(law.scores, law.scores.stride(0), law.temperature.contiguous(), law.kept)


@triton.jit
def _columns(coins, num_steps, group):
    """Return the column of a group, the draft column that represents it, and its steps."""
    steps = tl.load(num_steps + group)
    column = (tl.load(coins + group) * (steps + 1).to(tl.float64)).to(tl.int64)
    return column, tl.maximum(tl.minimum(column, steps - 1), 0), steps


@triton.jit
def _keep(
    coins, num_steps, held, scores, stride, vocab_size, num_particles, step, tile: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    _, drafted, _ = _columns(coins, num_steps, row // num_particles)
    if drafted == step:
        tokens = tl.program_id(1) * tile + tl.arange(0, tile)
        inside = tokens < vocab_size
        values = tl.load(scores + row * stride + tokens, mask=inside)
        tl.store(held + row * vocab_size + tokens, values, mask=inside)


@triton.jit
def _rows_of(at, draw):
    """Return the rows of p and of q that precede a particle's measured token, and its group."""
    group = draw // at.num_particles
    _, drafted, _ = _columns(at.path.coins, at.path.num_steps, group)
    q_row = (group * at.num_particles + tl.load(at.path.ancestors + draw)).to(tl.int64)
    return q_row * at.num_columns + drafted, q_row, group


@triton.jit
def _place(at, draw):
    """Return the measured token's index in the tail, and whether the sequence reaches it."""
    _, q_row, group = _rows_of(at, draw)
    column, _, num_steps = _columns(at.path.coins, at.path.num_steps, group)
    place = tl.load(at.path.starts + q_row) + column
    counts = (tl.load(at.path.measured + group) != 0) & (num_steps > 0)
    return place, counts & (place < tl.load(at.path.lengths + draw))


@triton.jit
def _scaled(law, found, row, group, columns):
    """Return logits over temperature, -inf where filters cut."""
    inside = columns < found.vocab_size
    raw = tl.load(law.scores + row * law.stride + columns, mask=inside, other=-float("inf"))
    raw = raw.to(tl.float32)
    scaled = tl.div_rn(raw, tl.load(law.temperature + group).to(tl.float32))
    if law.kept is not None:
        scaled = tl.where(dropped(law.kept, row, raw, columns), -float("inf"), scaled)
    return scaled


@triton.jit
def _leave(law, found, row, group, columns, highest, total):
    scaled = _scaled(law, found, row, group, columns)
    largest = tl.max(scaled, 0)
    tl.store(highest, largest)
    tl.store(total, tl.sum(_relative(scaled, largest), 0))


@triton.jit
def _sum_tile(at, p, q, found, tile: tl.constexpr):
    draw = tl.program_id(0)
    _, reached = _place(at, draw)
    if reached:
        part = tl.program_id(1)
        columns = part * tile + tl.arange(0, tile)
        p_row, q_row, group = _rows_of(at, draw)
        to = draw * found.num_tiles + part
        _leave(p, found, p_row, group, columns, found.p_highest + to, found.p_total + to)
        _leave(q, found, q_row, group, columns, found.q_highest + to, found.q_total + to)


@triton.jit
def _norm(found, draw, highest, total, padded_tiles: tl.constexpr):
    """Return the largest logit of a row, and the log of its sum of exponentials relative to it."""
    part = tl.arange(0, padded_tiles)
    inside = part < found.num_tiles
    of_tile = tl.load(highest + draw * found.num_tiles + part, mask=inside, other=-float("inf"))
    totals = tl.load(total + draw * found.num_tiles + part, mask=inside, other=0.0)
    largest = tl.max(of_tile, 0)
    factors = _relative(of_tile.to(tl.float64), largest.to(tl.float64))
    return largest, tl.log(tl.sum(totals.to(tl.float64) * factors, 0)).to(tl.float32)


@triton.jit
def _logs(at, p, q, found, draw, columns, padded_tiles: tl.constexpr):
    """Return log p of tokens, and log q - log p within its bounds."""
    p_row, q_row, group = _rows_of(at, draw)
    largest, log_sum = _norm(found, draw, found.p_highest, found.p_total, padded_tiles)
    log_p = (_scaled(p, found, p_row, group, columns) - largest) - log_sum
    largest, log_sum = _norm(found, draw, found.q_highest, found.q_total, padded_tiles)
    log_q = (_scaled(q, found, q_row, group, columns) - largest) - log_sum
    ratio = log_q - log_p
    ratio = tl.where(ratio == ratio, ratio, 0.0)  # the token has mass in neither distribution
    return log_p, tl.minimum(tl.maximum(ratio, -_MOST), _MOST)


@triton.jit
def _compare(at, p, q, found, padded_tiles: tl.constexpr, tile: tl.constexpr):
    draw = tl.program_id(0)
    _, reached = _place(at, draw)
    if reached:
        part = tl.program_id(1)
        columns = part * tile + tl.arange(0, tile)
        log_p, ratio = _logs(at, p, q, found, draw, columns, padded_tiles)
        mass, to = tl.exp(log_p), draw * found.num_tiles + part
        tl.store(found.ratio + to, tl.sum(mass * ratio, 0))
        tl.store(found.square + to, tl.sum(mass * ratio * ratio, 0))
        tl.store(found.log_p + to, tl.sum(mass * tl.maximum(log_p, _LEAST), 0))


@triton.jit
def _mean(found, draw, parts, padded_tiles: tl.constexpr):
    part = tl.arange(0, padded_tiles)
    at = parts + draw * found.num_tiles + part
    return tl.sum(tl.load(at, mask=part < found.num_tiles, other=0.0).to(tl.float64), 0)


@triton.jit
def _add(at, p, q, found, sums, after, padded_tiles: tl.constexpr):
    draw = tl.program_id(0)
    pull = tl.load(sums + 4 * draw)
    information = tl.load(sums + 4 * draw + 1)
    innovation = tl.load(sums + 4 * draw + 2)
    count = tl.load(sums + 4 * draw + 3)
    place, reached = _place(at, draw)
    if reached:
        group = draw // at.num_particles
        tail = group.to(tl.int64) * at.strides[0] + draw % at.num_particles * at.strides[1]
        token = tl.load(at.path.tails + tail + place * at.strides[2])
        log_p, ratio = _logs(at, p, q, found, draw, token, padded_tiles)
        mean = _mean(found, draw, found.ratio, padded_tiles)
        square = _mean(found, draw, found.square, padded_tiles)
        column, drafted, _ = _columns(at.path.coins, at.path.num_steps, group)
        if column == drafted:
            pull += ratio.to(tl.float64) - mean
            innovation += tl.maximum(log_p, _LEAST).to(tl.float64)
            innovation -= _mean(found, draw, found.log_p, padded_tiles)
        information += tl.maximum(square - mean * mean, 0.0)
        count += 1.0
    tl.store(after + 4 * draw, pull)
    tl.store(after + 4 * draw + 1, information)
    tl.store(after + 4 * draw + 2, innovation)
    tl.store(after + 4 * draw + 3, count)
