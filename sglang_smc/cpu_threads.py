"""Defaults for model processes on a CPU, set through the environment that they inherit."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def physical_cpus() -> list[int]:
    """One logical CPU id per physical core that this process may run on, ascending."""
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
    """CPUs' worth of time that the container may use (cgroup v2), or None for no limit."""
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def usable_cores() -> int:
    """Physical cores that this process can keep busy: affinity and container quota."""
    quota = cgroup_quota()
    cores = len(physical_cpus())
    return cores if quota is None else max(1, min(cores, int(quota)))


def set_default_environment(*, tp_size: int) -> None:
    """Give each of ``tp_size`` model processes its share of the cores.

    Child processes inherit the variables before they load OpenMP. Whatever the user has set
    stays.
    """
    threads = max(1, usable_cores() // tp_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Idle OpenMP threads spin by default and take the cores from the processes beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if tp_size > 1:
        _set_tensor_parallel_defaults(tp_size)


def _set_tensor_parallel_defaults(tp_size: int) -> None:
    cpus = physical_cpus()
    shares = [cpus[rank::tp_size] or cpus for rank in range(tp_size)]
    # Without this list SGLang allows one rank for each NUMA node.
    binding = "|".join(",".join(map(str, share)) for share in shares)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
    # SGLang takes any NCCL that it can load, here the one of torch's CUDA wheel, and then needs a
    # CUDA device. A name that cannot be loaded leaves the ranks to gloo.
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "no-nccl-on-a-cpu")
