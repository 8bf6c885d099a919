"""Which releases there are, and where the source of one is.

`sglang_smc/upstream.py` alone knows releases: its `SUPPORTED`, `IS_NEWER` and `IS_NEWEST` are read
here.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = Path("sglang_smc", "upstream.py")
FAMILIES = ("OLDER", "NEWER", "NEWEST")

# Of the wheels of a release always the same one, on whatever machine this runs.
_OPTIONS = (
    *("--no-deps", "--no-compile", "--only-binary", ":all:"),
    *("--disable-pip-version-check", "--quiet"),
    *("--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
)


class NoWheelError(Exception):
    """A release that is not to be had; says what to do."""


def version_of(root: Path) -> str:
    """The version of the SGLang that stands below a folder; a checkout never built tells none."""
    path = root / "sglang" / "_version.py"
    text = path.read_text("utf-8") if path.is_file() else ""
    found = re.search(r"^__version__ = .*'([\d.\w]+)", text, re.M)
    if found is None:
        raise SystemExit(f"{path} does not say which release this is; a wheel or a build has it")
    return found[1]


def supported(root: Path = ROOT) -> tuple[str, ...]:
    """The releases that this package runs on, oldest first."""
    (value,) = re.findall(r"^SUPPORTED = (.*)$", (root / UPSTREAM).read_text("utf-8"), re.M)
    return ast.literal_eval(value)


def families(version: str, root: Path = ROOT) -> frozenset[str]:
    """Which of `FAMILIES` a release is of, by the expressions of `upstream.py`."""
    text = (root / UPSTREAM).read_text("utf-8")
    since = dict(re.findall(r'^IS_(\w+) = .*>= Version\("([\d.]+)"\)$', text, re.M))
    of = {name for name, first in since.items() if Version(version) >= Version(first)}
    return frozenset(of or {"OLDER"})


def root_of(name: str) -> Path:
    """The folder that holds a release's `sglang/`: given, installed, or else an unpacked wheel."""
    if Path(name, "sglang").is_dir():
        return Path(name)
    present = installed()
    if present is not None and version_of(present) == name:
        return present
    return unpacked(name)


def installed() -> Path | None:
    """The folder that holds this interpreter's SGLang, which is not imported."""
    spec = find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def unpacked(version: str) -> Path:
    """The folder that holds a release's `sglang/`, downloaded the first time, or NoWheelError."""
    folder = cache() / version
    if not folder.is_dir():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            print(f"downloading sglang {version} (20 to 40 MB) to {folder}", file=sys.stderr)
            whole = Path(scratch, "whole")  # what is interrupted leaves no half of a release
            command = [sys.executable, "-m", "pip", "install", *_OPTIONS, "--target", str(whole)]
            if subprocess.run([*command, f"sglang=={version}"], stdout=sys.stderr).returncode:
                raise NoWheelError(
                    f"pip could not download sglang=={version}. Is there such a release, and a "
                    f"network? A wheel that is unpacked in {folder} will do as well."
                )
            whole.rename(folder)
    return folder


def cache() -> Path:
    """Outside the project: the user's, as the system has it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "sglang-smc", "upstream")
