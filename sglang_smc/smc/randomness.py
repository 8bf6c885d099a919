"""Counter-based uniforms: a pure function of who draws what, where.

Each random number belongs to (seed, round, position, particle, purpose), so a request
draws the same numbers alone or in any batch, on every tensor-parallel rank, on
CPU and GPU, and no generator state has to be kept or restored. The hash is the
finaliser of SplitMix64 (Steele, Lea and Flood 2014), applied once per key.
"""

from enum import IntEnum

import torch

_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)  # the odd constants as signed 64-bit numbers
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_MANTISSA_BITS = 53


class Purpose(IntEnum):
    """What a uniform decides. Two purposes never share a number."""

    DRAFT = 1
    BONUS = 2
    RESAMPLE = 3
    SELECT = 4
    ACCEPT = 5
    KEEP = 6
    RESIZE = 7
    WATCH = 8


def uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, particles: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """Independent uniforms on [0, 1), float64, one per broadcast (seed, position, particle).

    Args:
        seeds, positions, particles: int64 tensors that broadcast against each other;
            a position is the index of the output token that the number decides.
        purpose: which decision the number is for.
    """
    state = mix(seeds ^ _signed(int(purpose) * _INCREMENT))
    state = mix(state ^ (positions * _INCREMENT))
    state = mix(state ^ (particles * _INCREMENT))
    return _shift_right(state, 64 - _MANTISSA_BITS).double() * 2.0**-_MANTISSA_BITS


def particle_uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """Uniforms of N particles of each request, of the shape of ``positions``.

    Args:
        seeds: ``[G]`` int64.
        positions: ``[G, N]`` or ``[G, N, C]`` int64.
        purpose: which decision the numbers are for.
    """
    columns = (1,) * (positions.dim() - 2)
    particle = torch.arange(positions.shape[1], device=positions.device).view(-1, *columns)
    return uniforms(seeds.view(-1, 1, *columns), positions, particle, purpose)


def round_seeds(seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Seeds of a round ``[G]``, from a request's seed and the output position it starts at.

    A round may drop columns that it has looked at. The next one drafts those positions again,
    and must not meet the numbers that decided where this one stopped.
    """
    return mix(mix(seeds) ^ (starts * _INCREMENT))


def mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around as unsigned ones do."""
    state = state + _INCREMENT
    state = (state ^ _shift_right(state, 30)) * _MULTIPLIER_1
    state = (state ^ _shift_right(state, 27)) * _MULTIPLIER_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own keeps the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def derive_seed(seed: int, *keys: int) -> int:
    """A seed in ``[0, 2^63)`` for each (seed, keys), on the host."""
    state = torch.tensor(_signed(seed))
    for key in keys:
        state = mix(state ^ (torch.tensor(_signed(key)) * _INCREMENT))
    return int(_shift_right(mix(state), 1))


def _signed(number: int) -> int:
    """The low 64 bits of any integer, as torch stores them."""
    low = number & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
