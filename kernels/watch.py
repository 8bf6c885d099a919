"""Compare p and q at a measured position: four launches, the first of them a copy.

Of p a round has the normalizing sums; tiles store those of q, and then their parts of the moments;
one program a particle adds these up. Where nothing is measured, or a sequence does not reach the
position, nothing is compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.sample import log_probs_at, row_of, summed
from sglang_smc.kernels.tensors import (
    as_float,
    check_contiguous,
    contiguous,
    padded_columns,
    tiles,
)
from sglang_smc.smc import fidelity
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.fidelity import Path

_TILE = 4096  # logits of each distribution that a program reads
_MOST = tl.constexpr(fidelity.MOST)
_LEAST = tl.constexpr(fidelity.LEAST)


def keep_column(
    q: Sequence[TokenDistribution], coins: torch.Tensor, num_steps: torch.Tensor
) -> torch.Tensor:
    """Copy the draft scores of each group's measured column, in one launch.

    Reference: `sglang_smc.smc.fidelity.keep_column`, same arguments.
    """
    scores = padded_columns([of_step.scores for of_step in q])
    for of_step in scores:
        check_contiguous(of_step)
    num_rows, vocab_size = scores[0].shape
    held = torch.empty_like(scores[0], memory_format=torch.contiguous_format)  # [G * N, V]
    tile, num_tiles = tiles(vocab_size, _TILE)
    _keep[(num_rows, num_tiles)](
        *contiguous((coins, num_steps)),
        scores,
        tuple(of_step.stride(0) for of_step in scores),
        held,
        vocab_size,
        num_rows // len(num_steps),
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
    own = path._replace(
        coins=path.coins.contiguous(),
        num_steps=path.num_steps.contiguous(),
        measured=path.measured.contiguous(),
        ancestors=path.ancestors.contiguous(),
        starts=path.starts.contiguous(),
        lengths=path.lengths.contiguous(),
    )
    at = _At(
        own,
        tuple(map(as_float, path.tails.stride())),
        as_float(num_particles),
        as_float(len(p.scores) // len(q.scores)),
    )
    bare = (law._replace(rows=None, greedy=None) for law in (p, q))
    (of_p, p_sums, sizes), (of_q, q_sums, _) = map(summed, bare)
    laws = (of_p, p_sums, of_q, q_sums)
    num_tiles = q_sums.num_tiles
    grid = size * num_particles, num_tiles
    found = _Found(*torch.empty(3, *grid, device=sums.device).unbind(), num_tiles)
    _compare[grid](at, laws, found, **sizes, num_warps=8)
    after = torch.empty_like(sums, memory_format=torch.contiguous_format)  # [G, N, 4]
    _add[grid[:1]](at, laws, found, sums.contiguous(), after, **sizes)
    return after


class _At(NamedTuple):
    """The rows to read: the first argument of every kernel of `watch`."""

    path: Path
    strides: tuple[float, ...]  # of its tails; see `as_float`
    num_particles: float
    num_columns: float  # K + 1


class _Found(NamedTuple):
    """Parts of E l, E l^2 and E log p of the tiles of each particle's rows, ``[D, tiles]``."""

    ratio: torch.Tensor
    square: torch.Tensor
    log_p: torch.Tensor
    num_tiles: int


@triton.jit
def _columns(coins, num_steps, group):
    """Return the column of a group, the draft column that represents it, and its steps."""
    steps = tl.load(num_steps + group)
    column = (tl.load(coins + group) * (steps + 1).to(tl.float64)).to(tl.int64)
    return column, tl.maximum(tl.minimum(column, steps - 1), 0), steps


@triton.jit(do_not_specialize=["num_particles"])
def _keep(coins, num_steps, scores, strides, held, vocab_size, num_particles, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, drafted, _ = _columns(coins, num_steps, row // num_particles)
    tokens = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = tokens < vocab_size
    for step in tl.static_range(len(scores)):
        if step == drafted:
            values = tl.load(scores[step] + row * strides[step] + tokens, mask=inside)
            tl.store(held + row * vocab_size + tokens, values, mask=inside)


@triton.jit
def _rows_of(at, draw):
    """Return the rows of p and of q that precede a particle's measured token, and its group."""
    num_particles = tl.cast(at.num_particles, tl.int32)
    group = draw // num_particles
    _, drafted, _ = _columns(at.path.coins, at.path.num_steps, group)
    q_row = (group * num_particles + tl.load(at.path.ancestors + draw)).to(tl.int64)
    return q_row * tl.cast(at.num_columns, tl.int32) + drafted, q_row, group


@triton.jit
def _place(at, draw):
    """Return the measured token's index in the tail, and whether the sequence reaches it."""
    _, q_row, group = _rows_of(at, draw)
    column, _, num_steps = _columns(at.path.coins, at.path.num_steps, group)
    place = tl.load(at.path.starts + q_row) + column
    counts = (tl.load(at.path.measured + group) != 0) & (num_steps > 0)
    return place, counts & (place < tl.load(at.path.lengths + draw))


@triton.jit
def _logs(at, laws, draw, columns, padded_tiles: tl.constexpr):
    """Return log p of tokens, and log q - log p within its bounds."""
    p, p_sums, q, q_sums = laws
    p_row, q_row, _ = _rows_of(at, draw)
    log_p = log_probs_at(p, row_of(p, p_sums, p_row, padded_tiles), columns)
    log_q = log_probs_at(q, row_of(q, q_sums, q_row, padded_tiles), columns)
    ratio = log_q - log_p
    ratio = tl.where(ratio == ratio, ratio, 0.0)  # the token has mass in neither distribution
    return log_p, tl.minimum(tl.maximum(ratio, -_MOST), _MOST)


@triton.jit
def _compare(at, laws, found, padded_tiles: tl.constexpr, tile: tl.constexpr):
    draw = tl.program_id(0)
    _, reached = _place(at, draw)
    if reached:
        part = tl.program_id(1)
        columns = part * tile + tl.arange(0, tile)
        log_p, ratio = _logs(at, laws, draw, columns, padded_tiles)
        mass = tl.exp(log_p)
        to = draw * found.num_tiles + part
        tl.store(found.ratio + to, tl.sum(mass * ratio, 0))
        tl.store(found.square + to, tl.sum(mass * ratio * ratio, 0))
        tl.store(found.log_p + to, tl.sum(mass * tl.maximum(log_p, _LEAST), 0))


@triton.jit
def _mean(found, draw, parts, padded_tiles: tl.constexpr):
    part = tl.arange(0, padded_tiles)
    at = parts + draw * found.num_tiles + part
    return tl.sum(tl.load(at, mask=part < found.num_tiles, other=0.0).to(tl.float64), 0)


@triton.jit
def _add(at, laws, found, sums, after, padded_tiles: tl.constexpr, tile: tl.constexpr):
    draw = tl.program_id(0)
    pull = tl.load(sums + 4 * draw)
    information = tl.load(sums + 4 * draw + 1)
    innovation = tl.load(sums + 4 * draw + 2)
    count = tl.load(sums + 4 * draw + 3)
    place, reached = _place(at, draw)
    if reached:
        num_particles = tl.cast(at.num_particles, tl.int32)
        group = draw // num_particles
        tail = group.to(tl.int64) * tl.cast(at.strides[0], tl.int32)
        tail += draw % num_particles * tl.cast(at.strides[1], tl.int32)
        token = tl.load(at.path.tails + tail + place * tl.cast(at.strides[2], tl.int32))
        log_p, ratio = _logs(at, laws, draw, token, padded_tiles)
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
