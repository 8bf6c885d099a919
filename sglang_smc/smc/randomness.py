"""Generate counter-based uniforms, and stratify the draws of equal particles.

Each random number belongs to (seed, round, position, particle, purpose), so a request draws the
same numbers alone or in any batch, on every tensor-parallel rank, on CPU and GPU, and no generator
state has to be kept or restored. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood
2014), applied once per key.

*Siblings* are particles with equal whole sequences. They share one uniform for their next token,
shifted by ``rank / count`` modulo 1, so that together they cover its distribution evenly, and each
still draws from exactly that distribution (docs/algorithm.md, "Less variance at no cost").
(Systematic resampling does the same to ancestors; Chopin and Papaspiliopoulos 2020, section 9.7.)
"""

from collections.abc import Callable
from enum import IntEnum

import torch

_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)  # the odd constants as signed 64-bit numbers
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_MANTISSA_BITS = 53


class Purpose(IntEnum):
    """Decision that a uniform is drawn for. Two purposes never share a number."""

    DRAFT = 1
    BONUS = 2
    RESAMPLE = 3
    SELECT = 4
    ACCEPT = 5
    KEEP = 6
    RESIZE = 7
    WATCH = 8


def mix(state: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finaliser to int64; products wrap around as unsigned ones do."""
    state = state + _INCREMENT
    state = (state ^ _shift_right(state, 30)) * _MULTIPLIER_1
    state = (state ^ _shift_right(state, 27)) * _MULTIPLIER_2
    return state ^ _shift_right(state, 31)


Mix = Callable[[torch.Tensor], torch.Tensor]  # `mix`, or another implementation of it


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign bit, which a shift of signed numbers keeps."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    particles: torch.Tensor,
    purpose: Purpose,
    mix: Mix = mix,
) -> torch.Tensor:
    """Return independent uniforms on [0, 1), float64, one per broadcast (seed, position, particle).

    Args:
        seeds, positions, particles: int64 tensors that broadcast against each other;
            a position is the index of the output token that the number decides.
    """
    state = mix(seeds ^ _signed(int(purpose) * _INCREMENT))
    for key in (positions, particles):
        state = mix(state ^ (key * _INCREMENT))
    return _shift_right(state, 64 - _MANTISSA_BITS).double() * 2.0**-_MANTISSA_BITS


def particle_uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose, mix: Mix = mix
) -> torch.Tensor:
    """Return uniforms for N particles of each request, in the shape of ``positions``.

    Args:
        seeds: ``[G]`` int64.
        positions: ``[G, N]`` or ``[G, N, C]`` int64.
    """
    columns = (1,) * (positions.dim() - 2)
    particle = torch.arange(positions.shape[1], device=positions.device).view(-1, *columns)
    return uniforms(seeds.view(-1, 1, *columns), positions, particle, purpose, mix)


def round_seeds(seeds: torch.Tensor, starts: torch.Tensor, mix: Mix = mix) -> torch.Tensor:
    """Return the seeds of a round ``[G]``, from a request's seed and the round's output position.

    A round may drop columns that it has scored. The next round drafts those positions again, and
    must not reuse the numbers that decided where this one stopped.
    """
    return mix(mix(seeds) ^ (starts * _INCREMENT))


def derive_seed(seed: int, *keys: int) -> int:
    """Return a seed in ``[0, 2^63)`` for each (seed, keys), on the host."""
    state = torch.tensor(_signed(seed))
    for key in keys:
        state = mix(state ^ (torch.tensor(_signed(key)) * _INCREMENT))
    return int(_shift_right(mix(state), 1))


def _signed(number: int) -> int:
    """Return the low 64 bits of any integer as a signed number, as torch stores them."""
    low = number & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def same_text(
    texts: torch.Tensor, lengths: torch.Tensor, may_stratify: torch.Tensor, mix: Mix = mix
) -> torch.Tensor:
    """Return the siblings among a group's particles, an equivalence ``[G, N, N]`` bool.

    Sequences are compared by 64-bit hashes. After a collision the two particles' draws would
    depend on each other, and each would still have its distribution.

    Args:
        texts: ``[G, N, J]`` the token before each tail, and the tail; the rest is common to all.
        lengths: ``[G, N]`` of the tails.
        may_stratify: ``[G, N]`` bool; the others are siblings of themselves only.
    """
    itself = torch.eye(texts.shape[1], dtype=torch.bool, device=texts.device)
    if len(itself) == 1:
        return itself.expand(len(texts), 1, 1)
    column = torch.arange(texts.shape[2], device=texts.device)
    terms = mix(texts ^ mix(column))
    keys = torch.where(column <= lengths.unsqueeze(2), terms, 0).sum(2)  # [G, N]
    same = keys.unsqueeze(2) == keys.unsqueeze(1)
    return itself | (same & may_stratify.unsqueeze(2) & may_stratify.unsqueeze(1))


def stratified(uniforms: torch.Tensor, same_text: torch.Tensor) -> torch.Tensor:
    """Spread the uniforms of siblings evenly: ``[G, N]`` float64 to ``[G, N]``.

    Args:
        same_text: ``[G, N, N]`` bool, an equivalence; alone, a particle keeps its own uniform.
    """
    first = same_text.long().argmax(2)  # [G, N]: the sibling of the lowest index
    rank = same_text.tril(-1).sum(2)
    shifted = uniforms.gather(1, first) + rank / same_text.sum(2).double()
    return shifted - shifted.floor()


def stratify(
    uniforms: torch.Tensor, same_text: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep as siblings those with equal tokens, then spread the uniforms of siblings evenly.

    Args:
        uniforms: ``[G, N]`` float64.
        same_text: ``[G, N, N]`` bool, an equivalence.
        tokens: ``[G, N]`` int64, one more token each; None leaves the siblings as they are.

    Returns:
        Uniforms ``[G, N]`` and the siblings that remain ``[G, N, N]``.
    """
    if uniforms.shape[1] == 1:
        return uniforms, same_text
    if tokens is not None:
        same_text = same_text & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
    return stratified(uniforms, same_text), same_text
