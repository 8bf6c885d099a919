"""Measure the bytes of a running server's pools and tensors."""

from typing import Any

import torch

from sglang_smc.upstream import kv_layers


def slot_bytes(pool: Any) -> int:
    """Return the bytes of a slot in all layers: keys and values, which share storage in MLA."""
    layers = kv_layers(pool)
    key, value = pool.get_key_buffer(layers[0]), pool.get_value_buffer(layers[0])
    parts = 1 if value.data_ptr() == key.data_ptr() else 2
    return parts * len(layers) * tensor_bytes(key[0])


def tensor_bytes(part: Any) -> int:
    """Return the bytes of all tensors in a tensor, a sequence, a mapping or an object."""
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, tuple | list):
        return sum(map(tensor_bytes, part))
    if isinstance(part, dict):
        return sum(map(tensor_bytes, part.values()))
    return tensor_bytes(vars(part)) if hasattr(part, "__dict__") else 0
