"""Prepare tensors for kernels; rows of a vocabulary that are not contiguous raise ValueError."""

from collections.abc import Iterable

import torch
import triton


def contiguous(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Yield each tensor, copied where it is not contiguous."""
    return (tensor.contiguous() for tensor in tensors)


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
