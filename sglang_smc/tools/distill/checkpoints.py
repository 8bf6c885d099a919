"""Read and write heads as folders with SGLang's configuration keys and weight names.

EAGLE-3 heads use those of `LlamaForCausalLMEagle3`, DFlash heads those of `DFlashDraftModel`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import nn

from sglang_smc.tools.distill.head_config import (
    DFLASH,
    EAGLE3,
    LAYER_IDS,
    check_hot,
    check_width,
    checked_layers,
    rotary_of,
    settings_of,
    shape_of,
    shared_settings,
    sizes,
    target_config,
)
from sglang_smc.tools.distill.heads import DFlash, Eagle3

Head = TypeVar("Head", Eagle3, DFlash)
WEIGHTS = "model.safetensors"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def new_eagle3(
    target: str | Path,
    folder: str | Path,
    *,
    layer_ids: Sequence[int] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    hot_tokens: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    scale: float = 1.0,
) -> Path:
    """Write an untrained EAGLE-3 head for a Llama-like target into ``folder``; return the folder.

    Args:
        target: the target's folder. Sizes that are None default to the target's.
        folder: created if it is missing.
        layer_ids: of the target's layers that the head reads, ascending, 0 to its number
            of layers - 2; None for an early, the middle and a late one.
        num_heads, num_kv_heads, head_dim, intermediate_size: of the head's layer.
        hot_tokens: the target's ids of the tokens that the head can draft, ascending; None for all.
        dtype: of the weights.
        seed: of the weights.
        scale: of the weights: 1 keeps activations' size; more gives peaked distributions.

    Raises:
        ValueError: the folder has no configuration, or sizes are inconsistent.
    """
    config = target_config(target)
    if hot_tokens is not None:
        check_hot(hot_tokens, config.vocab_size)
    ids = checked_layers(layer_ids, config.num_hidden_layers)
    own_sizes = sizes(config, 1, num_heads, num_kv_heads, head_dim, intermediate_size)
    own = {
        "architectures": [EAGLE3],
        "model_type": "llama",
        "draft_vocab_size": config.vocab_size if hot_tokens is None else len(hot_tokens),
        "eagle_config": {LAYER_IDS: list(ids)},
    }
    settings = {**shared_settings(config), **own_sizes, **own}
    hot = None if hot_tokens is None else torch.tensor(list(hot_tokens))
    head = Eagle3(shape_of(settings, ids), rotary_of(settings, folder), hot)
    return _written(head, settings, folder, dtype, seed, scale)


def new_dflash(
    target: str | Path,
    folder: str | Path,
    *,
    layer_ids: Sequence[int] | None = None,
    num_layers: int = 1,
    block_size: int = 9,
    mask_token_id: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    scale: float = 1.0,
) -> Path:
    """Write an untrained DFlash head for a Llama-like target into ``folder``; return the folder.

    Args:
        target, folder, layer_ids, dtype, seed, scale: as in `new_eagle3`.
        num_layers: of the head.
        block_size: the last kept token and the drafted tokens behind it, 2 or more.
        mask_token_id: the input where a token is drafted; no text contains it; None for the
            target's padding token.
        num_heads, num_kv_heads, head_dim, intermediate_size: of the head's layers; None: as the
            target's.

    Raises:
        ValueError: the folder has no configuration, or sizes are inconsistent.
    """
    config = target_config(target)
    ids = checked_layers(layer_ids, config.num_hidden_layers)
    if block_size < 2:
        raise ValueError(f"block_size is {block_size}; allowed: 2 or more, one of them kept.")
    mask = config.pad_token_id if mask_token_id is None else mask_token_id
    if mask is None or not 0 <= mask < config.vocab_size:
        raise ValueError(
            f"mask_token_id is {mask}; allowed: 0 to {config.vocab_size - 1}. Give the id of a "
            "token that no text has; the target's configuration names no padding token."
        )
    own_sizes = sizes(config, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size)
    own = {
        "architectures": [DFLASH],
        "model_type": "qwen3",
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * num_layers,
        "block_size": block_size,
        "num_target_layers": config.num_hidden_layers,
        "dflash_config": {"target_layer_ids": list(ids), "mask_token_id": mask},
    }
    settings = {**shared_settings(config), **own_sizes, **own}
    head = DFlash(shape_of(settings, ids), rotary_of(settings, folder), mask, block_size)
    return _written(head, settings, folder, dtype, seed, scale)


def load_eagle3(folder: str | Path, target: str | Path) -> Eagle3:
    """Return an EAGLE-3 head in float32; raise ValueError unless it is one and fits this target."""
    settings = settings_of(folder, EAGLE3)
    config = target_config(target)
    check_width(folder, settings, config)
    default = [1, config.num_hidden_layers // 2 - 1, config.num_hidden_layers - 4]
    ids = (settings.get("eagle_config") or {}).get(LAYER_IDS) or default
    shape = shape_of(settings, checked_layers(ids, config.num_hidden_layers))
    tensors = _tensors(folder)
    shifts = tensors.get("d2t")  # [draft vocabulary]: the target's id less the head's own
    hot = None if shifts is None else shifts.long() + torch.arange(len(shifts))
    return _filled(Eagle3(shape, rotary_of(settings, folder), hot), tensors, folder)


def load_dflash(folder: str | Path, target: str | Path) -> DFlash:
    """Return a DFlash head in float32; raise ValueError unless it is one and fits this target."""
    settings = settings_of(folder, DFLASH)
    config = target_config(target)
    check_width(folder, settings, config)
    nested = settings.get("dflash_config") or {}
    both = {**settings, **nested}
    for name in ("target_layer_ids", "mask_token_id", "block_size"):
        if both.get(name) is None:
            raise ValueError(f"{folder}: config.json has no {name}, which training has to know.")
    ids = checked_layers(both["target_layer_ids"], config.num_hidden_layers)
    shape = shape_of(settings, ids)
    head = DFlash(shape, rotary_of(settings, folder), both["mask_token_id"], both["block_size"])
    return _filled(head, _tensors(folder), folder)


def save_head(
    head: Eagle3 | DFlash, settings: Mapping[str, Any], folder: str | Path, dtype: torch.dtype
) -> None:
    """Write ``head`` with the configuration ``settings``; the head itself keeps its dtype."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: w.detach().to("cpu", dtype).contiguous() for name, w in head.named_parameters()
    }
    if isinstance(head, Eagle3) and len(head.hot) < head.shape.vocab_size:
        hot = head.hot.cpu()
        drafted = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
        drafted[hot] = True
        tensors |= {"d2t": hot - torch.arange(len(hot)), "t2d": drafted}
    # `save_file` creates a file that only its owner can read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps({**settings, "dtype": _DTYPES[dtype]}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")


def _written(
    head: Eagle3 | DFlash,
    settings: dict[str, Any],
    folder: str | Path,
    dtype: torch.dtype,
    seed: int,
    scale: float,
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5, generator=generator)
    save_head(head, settings, folder, dtype)
    return Path(folder)


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors; convert its weights to that format.")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    return found


def _filled(head: Head, tensors: Mapping[str, torch.Tensor], folder: str | Path) -> Head:
    """Return ``head`` with a checkpoint's weights; others, such as an embedding, are ignored."""
    plain = {name.removeprefix("model."): weight for name, weight in tensors.items()}
    if isinstance(head, Eagle3):
        plain = {name.replace("layers.0.", "midlayer."): w for name, w in plain.items()}
    for name, weight in head.named_parameters():
        found = plain.get(name)
        if found is None or found.shape != weight.shape:
            had = "is missing" if found is None else f"has the shape {list(found.shape)}"
            raise ValueError(f"{folder}: {name} {had}; wanted: {list(weight.shape)}.")
        weight.data.copy_(found)
    return head
