"""Which releases there are, and where the source of one is.

`sglang_smc/upstream.py` alone knows releases: its `SUPPORTED`, `IS_NEWER` and `IS_NEWEST` are read
here.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = Path("sglang_smc", "upstream.py")
FAMILIES = ("OLDER", "NEWER", "NEWEST")

_OPTIONS = (
    *("--no-deps", "--no-compile", "--only-binary", ":all:"),
    *("--disable-pip-version-check", "--quiet"),
)
# Of the wheels of a release always the same one, on whatever machine this runs.
_OF_ANY_MACHINE = (
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
    return _downloaded(f"sglang=={version}", cache() / version, *_OF_ANY_MACHINE)


def unpacked_of(package: str, version: str) -> Path:
    """The folder with another package's release, downloaded the first time, or NoWheelError."""
    return _downloaded(f"{package}=={version}", cache() / f"{package}-{version}")


def triton_of(version: str) -> Path | None:
    """The folder with the Triton that a release brings; None for this interpreter's.

    A release names its torch, and torch its Triton. Downloaded the first time, or NoWheelError.
    """
    (sglang,) = metadata.distributions(name="sglang", path=[str(root_of(version))])
    torch = _required("torch", sglang.requires)
    if torch == f"torch=={metadata.version('torch').partition('+')[0]}":
        return None
    folder = cache() / f"triton-of-{torch}"
    if not folder.is_dir():
        (told,) = json.loads(_pip("--dry-run", "--ignore-installed", "--report=-", torch))[
            "install"
        ]
        _downloaded(_required("triton", told["metadata"]["requires_dist"]), folder)
    return folder


def _required(name: str, requirements: Iterable[str] | None) -> str:
    """`torch==2.11.0` of all that a package requires."""
    found = (one.partition(";")[0].strip() for one in requirements or ())
    (pinned,) = (one for one in found if re.fullmatch(rf"{name}[=~]=[\d.]+", one))
    return pinned


def _downloaded(requirement: str, folder: Path, *options: str) -> Path:
    """The folder with a wheel unpacked, or NoWheelError."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            print(f"downloading {requirement} to {folder}", file=sys.stderr)
            whole = Path(scratch, "whole")  # what is interrupted leaves no half of a release
            _pip(*options, "--target", str(whole), requirement)
            whole.rename(folder)
    return folder


def _pip(*options: str) -> str:
    command = [sys.executable, "-m", "pip", "install", *_OPTIONS, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise NoWheelError(
            f"pip could not download {options[-1]}. Is there such a release, and a network? "
            f"A wheel that is unpacked in {cache()} as there will do as well."
        )
    return done.stdout


def cache() -> Path:
    """Outside the project: the user's, as the system has it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "sglang-smc", "upstream")
