"""Copy what a GPU machine needs, within what is carried there, and bring back what it compiled.

bash bench/gpu/run.sh pack            # is the tree, with .sg, small enough to be sent as it is?
bash bench/gpu/run.sh pack FOLDER     # makes a copy without what no stage reads
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from study import REPOSITORY, BenchError

MIB = 1 << 20
MOST_CARRIED = 64 * MIB
#: Drafts and reward models of the shipped pair, and answers, that no stage loads.
UNREAD = (
    *(f"bench/pair/{name}/" for name in ("dflash", "dspark", "mtp", "reward", "tuned")),
    "bench/results/power/answers/",
)
#: Ignored by git: SGLang's wheels or payload, and kernels that other machines compiled.
SITE = ".sg"
COMMIT = f"{SITE}/commit.txt"
NAMED = 8  # of the largest parts
#: Where compiled kernels lie, by the archive that takes them along.
CACHES = {"jit": "SGLANG_JIT_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}
MOST_ARCHIVED = 16 * MIB


def pack(folder: Path | None = None) -> str:
    """Copy the tree and `SITE` to a folder; without one, check what the tree takes as it is.

    Raises BenchError where that is more than `MOST_CARRIED`, or the folder is not empty.
    """
    sizes = sizes_of(REPOSITORY)
    if folder is None:
        return check(sizes)
    told = check({name: size for name, size in sizes.items() if not name.startswith(UNREAD)})
    if folder.exists() and any(folder.iterdir()):
        raise BenchError(f"{folder} is not empty. Name a new folder, or empty it.")
    for name in sizes:
        if not name.startswith(UNREAD):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    (folder / SITE).mkdir(exist_ok=True)
    (folder / COMMIT).write_text(_git(REPOSITORY, "rev-parse", "HEAD"))
    return f"{folder}: {told}"


def sizes_of(tree: Path) -> dict[str, int]:
    """Return the bytes of all files that are not ignored, and of those of `SITE`, by name."""
    listed = _git(tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    carried = (str(path.relative_to(tree)) for path in (tree / SITE).rglob("*"))
    files = (tree / name for name in dict.fromkeys((*listed.split("\0"), *carried)))
    found = (path for path in files if path.is_symlink() or path.is_file())
    return {str(path.relative_to(tree)): path.lstat().st_size for path in found}


def check(sizes: Mapping[str, int]) -> str:
    """Return the sum and the largest parts; raise BenchError above `MOST_CARRIED`."""
    parts = Counter[str]()
    for name, size in sizes.items():
        parts[_part_of(name)] += size
    total = sum(sizes.values())
    largest = ", ".join(f"{part} {size / MIB:.1f}" for part, size in parts.most_common(NAMED))
    told = f"{total / MIB:.1f} MiB of {MOST_CARRIED / MIB:.0f}: {largest}"
    if total <= MOST_CARRIED:
        return told
    advice = f"Leave out archives of kernels in {SITE}, which are then compiled again"
    if any(name.startswith(UNREAD) for name in sizes):
        patterns = " ".join(f"'!/{name}'" for name in UNREAD)
        advice = (
            "Send the copy of `bash bench/gpu/run.sh pack FOLDER`, or take out of this tree what "
            f"no stage reads: git sparse-checkout set --no-cone '/*' {patterns}"
        )
    raise BenchError(f"{told}, which is {(total - MOST_CARRIED) / MIB:.1f} too many. {advice}.")


def _part_of(name: str) -> str:
    """Return the folder that a file counts for; in `SITE` and the pair, files and models alone."""
    depth = {SITE: 2, "bench": 3}.get(name.partition("/")[0], 1)
    return "/".join(name.split("/")[:depth])


def _git(tree: Path, *words: str) -> str:
    command = ["git", "-C", str(tree), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{tree} is no checkout of git's, which lists what to copy.") from error


# --- Kernels that this machine compiled


def bring_back(out: Path, say: Callable[[str], None] = print) -> None:
    """Archive caches of compiled kernels that hold what `SITE` did not bring.

    Where such an archive lies in `SITE` of the next machine, `run.sh` unpacks it.
    """
    for name, variable in CACHES.items():
        if variable not in os.environ:
            continue
        folder, archive = Path(os.environ[variable]), f"{name}.tar.xz"
        if not files_in(folder) <= files_of(REPOSITORY / SITE / archive):
            with tarfile.open(out / archive, "w:xz", preset=3) as file:
                file.add(folder, ".")
            size = (out / archive).stat().st_size
            if size > MOST_ARCHIVED:
                (out / archive).unlink()
                most = MOST_ARCHIVED / MIB
                say(f"{archive} is not brought back: {size / MIB:.1f} MiB, of at most {most:.0f}")


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def files_of(archive: Path) -> set[str]:
    """Return the names of the files in an archive; none where there is no archive."""
    if not archive.exists():
        return set()
    with tarfile.open(archive) as file:
        return {os.path.normpath(one.name) for one in file if one.isfile()}
