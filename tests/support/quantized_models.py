"""Checkpoints in 8 bits, in published formats, and what their weights stand for."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TENSOR = "tensor"
CHANNEL = "channel"
BLOCK = "block"
FP8 = torch.float8_e4m3fn
INT8 = torch.int8
LIMITS = {FP8: 448.0, INT8: 127.0}
SIDE = 128  # of a block


def _compressed(of: str, stored: str, strategy: str) -> dict[str, Any]:
    each = {"num_bits": 8, "type": of, "symmetric": True}
    weights = {**each, "strategy": strategy, "dynamic": False}
    rows = {**each, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
    }


class Kind(NamedTuple):
    """How checkpoints of a format say what they are, and what they hold for a projection."""

    config: dict[str, Any]
    dtype: torch.dtype
    strategy: str
    scale: str = "weight_scale"
    beside: tuple[str, ...] = ()  # scales that only products and KV in 8 bits take
    is_modelopt: bool = False  # its configuration is a file of its own


_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
_BLOCKS = {"activation_scheme": "dynamic", "weight_block_size": [SIDE, SIDE]}
_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
KINDS = {
    "fp8": Kind(_STATIC, FP8, TENSOR, beside=("input_scale",)),
    "fp8 blocks": Kind({"quant_method": "fp8", **_BLOCKS}, FP8, BLOCK, "weight_scale_inv"),
    "int8": Kind({"quant_method": "w8a8_int8"}, INT8, CHANNEL),
    "int8 blocks": Kind(
        {"quant_method": "blockwise_int8", **_BLOCKS}, INT8, BLOCK, "weight_scale_inv"
    ),
    "compressed fp8": Kind(_compressed("float", "float-quantized", CHANNEL), FP8, CHANNEL),
    "compressed int8": Kind(_compressed("int", "int-quantized", CHANNEL), INT8, CHANNEL),
    "modelopt": Kind(
        {"producer": {"name": "modelopt"}, "quantization": _MODELOPT},
        FP8,
        TENSOR,
        beside=("input_scale", "k_scale", "v_scale"),
        is_modelopt=True,
    ),
}


def quantized(model: Path, path: Path, kind: str) -> str:
    """Write a checkpoint of a model whose projections are in 8 bits."""
    of = KINDS[kind]
    shutil.copytree(model, path)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / WEIGHTS).items():
        if not _is_projection(name):
            tensors[name] = weight
            continue
        base = name.removesuffix("weight")
        tensors[name], tensors[base + of.scale] = _rounded(weight, of)
        for other in of.beside:
            tensors[base + other] = torch.tensor(0.25)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    if of.is_modelopt:
        (path / "hf_quant_config.json").write_text(json.dumps(of.config))
        return str(path)
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | {"quantization_config": of.config}))
    return str(path)


def stood_for(model: Path, path: Path, kind: str) -> str:
    """Write the checkpoint of float32 weights that `quantized` stands for."""
    shutil.copytree(model, path)
    weights = load_file(model / WEIGHTS)
    for name in filter(_is_projection, weights):
        small, scale = _rounded(weights[name], KINDS[kind])
        weights[name] = small.float() * _of_each(scale, KINDS[kind].strategy, *small.shape)
    weights = {name: weight.float() for name, weight in weights.items()}
    save_file(weights, path / WEIGHTS, {"format": "pt"})
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | {"dtype": "float32"}))
    return str(path)


def _is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def _rounded(weight: torch.Tensor, of: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[out, in]`` in 8 bits, and the largest of each part over the format's limit."""
    weight = weight.float()
    rows, columns = weight.shape
    high, wide = {TENSOR: (rows, columns), CHANNEL: (1, columns), BLOCK: (SIDE, SIDE)}[of.strategy]
    parts = [each.abs().amax() for row in weight.split(high) for each in row.split(wide, 1)]
    scale = torch.stack(parts).view(-(-rows // high), -1) / LIMITS[of.dtype]
    small = weight / _of_each(scale, of.strategy, rows, columns)
    small = small.to(FP8) if of.dtype == FP8 else small.round().to(INT8)
    return small, scale.view(()) if of.strategy == TENSOR else scale


def _of_each(scale: torch.Tensor, strategy: str, rows: int, columns: int) -> torch.Tensor:
    """The scale of each weight, ``[out, in]``."""
    if strategy != BLOCK:
        return scale.expand(rows, columns)
    return torch.kron(scale, torch.ones(SIDE, SIDE))[:rows, :columns]
