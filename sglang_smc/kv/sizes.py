"""Measure the bytes of a running server's models, pools and tensors."""

from typing import Any

import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc.kv.report import Sizes
from sglang_smc.upstream import kv_layers


def sizes_of(
    target: ModelRunner,
    draft: ModelRunner | None,
    *,
    num_slots: int,
    most_running: int,
    beside: dict[str, int],
) -> Sizes:
    """Return the sizes of a server on this rank; see `Sizes`."""
    of_target = slot_bytes(target.token_to_kv_pool)
    of_draft = 0 if draft is None else slot_bytes(draft.token_to_kv_pool)
    weights = () if draft is None else draft.model.parameters()
    return Sizes(
        num_slots=num_slots,
        slot_bytes=of_target + of_draft,
        target_slot_bytes=of_target,
        draft_weight_bytes=sum(map(_num_bytes, weights)),
        most_running=most_running,
        context_length=target.model_config.context_len,
        beside=beside,
    )


def slot_bytes(pool: Any) -> int:
    """Return the bytes of a slot in all layers: keys and values, which share storage in MLA."""
    layers = kv_layers(pool)
    key, value = pool.get_key_buffer(layers[0]), pool.get_value_buffer(layers[0])
    parts = 1 if value.data_ptr() == key.data_ptr() else 2
    return parts * len(layers) * _num_bytes(key[0])


def tensor_bytes(part: Any) -> int:
    """Return the bytes of all tensors in a tensor, a sequence, a mapping or an object."""
    if isinstance(part, torch.Tensor):
        return _num_bytes(part)
    if isinstance(part, tuple | list):
        return sum(map(tensor_bytes, part))
    if isinstance(part, dict):
        return sum(map(tensor_bytes, part.values()))
    return tensor_bytes(vars(part)) if hasattr(part, "__dict__") else 0


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
