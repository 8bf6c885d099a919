"""SGLang's wheel of one release, unpacked: nothing of it is installed or run."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Of the wheels of a release always the same one, on whatever machine this runs.
_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"),
    *("--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
)


class NoWheelError(Exception):
    """A release that is not to be had; says what to do."""


def unpacked(version: str) -> Path:
    """The folder that holds `sglang/` of a release, downloaded the first time.

    Raises:
        NoWheelError: where pip cannot download it.
    """
    folder = cache() / version
    if not folder.is_dir():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            print(f"downloading sglang {version} (20 to 40 MB) to {folder}", file=sys.stderr)
            whole = Path(scratch, "whole")  # what is interrupted leaves no half of a release
            _unpack(_download(version, Path(scratch)), whole)
            whole.rename(folder)
    return folder


def cache() -> Path:
    """Outside the project: the user's, as the system has it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "sglang-smc", "upstream")


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, "--dest", str(folder)]
    done = subprocess.run([*command, f"sglang=={version}"], stdout=sys.stderr)
    if done.returncode:
        raise NoWheelError(
            f"pip could not download sglang=={version}. Is there such a release, and a network? "
            f"A wheel that is unpacked in {cache() / version} will do as well."
        )
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("sglang/") and n.endswith(".py")]
        archive.extractall(folder, names)
