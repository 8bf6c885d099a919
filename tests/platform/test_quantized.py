"""What the CPU platform makes of weights in 8 bits, and which it refuses, without a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import KINDS, SIDE, quantized, stood_for
from safetensors.torch import load_file
from tiny_models import make_tiny_model

from sglang_smc.cpu.quantized import ScaleBlock, block_of, check, dequantized

WIDE = {"hidden": 160, "layers": 1}  # no multiple of a block
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_tiny_model(tmp_path_factory.mktemp("models") / "model", **WIDE))


def weights_in(folder: str) -> Tensors:
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backwards", [False, True])
def test_weights_are_those_that_8_bits_stand_for(
    model: Path, kind: str, backwards: bool, tmp_path: Path
) -> None:
    """In any order of tensors; red where a last block is not cut, or a scale is handed on."""
    config = KINDS[kind].config
    check("modelopt_fp8" if KINDS[kind].is_modelopt else config["quant_method"], config)
    given = list(weights_in(quantized(model, tmp_path / "small", kind)).items())
    found = dict(dequantized(reversed(given) if backwards else given, block_of(config)))
    expected = weights_in(stood_for(model, tmp_path / "plain", kind))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name].float(), weight), name


def without(tensors: Tensors, end: str) -> Tensors:
    return {name: one for name, one in tensors.items() if not name.endswith(end)}


def of_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2)}


def in_4_bits(tensors: Tensors) -> Tensors:
    packed = torch.zeros(4, 8, dtype=torch.uint8)
    return tensors | {"lm_head.weight": packed, "lm_head.weight_scale": torch.ones(4, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: without(found, "q_proj.weight_scale_inv"), "a weight without .*q_proj.weig"),
        (lambda found: without(found, "q_proj.weight"), "scales without .*q_proj.weight, one of 1"),
        (of_another_shape, r"up_proj.weight of \[320, 160\] has scales of \[2, 2\]"),
        (in_4_bits, "scales without .*lm_head.weight"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    model: Path, change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    """Red where a weight keeps its 8-bit numbers, or is dropped."""
    given = weights_in(quantized(model, tmp_path / "small", "fp8 blocks"))
    with pytest.raises(ValueError, match=message):
        list(dequantized(change(given).items(), ScaleBlock(SIDE, SIDE)))


SPARSE = {"sparsity_config": {"format": "sparse-24-bitmask"}}


def compressed(**weights: Any) -> dict[str, Any]:
    each = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": each}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("awq", {"quant_method": "awq"}, "quantization is 'awq'; allowed: fp8"),
        ("mxfp4", {"quant_method": "mxfp4"}, "quantization is 'mxfp4'"),
        ("modelopt_fp4", {"quant_algo": "NVFP4"}, "quantization is 'modelopt_fp4'"),
        ("fp8", None, "the checkpoint is not quantized.*draft-model-quantization unquant"),
        ("compressed-tensors", compressed(num_bits=4), "8 bits, symmetric"),
        ("compressed-tensors", compressed(symmetric=False), "8 bits, symmetric"),
        ("compressed-tensors", compressed(strategy="group"), "strategy is 'group'"),
        ("compressed-tensors", compressed() | {"format": "pack-quantized"}, "'pack-quantized'"),
        ("w8a8_int8", compressed() | {"format": "pack-quantized"}, "'pack-quantized'"),
        ("compressed-tensors", compressed() | {"transform_config": {"R1": {}}}, "transform_config"),
        ("compressed-tensors", compressed() | SPARSE, "sparse, 'sparse-24-bitmask'"),
    ],
)
def test_what_is_not_dequantized_is_refused_by_name(
    method: str, config: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(method, config)
