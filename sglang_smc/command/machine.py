"""Check an installation, the machine that it runs on, and the kernels there."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, NamedTuple

from sglang_smc import __version__
from sglang_smc.command import extensions

#: Entry points of the package: group, name, and the variable that restricts the names loaded.
ENTRY_POINTS = (
    ("sglang.srt.plugins", "smc", "SGLANG_PLUGINS"),
    ("sglang.srt.platforms", "smc_cpu", None),
)
GIB = 1 << 30
OK = "ok"
WARNING = "warning"
FAIL = "fail"
HERE = "here"  # this machine, as the device of a pair


class Finding(NamedTuple):
    """The result of one check."""

    level: str  # OK, WARNING or FAIL
    about: str
    found: str
    do: str = ""  # how to fix it, if needed
    numbers: dict[str, Any] | None = None  # for --json


ok, warning, fail = (partial(Finding, level) for level in (OK, WARNING, FAIL))


def findings() -> Iterator[Finding]:
    """Yield all findings, each as soon as it is available; stop early if packages are missing."""
    yield ok("python", platform.python_version())
    missing = [name for name in ("torch", "sglang") if installed(name) is None]
    if missing:
        yield fail(
            "packages",
            f"{' and '.join(missing)} not installed in {sys.prefix}",
            "pip install . in a clone of sglang-smc, without --no-deps.",
        )
        return
    yield ok("torch", str(installed("torch")))
    yield _release()
    yield _tools()
    for group, name, variable in ENTRY_POINTS:
        yield _entry_point(group, name, variable)
    yield _device()
    yield _hooks()


def installed(package: str) -> str | None:
    """Return the version of a package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release() -> Finding:
    from sglang_smc import plugin
    from sglang_smc.upstream import SUPPORTED

    problem = plugin.problem()
    found = installed("sglang")
    supported = ", ".join(SUPPORTED)
    if problem is None and found is not None and found.partition("+")[0] in SUPPORTED:
        return ok("sglang", f"{found}, with sglang-smc {__version__}, which supports {supported}")
    if problem is None:
        return warning(
            "sglang",
            f"{found}, which is not supported; {plugin.SKIP_VERSION_ENV}=1 lets it start",
            f"pip install 'sglang=={SUPPORTED[-1]}', or unset it.",
        )
    return fail("sglang", f"{found}", problem)


def _tools() -> Finding:
    found = installed(extensions.PACKAGE)
    if found is None:
        return ok(
            extensions.PACKAGE, "not installed: doctor is the only command", extensions.INSTALL
        )
    if found != __version__:
        told = f"{found}, with sglang-smc {__version__}"
        return fail(extensions.PACKAGE, told, extensions.INSTALL)
    return ok(extensions.PACKAGE, found)


def _entry_point(group: str, name: str, variable: str | None) -> Finding:
    about = f"entry point {group}"
    found = [point for point in entry_points(group=group) if point.name == name]
    if not found:
        return fail(
            about,
            f"no {name}",
            "install sglang-smc with pip: SGLang finds no folder that is on PYTHONPATH alone.",
        )
    listed = os.environ.get(variable or "", "")
    if listed and name not in [one.strip() for one in listed.split(",")]:
        return fail(about, f"{variable}={listed} keeps {name} out", f"Add {name} to it.")
    others = sorted({point.value for point in found} - {found[0].value})
    if others:
        return warning(
            about,
            f"{name} is {found[0].value}, and again {', '.join(others)}",
            "Uninstall the package that should not be there.",
        )
    return ok(about, f"{name} = {found[0].value}")


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        memory = properties.total_memory
        name = f"{count} x {properties.name}, {memory / GIB:.0f} GiB each"
        if torch.version.hip:
            return warning("device", name, "It has been tried on NVIDIA's GPUs and CPUs alone.")
        numbers = {"name": properties.name, "count": count, "bytes": memory}
        return ok("device", name, numbers=numbers)
    if torch.accelerator.is_available():
        name = str(torch.accelerator.current_accelerator())
        return fail("device", name, "Supported are NVIDIA's GPUs and x86-64 CPUs.")
    return _cpu()


def _cpu() -> Finding:
    from sglang_smc.dtype import default_dtype

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    dtype = default_dtype()
    found = f"no GPU; {os.cpu_count()} CPUs, {memory / GIB:.0f} GiB, which serve in {dtype}"
    numbers = {"name": "cpu", "count": os.cpu_count(), "bytes": memory, "dtype": dtype}
    if dtype == "bfloat16":
        return ok("device", f"{found} (avx512_bf16)", numbers=numbers)
    do = "Nothing to mend: without avx512_bf16 a pass takes two to five times as long."
    return warning("device", found, do, numbers)


def _hooks() -> Finding:
    """Apply the hooks in this process, as a server does in its own."""
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_smc.server import hooks

    on_cpu = not torch.accelerator.is_available()
    groups = [hooks.FLAGS, hooks.SMC, *([hooks.CPU_PLATFORM] if on_cpu else [])]
    count = 0
    problems = []
    for group in groups:
        # The plugin applies the first when it is loaded.
        apply = hooks.verify_installed if group is hooks.FLAGS else hooks.install
        try:
            count += len(hooks.collect(group))
            apply(group)
        except (RuntimeError, ImportError, AttributeError) as error:
            problems.append(str(error))
    if problems:
        return fail(
            "hooks",
            "not all hooks on SGLang land\n" + "\n".join(problems),
            "Install a release of SGLang that is supported; another plugin may hook the same.",
        )
    return ok("hooks", f"all {count} land", numbers={"count": count})


# --- Kernels

_OF_KERNEL = (
    "A server replaces it by its torch function, and says so; --speculative-smc-kernels torch does "
    "without all kernels."
)


def kernel_findings(num_particles: int, num_steps: int) -> Iterator[Finding]:
    """Compare each kernel with its torch reference; yield a finding as soon as it is available.

    Args:
        num_particles, num_steps: N and K of the rounds that set the inputs' sizes.
    """
    import torch

    from sglang_smc.models.softmax import Heads
    from sglang_smc.ops import check, ops_of
    from sglang_smc.ops.check_cases import CheckSizes, Passes

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        yield warning(
            "kernels",
            f"no GPU runs them here; on one these are checked: {', '.join(check.CHECKS)}",
            "Run it on the GPU that is to serve. TRITON_INTERPRET=1 runs kernels in Triton's "
            "interpreter, which says little of a GPU.",
        )
        return
    try:
        kernels = ops_of("triton", device)
    except ImportError as error:
        yield fail("kernels", f"cannot be imported: {error}", _OF_KERNEL)
        return
    # Of Llama 3 8B and DeepSeek-V2-Lite; small ones for the interpreter.
    plain = Heads(32, 8, 128, torch.bfloat16)
    latent = Heads(16, 1, 576, torch.bfloat16, 512)
    vocab_size = 128_256
    if device == "cpu":
        plain = Heads(4, 2, 32, torch.float32)
        latent = Heads(3, 1, 40, torch.float32, 32)
        vocab_size = 1000
    columns = 1, 2, num_steps + 1
    passes = Passes(plain, columns), Passes(plain, columns, rotates=True), Passes(latent, columns)
    sizes = CheckSizes(num_particles, num_steps, passes, gated_delta=True, vocab_size=vocab_size)
    for found in check.findings(kernels, device, sizes):
        if found.problem:
            yield fail(found.name, found.problem, _OF_KERNEL)
        else:
            told = f"agrees with torch, within {found.deviation:.1g}"
            yield ok(found.name, told, numbers={"deviation": found.deviation})
        if found.is_fatal:
            yield fail("device", "stopped by this kernel", "The others cannot be checked.")
            return
