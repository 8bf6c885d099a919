"""Compile the kernels of a server's start for a GPU that need not be there.

The checks of a start are played on tensors without values (`FakeTensorMode`), and each launch is
compiled in its place. Triton keeps the result in its cache, by a key of the kernel's source and of
those that it calls, the types of arguments, which integers are 1 or multiples of 16, which
addresses are, the constants, the options, the target (``cuda:90:32``) and its own version. A server
of this version, with this Triton, finds it there: `JITFunction.run` itself computes the key here,
with addresses of the same alignment (PyTorch allocates at multiples of 512 bytes on a GPU) and
Triton's driver replaced by one that names the target.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.work import A100, H100, Chip
from sglang_smc.ops.check_cases import CHECKS, CheckSizes, Inputs
from sglang_smc.ops.triton_ops import TRITON


class CompileTarget(NamedTuple):
    """A kind of GPU to compile for."""

    capability: int  # 90: sm_90
    chip: Chip


#: From data sheets.
DEVICES = {
    "a100": CompileTarget(80, A100),
    "h100": CompileTarget(90, H100),
    "h200": CompileTarget(90, H100),
    "b200": CompileTarget(100, Chip(148, 227 << 10, overlaps=True)),
    "l40s": CompileTarget(89, Chip(142, 99 << 10)),
    "l4": CompileTarget(89, Chip(58, 99 << 10)),
    "rtx-4090": CompileTarget(89, Chip(128, 99 << 10)),
}


class Variant(NamedTuple):
    """A kernel as it is compiled once."""

    kernel: str
    hash: str  # its key in Triton's cache


class Address(MockTensor):
    """A tensor without values, aligned as on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype)
        self._offset = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:  # type: ignore[override]
        return self._offset


class _Zeros(TorchDispatchMode):
    """Read 0 where a value of the device's is asked for on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


def cpu_seconds() -> float:
    """Return those of this process, and of the processes that it has waited for."""
    return sum(os.times()[:4])


def set_target(capability: int) -> None:
    """Have Triton compile for CUDA devices of a capability from now on."""
    # Triton keeps what it has compiled by device: each capability is one of its own.
    named: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,
        get_current_stream=lambda device: device,
    )
    driver.set_active(named)


@contextmanager
def compiling(device: CompileTarget) -> Iterator[dict[str, Variant]]:
    """Compile kernels in place of launching them; yield their variants, by key, as they come.

    Raises ValueError where this process interprets Triton: nothing compiles there.
    """
    if knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set, and kernels are interpreted. Unset it.")
    found: dict[str, Variant] = {}
    launch: Callable[..., Any] = JITFunction.run

    def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        args = tree_map_only(torch.Tensor, Address, args)
        kernel: Any = launch(function, *args, grid=grid, warmup=True, **options)
        name = f"{function.module.rpartition('.')[2]}.{function.__name__}"
        found[kernel.hash] = Variant(name, kernel.hash)
        return kernel

    active = driver._active  # `reset_active` looks for a GPU
    set_target(device.capability)
    JITFunction.run = run  # type: ignore[method-assign]
    try:
        with work.on_chip(device.chip):
            yield found
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
        driver._active = active


def compile_checks(
    device: CompileTarget, of: Sequence[CheckSizes], told: Callable[[], Any]
) -> list[Variant]:
    """Compile what the checks of a start launch at each of these sizes; return the variants.

    Args:
        told: called after each of `CHECKS`, at each size.

    Raises ValueError where this process interprets Triton.
    """

    class OfDevice(Inputs):
        @property
        def multiprocessors(self) -> int:
            return device.chip.multiprocessors

    with compiling(device) as found:
        for sizes in of:
            for check in CHECKS.values():
                with FakeTensorMode(allow_non_fake_inputs=True), _Zeros(), torch.no_grad():
                    check.play(TRITON, OfDevice("cuda", sizes))
                told()
    return list(found.values())
