"""Load checkpoints in 8 bits on the plain-CPU platform: weights are dequantized as they are read.

SGLang's layers in 8 bits call kernels of accelerators, or of a build for AMX. So a model gets the
layers of a checkpoint in 16 bits, and each weight is multiplied by its scales before they see it:
whole, so that no class, fused projection or split over ranks has to know. What follows, from hidden
states to verification, computes with these weights. Activations stay as they are, so logits are not
those of a GPU, which rounds them to 8 bits too.

`patches/cpu/platform.py` calls this where SGLang chooses layers and reads files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import torch

from sglang_smc.drafts.checkpoint import SCALES

logger = logging.getLogger(__name__)

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]

#: SGLang's names of what is dequantized here.
COMPRESSED = "compressed-tensors"
METHODS = ("fp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8", COMPRESSED, "modelopt_fp8")
#: Of compressed-tensors, where neither weights are packed nor scales are of groups.
FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "block")

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
#: Tensors that products of 8-bit activations, or KV in 8 bits, take: there are none here.
UNUSED = (
    *("input_scale", "input_zero_point", "output_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale"),
)


class ScaleBlock(NamedTuple):
    """Rows and columns of a weight that share a scale."""

    rows: int
    columns: int


def check(method: str, config: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless a checkpoint's weights can be dequantized.

    Args:
        method: SGLang's name of the quantization.
        config: what the checkpoint says of it, as ``quantization_config``; None if nothing.
    """
    if method not in METHODS:
        raise _refusal(f"quantization is {method!r}", ", ".join(METHODS))
    if config is None:
        raise ValueError(
            f"--quantization is {method!r}, and the checkpoint is not quantized. To quantize "
            "weights as they are loaded takes an accelerator. Leave the flag out, or pass "
            "--speculative-draft-model-quantization unquant if the draft's are meant."
        )
    groups = _groups(config)
    stored = config.get("format")
    if groups and stored not in (None, *FORMATS):
        raise _refusal(f"compressed-tensors' format is {stored!r}", ", ".join(FORMATS))
    for group in groups:
        if group.get("num_bits") != 8 or not group.get("symmetric", True):
            raise _refusal(f"compressed-tensors' weights are {group}", "8 bits, symmetric")
        if group.get("strategy") not in STRATEGIES:
            raise _refusal(f"their strategy is {group.get('strategy')!r}", ", ".join(STRATEGIES))
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refusal(f"the checkpoint is sparse, {sparsity!r}", "dense")
    if config.get("transform_config"):
        raise _refusal("the checkpoint has a transform_config", "none")


def _refusal(found: str, allowed: str) -> ValueError:
    return ValueError(
        f"The smc_cpu platform dequantizes weights in 8 bits, and {found}; allowed: {allowed}. "
        "Take another checkpoint of the model, or an accelerator."
    )


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what compressed-tensors says of the weights of each group of layers."""
    if config.get("quant_method") != COMPRESSED:
        return []
    return [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]


def block_of(config: Mapping[str, Any]) -> ScaleBlock | None:
    """Return the block of weights that are scaled by blocks, which is one; None without any."""
    sizes = [config.get("weight_block_size")]
    sizes += [group.get("block_structure") for group in _groups(config)]
    return next((ScaleBlock(*size) for size in sizes if size), None)


def announce(path: str, method: str, dtype: torch.dtype) -> None:
    """Log what becomes of a model's weights."""
    logger.info(
        "Weights of %s (%s) are dequantized to %s as they are loaded, and take its memory: the "
        "smc_cpu platform has no products in 8 bits.",
        path,
        method,
        dtype,
    )


def dequantized(weights: Weights, block: ScaleBlock | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's weights, those in 8 bits in float32, each once its scales are read.

    A weight and its scales may be in different files. Raises ValueError, naming them, for weights
    or scales that are left alone.
    """
    small: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name.rpartition(".")[2] in UNUSED:
            continue
        if name.endswith(SCALES):
            name = name.rpartition("_scale")[0]
            scales[name] = tensor
        elif tensor.dtype in EIGHT_BITS:
            small[name] = tensor
        else:
            yield name, tensor
        if name in small and name in scales:
            yield name, dequantize(name, small.pop(name), scales.pop(name), block)
    if left := sorted(small | scales):
        raise ValueError(
            f"The checkpoint has {'a weight' if small else 'scales'} without its counterpart for "
            f"{left[0]}, one of {len(left)}; allowed: weights in 8 bits with a weight_scale or "
            "weight_scale_inv each. Download it anew."
        )


def dequantize(
    name: str, weight: torch.Tensor, scale: torch.Tensor, block: ScaleBlock | None = None
) -> torch.Tensor:
    """Return a weight of a checkpoint times its scales, in float32.

    Args:
        name: for errors.
        weight: ``[out, in]``, in 8 bits.
        scale: one number; one for each row, ``[out]`` or ``[out, 1]``; or one for each ``block``,
            ``[out / rows, in / columns]`` rounded up.

    Raises ValueError for scales of another shape.
    """
    scale = scale.float()
    if scale.numel() == 1:
        return weight.float() * scale.view(())
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    rows, columns = weight.shape
    each = ScaleBlock(1, columns) if scale.shape == (rows, 1) else block
    if each is None or scale.shape != (ceil(rows / each.rows), ceil(columns / each.columns)):
        raise ValueError(
            f"{name} of {[rows, columns]} has scales of {list(scale.shape)}; allowed: one, one for "
            f"each row, or one for each block of the configuration ({block and list(block)}). "
            "Download the checkpoint anew."
        )
    of_rows = scale.repeat_interleave(each.rows, 0)[:rows]
    return weight.float() * of_rows.repeat_interleave(each.columns, 1)[:, :columns]
