"""List the tensors of a running server's KV pools, and measure bytes."""

from collections.abc import Iterator
from typing import Any

import torch

from sglang_smc.upstream import kv_layers


def kv_buffers(pool: Any) -> Iterator[torch.Tensor]:
    """Yield keys and values ``[slots, ...]`` of each layer; in MLA they share one tensor."""
    for layer in kv_layers(pool):
        key = pool.get_key_buffer(layer)
        value = pool.get_value_buffer(layer)
        yield key
        if value.data_ptr() != key.data_ptr():
            yield value


def slot_bytes(pool: Any) -> int:
    """Return the bytes of a slot in all layers."""
    return sum(tensor_bytes(buffer[0]) for buffer in kv_buffers(pool))


def tensor_bytes(part: Any) -> int:
    """Return the bytes of all tensors in a tensor, a sequence, a mapping or an object."""
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, tuple | list):
        return sum(map(tensor_bytes, part))
    if isinstance(part, dict):
        return sum(map(tensor_bytes, part.values()))
    return tensor_bytes(vars(part)) if hasattr(part, "__dict__") else 0
