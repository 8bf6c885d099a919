"""Make what a GPU machine needs fit what is carried there, and bring back what it compiled.

bash bench/gpu/run.sh checkout          # takes what no stage reads out of this checkout
bash bench/gpu/run.sh checkout --list   # says what is left then, with .sg, and changes nothing
bash bench/gpu/run.sh pack FOLDER       # makes a copy instead
"""

from __future__ import annotations

import os
import shlex
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
    "bench/results/grpo/",
    "bench/results/power/answers/",
)
#: Ignored by git: SGLang's wheels or payload, and kernels that other machines compiled.
SITE = ".sg"
COMMIT = f"{SITE}/commit.txt"
NAMED = 8  # of the largest parts
#: Where compiled kernels lie, by the archive that takes them along.
CACHES = {"jit": "SGLANG_JIT_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}
MOST_ARCHIVED = 16 * MIB


def checkout(*, make: bool) -> str:
    """Take what no stage reads out of this checkout, where it then fits; else only say what to do.

    Raises BenchError, before anything is changed, where it would still be too large, or where a
    file that would go has changes or is unknown to git.
    """
    told = check(_read(sizes_of(REPOSITORY)))
    words = ("sparse-checkout", "set", "--no-cone", "/*", *(f"!/{name}" for name in UNREAD))
    if not make:
        return f"{told}\n{shlex.join(('git', *words))}"
    if changed := _git(REPOSITORY, "status", "--porcelain", "--ignored", "--", *UNREAD):
        raise BenchError(
            f"Git would keep files that differ from the commit:\n{changed}Commit them or move them "
            f"away, or send the copy of `bash bench/gpu/run.sh pack FOLDER`."
        )
    _git(REPOSITORY, *words)
    (REPOSITORY / SITE).mkdir(exist_ok=True)
    (REPOSITORY / COMMIT).write_text(_git(REPOSITORY, "rev-parse", "HEAD"))
    return f"{told}\nCarry {SITE}, which git ignores, too. To undo: git sparse-checkout disable"


def pack(folder: Path) -> str:
    """Copy the tree and `SITE` to a folder, without what no stage reads.

    Raises BenchError where that is more than `MOST_CARRIED`, or the folder is not empty.
    """
    sizes = _read(sizes_of(REPOSITORY))
    told = check(sizes)
    if folder.exists() and any(folder.iterdir()):
        raise BenchError(f"{folder} is not empty. Name a new folder, or empty it.")
    for name in sizes:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    (folder / SITE).mkdir(exist_ok=True)
    (folder / COMMIT).write_text(_git(REPOSITORY, "rev-parse", "HEAD"))
    return f"{folder}: {told}"


def _read(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that a stage may read."""
    return {name: size for name, size in sizes.items() if not name.startswith(UNREAD)}


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
    if total > MOST_CARRIED:
        raise BenchError(
            f"{told}, which is {(total - MOST_CARRIED) / MIB:.1f} too many. Leave out archives of "
            f"kernels in {SITE}, which are then compiled again, or files that git does not know."
        )
    return told


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
        folder = Path(os.environ[variable])
        archive = f"{name}.tar.xz"
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
