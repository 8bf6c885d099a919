"""Generate counter-based uniforms of all particles of all groups, and seeds of rounds.

Each function is one launch.
"""

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tensors import as_float
from sglang_smc.smc.randomness import Purpose

_BLOCK = tl.constexpr(256)
_INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64's constants
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_BEYOND_MANTISSA = tl.constexpr(11)
_ULP = tl.constexpr(2.0**-53)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Return independent uniforms on [0, 1), one per position of each particle.

    Reference: `sglang_smc.smc.randomness.uniforms`, bit-identical. Here the particle is the second
    index of ``positions`` ``[G, N]`` or ``[G, N, C]``, of any strides, so that one position a group
    is ``[G, 1].expand(-1, N)``; if dense, they are those of the result.
    """
    drawn = torch.empty_like(positions, dtype=torch.float64)  # [G, N(, C)]
    cells, numbers = (t if t.dim() == 3 else t.unsqueeze(2) for t in (positions, drawn))
    _uniforms[(triton.cdiv(drawn.numel(), _BLOCK.value),)](
        seeds.contiguous(),
        cells,
        numbers,
        tuple(map(as_float, cells.stride())),
        tuple(map(as_float, numbers.stride())),
        tuple(map(as_float, cells.shape)),
        int(purpose),
    )
    return drawn


def round_seeds(seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the seeds of a round, from a request's seed and the round's first output position.

    Reference: `sglang_smc.smc.randomness.round_seeds`, same arguments, bit-identical.
    """
    derived = torch.empty_like(starts, memory_format=torch.contiguous_format)  # [G]
    _round_seeds[(triton.cdiv(len(starts), _BLOCK.value),)](
        seeds.contiguous(), starts.contiguous(), derived, len(starts)
    )
    return derived


@triton.jit
def _mix(state):
    state += _INCREMENT
    state = (state ^ (state >> 30)) * _MULTIPLIER_1
    state = (state ^ (state >> 27)) * _MULTIPLIER_2
    return state ^ (state >> 31)


@triton.jit
def _uniform(seed, position, particle, purpose):
    state = _mix(seed.to(tl.uint64) ^ (tl.cast(purpose, tl.uint64) * _INCREMENT))
    state = _mix(state ^ (position.to(tl.uint64) * _INCREMENT))
    state = _mix(state ^ (particle.to(tl.uint64) * _INCREMENT))
    return (state >> _BEYOND_MANTISSA).to(tl.float64) * _ULP


@triton.jit
def _place(strides, group, particle, column):
    of_particle = group * tl.cast(strides[0], tl.int32) + particle * tl.cast(strides[1], tl.int32)
    return of_particle + column * tl.cast(strides[2], tl.int32)


@triton.jit(do_not_specialize=["purpose"])
def _uniforms(seeds, positions, drawn, strides, drawn_strides, shape, purpose):
    num_groups = tl.cast(shape[0], tl.int32)
    num_particles = tl.cast(shape[1], tl.int32)
    num_columns = tl.cast(shape[2], tl.int32)
    place = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = place < num_groups * num_particles * num_columns
    column = place % num_columns
    particle = place // num_columns % num_particles
    group = place // (num_columns * num_particles)
    at = _place(strides, group, particle, column)
    position = tl.load(positions + at, mask=inside, other=0)
    seed = tl.load(seeds + group, mask=inside, other=0)
    to = drawn + _place(drawn_strides, group, particle, column)
    tl.store(to, _uniform(seed, position, particle, purpose), mask=inside)


@triton.jit(do_not_specialize=["num_groups"])
def _round_seeds(seeds, starts, derived, num_groups):
    group = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = group < num_groups
    start = tl.load(starts + group, mask=inside, other=0).to(tl.uint64)
    state = _mix(tl.load(seeds + group, mask=inside, other=0).to(tl.uint64))
    tl.store(derived + group, _mix(state ^ (start * _INCREMENT)).to(tl.int64), mask=inside)
