"""The check of all kernels on the device that they run on, against their torch references.

Compilers, drivers and cards differ, and tests of kernels cover some of them. So a server plays each
operation on small inputs as it starts, by the kernel and by the reference, on the same device.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_smc.ops.check_cases import CHECKS, Check
from sglang_smc.ops.check_inputs import Inputs, Sizes
from sglang_smc.ops.interface import Ops
from sglang_smc.ops.torch_ops import TORCH

logger = logging.getLogger(__name__)

FLAG = "--speculative-smc-kernels"
TOLERANCES = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""By a result's type, the largest difference: absolute for values up to 1, relative beyond.

Tokens, indices and flags must be equal."""


class Found(NamedTuple):
    """The outcome of one check."""

    name: str  # of `CHECKS`
    deviation: float  # the largest, as `TOLERANCES` has it; inf where there is no such number
    problem: str = ""  # why the kernel cannot be used
    is_fatal: bool = False  # the device has not answered since


def findings(ops: Ops, device: str, sizes: Sizes) -> Iterator[Found]:
    """Play every check by both implementations.

    Args:
        ops: the kernels.
        device: where both run.
        sizes: of the server's rounds.
    """
    for name, check in CHECKS.items():
        yield _examined(name, partial(_played, check, device, sizes), ops, device)


def settle(ops: Ops, kernels: str, device: str, sizes: Sizes, group: Any) -> Ops:
    """Return the kernels that agree with their references, and the references of the others.

    Every rank of ``group`` must call it: all take the same, and none decides alone.

    Args:
        ops: the kernels.
        kernels: the value of `--speculative-smc-kernels`.
        device: where they run.
        sizes: of the server's rounds.
        group: SGLang's group of the ranks that share the models.

    Raises:
        ValueError: a kernel fails where kernels are asked for by name, or stops the device.
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
            "SMC replaces a kernel that fails on this device by its torch function, which is "
            "slower: %s. With %s torch no kernel runs, nor this check.",
            *(problem, FLAG),
        )
    seconds = time.perf_counter() - start
    logger.info("SMC checked the kernels of %d operations in %.1f s", len(CHECKS), seconds)
    fields = (field for name in failed for field in CHECKS[name].fields)
    return ops._replace(**{field: getattr(TORCH, field) for field in fields})


def _examined(
    name: str, played: Callable[[Ops], list[torch.Tensor]], ops: Ops, device: str
) -> Found:
    try:
        expected = played(TORCH)
        return Found(name, *deviation_of(played(ops), expected))
    except Exception as error:  # a compiler's, a driver's or a kernel's, or no memory
        told = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Found(name, math.inf, told, is_fatal=not _answers(device))


def _answers(device: str) -> bool:
    """Whether a device still computes, which it does not after an access to memory of nobody's."""
    try:
        return bool(torch.ones(1, device=device).sum().item())
    except Exception:
        return False


def _played(check: Check, device: str, sizes: Sizes, ops: Ops) -> list[torch.Tensor]:
    """The results of one implementation; errors of its kernels surface here, not later."""
    with torch.no_grad():
        found = list(_tensors(check.play(ops, Inputs(device, sizes))))
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for part in value:
        yield from _tensors(part)


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
        apart, allowed = _apart(one.double(), other.double()), TOLERANCES[one.dtype]
        if apart > allowed:
            return apart, f"values ({one.dtype}) differ by {apart:.3g}, allowed: {allowed:g}"
        largest = max(largest, apart)
    return largest, ""


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, as `TOLERANCES` has it; inf where only one is a number."""
    same = (one == other) | (one.isnan() & other.isnan())
    gap = (one - other).abs() / other.abs().clamp_min(1.0)
    return float(gap.nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0).max())
