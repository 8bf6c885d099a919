"""Assemble the files for a GPU machine without a network: the tree and `.sg`, within a limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from results import provenance
from study import REPOSITORY, BenchError

#: The plugin's dependencies besides SGLang, built for that machine's Python and libraries.
RUN_WHEELS = ("google-re2",)
MACHINE = ("--python-version=3.12", "--platform=manylinux_2_28_x86_64")
#: Most bytes per transfer.
LIMIT = 60 << 20
PAYLOAD = REPOSITORY / ".sg"
#: File with this tree's commit, for a copy without its history.
COMMIT = "commit.txt"
#: Tracked files that no stage reads: weights of heads for the shipped pair, and of its reward
#: model.
UNREAD = tuple(f"/bench/pair/{name}/model.safetensors" for name in ("dflash", "eagle3", "reward"))


def pack(wheels: Sequence[str] = (), payload: Path = PAYLOAD) -> str:
    """Write the commit and the requested wheels beside the payload, and return the total size.

    Args:
        wheels: names of packages of pure Python that the machine lacks.
        payload: the folder, ignored by git, that the machine gets.

    Raises:
        BenchError: a wheel cannot be downloaded, or the total exceeds `LIMIT`.
    """
    payload.mkdir(exist_ok=True)
    origin = provenance({})
    edited = " with changes" if origin["git_changes"] else ""
    (payload / COMMIT).write_text(f"{origin['git_sha']}{edited}\n")
    for old in payload.glob("*.whl"):
        old.unlink()
    download = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(payload))
    _pip(*download, *MACHINE, *RUN_WHEELS)
    if wheels:
        _pip(*download, "--platform=any", *wheels)
    return summed(size_of(tracked()), size_of(payload.rglob("*")))


def tracked() -> list[Path]:
    """Return the files that git tracks; a sparse checkout lacks some of them."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [REPOSITORY / name for name in names.split("\0") if name]


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes of the files among the paths, without links."""
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def summed(tree: int, payload: int) -> str:
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


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], check=False)
    if done.returncode:
        raise BenchError(f"pip {' '.join(arguments)} failed.")
