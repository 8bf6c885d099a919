"""Compare particles' texts, and share uniforms among siblings: each function is one launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.randomness import _mix
from sglang_smc.kernels.reweight import _members
from sglang_smc.kernels.tensors import as_float, contiguous, padded_particles
from sglang_smc.smc.prefixes import TIE

_BLOCK = tl.constexpr(64)  # tokens of each tail that a program loads at once
_TIE = tl.constexpr(TIE)


class _Texts(NamedTuple):
    """Tokens of all particles, ``[G, N, width]``, often a view of a population's."""

    tokens: torch.Tensor
    group_stride: float  # see `as_float`
    particle_stride: float
    token_stride: int
    num_particles: float
    width: float


def _texts(tokens: torch.Tensor) -> _Texts:
    _, num_particles, width = tokens.shape
    group, particle, token = tokens.stride()
    return _Texts(
        tokens,
        group_stride=as_float(group),
        particle_stride=as_float(particle),
        token_stride=token,
        num_particles=as_float(num_particles),
        width=as_float(width),
    )


def same_text(
    texts: torch.Tensor, lengths: torch.Tensor, may_stratify: torch.Tensor
) -> torch.Tensor:
    """Return the siblings among a group's particles, an equivalence relation ``[G, N, N]`` bool.

    Reference: `sglang_smc.smc.randomness.same_text`, same arguments, bit-identical hashes.
    """
    num_groups, num_particles, _ = texts.shape
    shape = num_groups, num_particles, num_particles
    found = torch.empty(shape, dtype=torch.bool, device=texts.device)  # [G, N, N]
    padded = padded_particles(num_particles)
    of_particles = contiguous((lengths, may_stratify))
    _same_text[(num_groups,)](_texts(texts), *of_particles, found, padded=padded)
    return found


def stratify(
    uniforms: torch.Tensor, same_text: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep as siblings those with equal tokens, then spread the uniforms of siblings evenly.

    Reference: `sglang_smc.smc.randomness.stratify`, same arguments, bit-identical.
    """
    num_groups, num_particles = uniforms.shape
    spread_out = torch.empty_like(uniforms, memory_format=torch.contiguous_format)  # [G, N]
    remaining = same_text  # [G, N, N]
    if tokens is not None:
        remaining = torch.empty_like(same_text, memory_format=torch.contiguous_format)
        tokens = tokens.contiguous()
    _stratify[(num_groups,)](
        uniforms.contiguous(),
        same_text.contiguous(),
        tokens,
        spread_out,
        remaining,
        num_particles,
        padded=padded_particles(num_particles),
    )
    return spread_out, remaining


@triton.jit
def _rows_of(texts, particle):
    """Return the addresses of particles' first tokens, in this program's group."""
    of_group = texts.tokens + tl.program_id(0) * tl.cast(texts.group_stride, tl.int32)
    return of_group + particle * tl.cast(texts.particle_stride, tl.int32)


@triton.jit
def _same_text(texts, lengths, may_stratify, found, padded: tl.constexpr):
    num_particles = tl.cast(texts.num_particles, tl.int32)
    group, particle, own, here = _members(num_particles, padded)
    rows = _rows_of(texts, particle)[:, None]
    length = tl.load(lengths + own, mask=here, other=0)
    key = tl.zeros([padded], dtype=tl.uint64)
    for start in range(0, tl.cast(texts.width, tl.int32), _BLOCK):
        column = start + tl.arange(0, _BLOCK)[None, :]
        inside = here[:, None] & (column <= length[:, None])
        token = tl.load(rows + column * texts.token_stride, mask=inside, other=0)
        term = _mix(token.to(tl.uint64) ^ _mix(column.to(tl.uint64)))
        key += tl.sum(tl.where(inside, term, 0), 1)
    shares = tl.load(may_stratify + own, mask=here, other=0) != 0
    same = (key[:, None] == key[None, :]) & shares[:, None] & shares[None, :]
    one = particle[:, None]
    other = particle[None, :]
    pair = (group * num_particles + one) * num_particles + other
    inside_pair = (one < num_particles) & (other < num_particles)
    tl.store(found + pair, same | (one == other), mask=inside_pair)


@triton.jit(do_not_specialize=["num_particles"])
def _stratify(
    uniforms, same_text, tokens, spread_out, remaining, num_particles, padded: tl.constexpr
):
    group, particle, own, here = _members(num_particles, padded)
    one = particle[:, None]
    other = particle[None, :]
    inside = (one < num_particles) & (other < num_particles)
    pair = (group * num_particles + one) * num_particles + other
    same = tl.load(same_text + pair, mask=inside, other=0) != 0
    if tokens is not None:
        drawn = tokens + group * num_particles
        token = tl.load(drawn + one, mask=one < num_particles, other=0)
        same = same & (token == tl.load(drawn + other, mask=other < num_particles, other=0))
        tl.store(remaining + pair, same, mask=inside)

    eldest = tl.min(tl.where(same, other, padded), 1)
    rank = tl.sum((same & (other < one)).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    shared = tl.load(uniforms + group * num_particles + eldest, mask=here, other=0.0)
    shifted = shared + rank.to(tl.float64) / count.to(tl.float64)
    tl.store(spread_out + own, shifted - tl.floor(shifted), mask=here)


@triton.jit
def _log_sum(log_weights):
    """Return the weights relative to the highest, and the log of their sum."""
    highest = tl.max(log_weights, 0)
    relative = tl.exp(log_weights - tl.where(highest == -float("inf"), 0.0, highest))
    return relative, tl.log(tl.sum(relative, 0)) + highest


@triton.jit
def _begins_alike(texts, length, count, particle, drawn, here):
    """Return which particles share the drawn one's prefix, see `smc.prefixes._begins_alike`."""
    reach = tl.minimum(length, count)
    drawn_reach = tl.sum(tl.where(particle == drawn, reach, 0), 0)
    differ = tl.zeros_like(particle)
    width = tl.cast(texts.width, tl.int32)
    for start in range(0, drawn_reach + 1, _BLOCK):
        column = start + tl.arange(0, _BLOCK)
        inside = (column <= drawn_reach) & (column < width)
        along = column * texts.token_stride
        its = tl.load(_rows_of(texts, drawn) + along, mask=inside, other=0)
        rows = _rows_of(texts, particle)[:, None] + along[None, :]
        asked = here[:, None] & inside[None, :]
        token = tl.load(rows, mask=asked, other=0)
        differ += tl.sum((asked & (token != its[None, :])).to(tl.int32), 1)
    return ((differ == 0) & (reach == drawn_reach)) | (count == 0)


@triton.jit
def _splits(weight, stays, leaves, num_free, particle, padded: tl.constexpr):
    """Return the ancestor in each place, see `smc.prefixes._splits`, and each copy's log-weight."""
    place = tl.cumsum(leaves.to(tl.int32), 0) - 1  # among the free ones
    ordered = tl.where(stays, _without_rounding(weight), -float("inf"))
    ancestor = particle
    parts = stays.to(tl.int32)
    log_parts = tl.zeros_like(weight)
    for free in range(0, num_free):
        best = _first_heaviest(ordered - log_parts, particle, padded)
        ancestor = tl.where(leaves & (place == free), best, ancestor)
        parts += (particle == best).to(tl.int32)
        log_parts = tl.log(tl.where(stays, parts, 1).to(tl.float64))
    return ancestor, weight - log_parts


@triton.jit
def _without_rounding(weight):
    """Return the log-weights on multiples of `smc.prefixes.TIE`."""
    return tl.floor(weight / _TIE + 0.5) * _TIE


@triton.jit
def _first_heaviest(weight, particle, padded: tl.constexpr):
    return tl.min(tl.where(weight == tl.max(weight, 0), particle, padded), 0)
