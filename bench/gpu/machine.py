"""Describe this machine and its missing packages, and pack the files for one without a network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from results import installed, provenance
from speed.runner import call_id
from study import REPOSITORY, BenchError

#: Packages without which no stage runs.
NEEDED = ("torch", "triton", "sglang", "sglang_smc", "transformers", "tokenizers", "tqdm")
VERSIONS = ("triton", "sglang-kernel", "flashinfer-python", "numpy")
QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"

#: The ignored folder that travels with the tree, and its file with the tree's commit.
PAYLOAD, COMMIT = REPOSITORY / ".sg", "commit.txt"
#: The plugin's dependencies besides SGLang, built for that machine's Python and libraries.
RUN_WHEELS = ("google-re2",)
PLATFORM = ("--python-version=3.12", "--platform=manylinux_2_28_x86_64")
#: Most bytes per transfer.
LIMIT = 60 << 20
#: Tracked weights that no stage reads.
UNREAD = tuple(f"/bench/pair/{name}/model.safetensors" for name in ("dflash", "eagle3", "reward"))


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
    found, beside = provenance({"stages": stages}), PAYLOAD / COMMIT
    if found["git_sha"] is None and beside.exists():  # a copy without history
        found["git_sha"] = beside.read_text().strip()
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


def pack(wheels: Sequence[str] = ()) -> str:
    """Write the commit and wheels beside the payload, and return the size of all that travels.

    Args:
        wheels: names of packages of pure Python that the machine lacks.

    Raises:
        BenchError: a wheel cannot be downloaded, or the sum exceeds `LIMIT`.
    """
    PAYLOAD.mkdir(exist_ok=True)
    origin = provenance({})
    edited = " with changes" if origin["git_changes"] else ""
    (PAYLOAD / COMMIT).write_text(f"{origin['git_sha']}{edited}\n")
    for old in PAYLOAD.glob("*.whl"):
        old.unlink()
    for options, names in ((PLATFORM, RUN_WHEELS), (("--platform=any",), wheels)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", f"--dest={PAYLOAD}", *options, *names]
        if names and subprocess.run(command, check=False).returncode:
            raise BenchError(f"{' '.join(command)} failed.")
    return within_limit(size_of(tracked()), size_of(PAYLOAD.rglob("*")))


def tracked() -> list[Path]:
    """Return the files that git tracks; a sparse checkout lacks some of them."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [REPOSITORY / name for name in names.split("\0") if name]


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes of the files among the paths, without links."""
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def within_limit(tree: int, payload: int) -> str:
    """Return the sum in one line; raise BenchError if it exceeds `LIMIT`."""
    told = (
        f"tracked files {tree / 1e6:.1f} MB + {PAYLOAD.name}/ {payload / 1e6:.1f} MB = "
        f"{(tree + payload) / (1 << 20):.1f} MiB of {LIMIT >> 20} MiB"
    )
    if tree + payload <= LIMIT:
        return told
    left_out = " ".join(f"'!{path}'" for path in UNREAD)
    raise BenchError(
        f"{told}: too much. Leave behind what no stage reads: git sparse-checkout set --no-cone "
        f"'/*' {left_out}; git sparse-checkout disable brings it back. Then pack again."
    )
