"""Check all kernels on their device against their torch references.

Compilers, drivers and GPUs differ, and tests of kernels cover only some of them. So a server runs
each operation on small inputs when it starts, by the kernel and by the reference, on one device.
"""

import logging
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from sglang_smc.ops import TORCH
from sglang_smc.ops.check_cases import CHECKS, CheckSizes, Inputs
from sglang_smc.smc.ops import Ops

logger = logging.getLogger(__name__)

FLAG = "--speculative-smc-kernels"
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest allowed difference by dtype: absolute for values up to 1, relative beyond.

Tokens, indices and flags must be equal."""


class Found(NamedTuple):
    """Result of one check."""

    name: str  # of `CHECKS`
    deviation: float  # the largest, in the terms of `TOLERANCES`; inf where it is undefined
    problem: str = ""  # why the kernel cannot be used
    is_fatal: bool = False  # the device no longer works


def findings(ops: Ops, device: str, sizes: CheckSizes) -> Iterator[Found]:
    """Run every check with the kernels and with their references, and yield the results."""
    for name in CHECKS:
        yield _examined(name, ops, device, sizes)


def settle(ops: Ops, kernels: str, device: str, sizes: CheckSizes, group: Any) -> Ops:
    """Return the kernels that equal their references, and the references of the others.

    Every rank of ``group`` must call it; all ranks return the same operations.

    Args:
        kernels: the value of `--speculative-smc-kernels`.
        group: SGLang's group of the ranks that share the models.

    Raises ValueError if a kernel fails with ``kernels`` "triton", or stops the device.
    """
    start = time.perf_counter()
    mine = [found for found in findings(ops, device, sizes) if found.problem]
    failed = {one.name: one for of_rank in group.all_gather_object(mine) for one in of_rank}
    problems = [f"{name}: {one.problem}" for name, one in failed.items()]
    if any(one.is_fatal for one in failed.values()):
        raise ValueError(
            f"A kernel has stopped the device {device}: {'; '.join(problems)}. Pass {FLAG} torch."
        )
    if failed and kernels == "triton":
        raise ValueError(
            f"{FLAG} is 'triton', and kernels fail on {device}: {'; '.join(problems)}. Pass auto, "
            "which replaces these by torch functions, or torch, which replaces all."
        )
    for problem in problems:
        logger.error(
            "SMC replaces a kernel that fails on this device by its torch function (that of a "
            "draft's layers by SGLang's), which is slower: %s. With %s torch no kernel runs, nor "
            "this check.",
            problem,
            FLAG,
        )
    seconds = time.perf_counter() - start
    logger.info("SMC checked the kernels of %d operations in %.1f s", len(CHECKS), seconds)
    fields = {CHECKS[name].field for name in failed}
    return ops._replace(**{field: getattr(TORCH, field) for field in fields})


def _examined(name: str, ops: Ops, device: str, sizes: CheckSizes) -> Found:
    results: list[list[torch.Tensor]] = []
    try:
        for each in (TORCH, ops):
            with torch.no_grad():
                results.append(tree_leaves(CHECKS[name].play(each, Inputs(device, sizes))))
            if device != "cpu":  # kernels raise their errors here
                torch.get_device_module(device).synchronize()
        expected, found = results
        deviation, problem = deviation_of(found, expected)
        return Found(name, deviation, problem)
    except Exception as error:  # of a compiler, a driver or a kernel, or out of memory
        told = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Found(name, math.inf, told, is_fatal=not _answers(device))


def _answers(device: str) -> bool:
    """Return whether a device still computes; after an illegal memory access it does not."""
    try:
        return bool(torch.ones(1, device=device).sum().item())
    except Exception:
        return False


def deviation_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[float, str]:
    """Return the largest deviation of all results, and the problem if one is too large."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            kinds = (f"{t.dtype} {list(t.shape)}" for t in (one, other))
            return math.inf, f"the kernel returns {' where torch returns '.join(kinds)}"
        if not one.is_floating_point():
            count = int((one != other).sum())
            if count:
                return math.inf, f"{count} of {one.numel()} values ({one.dtype}) differ"
            continue
        apart = _apart(one.double(), other.double())
        allowed = TOLERANCES[one.dtype]
        if apart > allowed:
            return apart, f"values ({one.dtype}) differ by {apart:.3g}, allowed: {allowed:g}"
        largest = max(largest, apart)
    return largest, ""


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, in the terms of `TOLERANCES`; inf where only one is NaN."""
    same = (one == other) | (one.isnan() & other.isnan())
    gap = (one - other).abs() / other.abs().clamp_min(1.0)
    return float(gap.nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0).max())
