"""Describe this machine, and its missing packages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu.pack import COMMIT, PAYLOAD
from results import provenance
from study import REPOSITORY, BenchError

#: Required packages by stage.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "all": ("torch", "triton", "sglang", "sglang_smc", "transformers", "tokenizers", "tqdm"),
    "engines": ("sgl_kernel", "flashinfer", "xgrammar", "msgspec", "zmq", "orjson"),
    "kernels": ("pytest", "hypothesis", "numpy"),
    "report": ("matplotlib", "scipy"),
}
VERSIONS = ("triton", "sglang-kernel", "flashinfer-python", "numpy")
QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def missing() -> dict[str, list[str]]:
    """Return the missing packages by stage."""
    found = {
        stage: [name for name in names if importlib.util.find_spec(name) is None]
        for stage, names in NEEDED.items()
    }
    return {stage: names for stage, names in found.items() if names}


def preflight(*, on_gpu: bool) -> list[str]:
    """Return the missing packages as sentences; raise BenchError if nothing can run."""
    lacking = missing()
    told = [
        f"{', '.join(names)}: not installed; {stage} need it" for stage, names in lacking.items()
    ]
    if "all" in lacking:
        raise BenchError("\n".join(told))
    installed = importlib.util.find_spec("sglang_smc")
    assert installed is not None and installed.origin is not None
    if not Path(installed.origin).resolve().is_relative_to(REPOSITORY):
        raise BenchError(
            f"sglang_smc is {installed.origin}, not this tree's. Start with bench/gpu/run.sh, "
            "which links the tree, or install it with pip install -e."
        )
    import torch  # slow to import

    if on_gpu and not torch.cuda.is_available():
        raise BenchError("torch sees no GPU here. --dry-run walks through all of it on a CPU.")
    return told


def call(stages: list[str]) -> dict[str, Any]:
    """Return the provenance of this call: machine, versions, time, stages."""
    found = provenance({"stages": stages})
    now = datetime.now(timezone.utc)
    return {
        **found,
        "id": now.strftime("%Y%m%dT%H%M%SZ"),
        "git_sha": commit(found["git_sha"]),
        "versions": {**found["versions"], **{name: _version(name) for name in VERSIONS}},
        "python": sys.version.split()[0],
        "gpu": gpu(),
    }


def commit(of_git: str | None) -> str | None:
    """Return git's commit, or the one stored beside the payload in a copy without history."""
    beside = PAYLOAD / COMMIT
    return beside.read_text().strip() if of_git is None and beside.exists() else of_git


def gpu() -> dict[str, str] | None:
    """Return the driver's data on the first GPU; None without a GPU."""
    line = _asked(QUERY)
    return line and dict(zip(QUERY.split(","), map(str.strip, line.split(",")), strict=True))


def free_mib() -> int | None:
    """Return the first GPU's free memory in MiB; None without a GPU."""
    line = _asked("memory.free")
    return line and int(line.split()[0])


def _asked(query: str) -> Any:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return line.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
