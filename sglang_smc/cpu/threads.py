"""Set defaults for model processes on a CPU, in the environment that they inherit."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

_set_here: dict[str, str] = {}  # variables with the values that this module has set


def physical_cpus() -> list[int]:
    """Return one logical CPU id per physical core that this process may run on, ascending."""
    if not hasattr(os, "sched_getaffinity"):  # macOS has neither affinity nor sysfs
        return list(range(os.cpu_count() or 1))
    first_of_core: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        first_of_core.setdefault(_core_key(cpu), cpu)
    return list(first_of_core.values())


def _core_key(cpu: int) -> str:
    try:
        return Path(_SIBLINGS.format(cpu)).read_text().strip()
    except OSError:  # no topology in this container: every CPU counts as a core
        return str(cpu)


def cgroup_quota() -> float | None:
    """Return the container's CPU limit in cores (cgroup v2), or None for no limit."""
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def usable_cores() -> int:
    """Return the physical cores that this process can use: affinity and container quota."""
    quota = cgroup_quota()
    cores = len(physical_cpus())
    return cores if quota is None else max(1, min(cores, int(quota)))


def set_default_environment(*, tp_size: int, dp_size: int = 1, dtype: str = "float32") -> None:
    """Set the environment of ``tp_size * dp_size`` model processes: cores, libraries, dtypes.

    Child processes inherit the variables before they load OpenMP. Values that the user has set are
    kept; those that this function has set for an earlier engine are not.
    """
    threads = max(1, usable_cores() // (tp_size * dp_size))
    _default("OMP_NUM_THREADS", str(threads))
    # Idle OpenMP threads spin by default and take the cores from other processes. But for the tens
    # of microseconds between two operators spinning is cheaper than sleep.
    _default("OMP_WAIT_POLICY", "PASSIVE")
    _default("GOMP_SPINCOUNT", "20000" if "OMP_WAIT_POLICY" in _set_here else None)
    from sglang_smc.upstream import num_bound_processes

    bound = num_bound_processes(tp_size=tp_size, dp_size=dp_size)
    # Without this list SGLang allows one rank for each NUMA node.
    _default("SGLANG_CPU_OMP_THREADS_BIND", _binding(bound) if bound > 1 else None)
    # SGLang loads any NCCL, here the one of torch's CUDA wheel, and then needs a CUDA device. With
    # a name that cannot be loaded, ranks use gloo.
    _default("SGLANG_NCCL_SO_PATH", "no-nccl-on-a-cpu" if tp_size > 1 else None)
    # Convolution states of linear attention have the dtype of their inputs.
    _default("SGLANG_MAMBA_CONV_DTYPE", dtype)


def _binding(num_processes: int) -> str:
    cpus = physical_cpus()
    shares = [cpus[i::num_processes] or cpus for i in range(num_processes)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _default(name: str, value: str | None) -> None:
    """Set a variable, or unset it for None, unless it has a value from elsewhere."""
    if os.environ.get(name) not in (None, _set_here.get(name)):
        return
    os.environ.pop(name, None)
    _set_here.pop(name, None)
    if value is not None:
        os.environ[name] = _set_here[name] = value
