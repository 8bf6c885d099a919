"""What travels to the GPU machine beside the tree: the wheel, and the commit it was made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from results import provenance
from study import REPOSITORY, BenchError

#: What benchmarks and tests of kernels need, and few machines have: pure Python all of it.
TEST_WHEELS = (
    "tqdm",
    "pytest",
    "hypothesis",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "sortedcontainers",
)

#: What the plugin imports beside SGLang, built for the Python and the libraries of that machine.
RUN_WHEELS = ("google-re2",)
MACHINE = ("--python-version=3.12", "--platform=manylinux_2_28_x86_64")


def pack(dist: Path = REPOSITORY / "dist", payload: Path = REPOSITORY / ".sg") -> str:
    """Build the wheel, and put those that it and tests need beside the payload."""
    for old in dist.glob("sglang_smc-*.whl"):
        old.unlink()
    _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), str(REPOSITORY))
    origin = provenance({})
    edited = " with changes" if origin["git_changes"] else ""
    (dist / "commit.txt").write_text(f"{origin['git_sha']}{edited}\n")
    payload.mkdir(exist_ok=True)
    names = (name.replace("-", "_") for name in (*TEST_WHEELS, *RUN_WHEELS))
    for old in (path for name in names for path in payload.glob(f"{name}-*.whl")):
        old.unlink()
    wheels = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(payload))
    _pip("download", *wheels, "--platform=any", *TEST_WHEELS)
    _pip("download", *wheels, *MACHINE, *RUN_WHEELS)
    found = sorted(path.name for folder in (dist, payload) for path in folder.glob("*.whl"))
    return f"{dist}/ and {payload}/ hold: {', '.join(found)}"


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], check=False)
    if done.returncode:
        raise BenchError(f"pip {' '.join(arguments)} failed.")
