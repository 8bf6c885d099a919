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
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product, starmap
from multiprocessing import get_context
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
from sglang_smc.ops.check_cases import ATTENTION, CHECKS, CheckSizes, Inputs
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


_NUMBERS = re.compile(r"sm_(\d+):(\d+):(\d+)")


def target_named(name: str) -> CompileTarget:
    """Return one of `DEVICES`, or what `name_here` names.

    Raises ValueError for another name.
    """
    if name in DEVICES:
        return DEVICES[name]
    found = _NUMBERS.fullmatch(name)
    if found is None:
        known = ", ".join(DEVICES)
        raise ValueError(
            f"--device is {name!r}; allowed: {known}, or as sm_90:132:227 a capability, the number "
            "of multiprocessors and a program's KiB of shared memory. Choose one of them."
        )
    capability, multiprocessors, shared = map(int, found.groups())
    return CompileTarget(capability, Chip(multiprocessors, shared << 10, capability >= 90))


def name_here() -> str:
    """Return a name of this process's GPU for `target_named`."""
    chip = work.chip_of(torch.device("cuda", 0))
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}:{chip.multiprocessors}:{chip.shared >> 10}"


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


class _Inputs(Inputs):
    """As on a device."""

    def __init__(self, device: CompileTarget, sizes: CheckSizes) -> None:
        super().__init__("cuda", sizes)
        self._multiprocessors = device.chip.multiprocessors

    @property
    def multiprocessors(self) -> int:
        return self._multiprocessors


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


class Job(NamedTuple):
    """A check of a start, at some sizes."""

    check: str  # of `CHECKS`
    sizes: CheckSizes


def jobs_of(of: Sequence[CheckSizes]) -> list[Job]:
    """Return all checks at each of these sizes.

    Attention, half of all seconds, comes first and pass by pass: so processes end together.
    """
    others = [name for name in CHECKS if name not in ATTENTION]
    passes = (one for sizes in of for one in _each_pass(sizes))
    return [*starmap(Job, product(ATTENTION, passes)), *starmap(Job, product(others, of))]


def _each_pass(sizes: CheckSizes) -> Iterator[CheckSizes]:
    for model in sizes.passes:
        for columns in model.columns:
            yield sizes._replace(passes=(model._replace(columns=(columns,)),))


def compile_checks(
    device: CompileTarget, jobs: Sequence[Job], told: Callable[[], Any], processes: int = 1
) -> list[Variant]:
    """Compile what the checks of a start launch; return the variants.

    Args:
        told: called after each job.
        processes: to compile in. They are forked from this one, which has imported all; it may not
            have used a GPU.

    Raises ValueError where this process interprets Triton.
    """
    found: dict[str, Variant] = {}
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        for variants in pool.map(partial(_compile, device), jobs):
            found |= variants
            told()
    return list(found.values())


def _compile(device: CompileTarget, job: Job) -> dict[str, Variant]:
    with (
        compiling(device) as found,
        FakeTensorMode(allow_non_fake_inputs=True),
        _Zeros(),
        torch.no_grad(),
    ):
        CHECKS[job.check].play(TRITON, _Inputs(device, job.sizes))
    return found
