"""Describe this machine, and say what it lacks."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

from results import installed, provenance
from speed.runner import call_id
from study import REPOSITORY, BenchError

#: Packages without which no stage runs.
NEEDED = ("torch", "triton", "sglang", "sglang_smc", "transformers", "tokenizers", "tqdm")
VERSIONS = ("triton", "sglang-kernel", "flashinfer-python", "numpy")
QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"

#: The tree's commit, for a copy without history; see CONTRIBUTING.md, "On a GPU".
COMMIT = REPOSITORY / ".sg" / "commit.txt"


def preflight(*, on_gpu: bool) -> None:
    """Raise BenchError if nothing can run here."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise BenchError(f"{', '.join(lacking)}: not installed, and every stage needs it.")
    plugin = importlib.util.find_spec("sglang_smc")
    assert plugin is not None and plugin.origin is not None
    if not Path(plugin.origin).resolve().is_relative_to(REPOSITORY):
        raise BenchError(
            f"sglang_smc is {plugin.origin}, not this tree's. Start with bench/gpu/run.sh, "
            "which links the tree, or install it with pip install -e."
        )
    import torch  # slow to import

    if on_gpu and not torch.cuda.is_available():
        raise BenchError("torch sees no GPU here. --dry-run walks through all of it on a CPU.")


def call(stages: list[str]) -> dict[str, Any]:
    """Return the provenance of this call: machine, versions, time, stages."""
    found = provenance({"stages": stages})
    if found["git_sha"] is None and COMMIT.exists():
        found["git_sha"] = COMMIT.read_text().strip()
    found["versions"] |= {name: installed(name) for name in VERSIONS}
    line = driver_says(QUERY)
    gpu = line and dict(zip(QUERY.split(","), map(str.strip, line.split(",")), strict=True))
    return {**found, "id": call_id(), "gpu": gpu}


def driver_says(query: str) -> str | None:
    """Return the driver's answer about the first GPU; None without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
