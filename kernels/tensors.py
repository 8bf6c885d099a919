"""Prepare tensors for kernels; rows of a vocabulary that are not contiguous raise ValueError."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import triton

T = TypeVar("T")
LEAST_PADDED = 8  # a default server's particles
MOST_EXACT = 1 << 24  # float32 has all integers up to it


def contiguous(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Yield each tensor, copied where it is not contiguous."""
    return (tensor.contiguous() for tensor in tensors)


def as_float(number: int) -> float:
    """Return an integer for a record, up to 2^24, for which no kernel is compiled again.

    Triton specializes integers in records, by whether they are 1 or multiples of 16. Kernels
    convert it by `tl.cast`: in Triton's interpreter it is a number of Python's, without `to`.

    Raises ValueError for integers that float32, as which it is passed, may round.
    """
    if number > MOST_EXACT:
        raise ValueError(f"{number} is passed to a kernel as float32; allowed: up to {MOST_EXACT}")
    return float(number)


def padded_particles(num_particles: int) -> int:
    """Return the entries that kernels have for N particles of a group: a power of two, at least 8.

    So rounds of fewer particles compile no kernel again. A warp has 32 entries anyway.
    """
    return max(LEAST_PADDED, triton.next_power_of_2(num_particles))


def padded_columns(of_columns: Sequence[T]) -> tuple[T, ...]:
    """Return what kernels list of each column, the last one again up to a multiple of 8.

    So rounds of few lengths compile a kernel; it never reads the last ones.
    """
    return *of_columns, *of_columns[-1:] * (-len(of_columns) % 8)


def tiles(vocab_size: int, most: int) -> tuple[int, int]:
    """Return the tokens of a tile, a power of two up to ``most``, and the tiles of a row."""
    tile = min(most, triton.next_power_of_2(vocab_size))
    return tile, triton.cdiv(vocab_size, tile)


def check_contiguous(rows: torch.Tensor, name: str = "logits") -> None:
    """Raise ValueError unless tokens of rows ``[..., V]`` are contiguous; rows may be strided."""
    if rows.stride(-1) != 1:
        raise ValueError(
            f"{name} of shape {tuple(rows.shape)} have stride {rows.stride(-1)} along the "
            f"vocabulary, which must be 1: pass {name}.contiguous()"
        )
