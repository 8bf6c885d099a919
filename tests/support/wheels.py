"""Build wheels as users of an index get them, and look into them."""

import os
import shutil
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from programs import printed

ROOT = Path(__file__).parents[2]
#: Folders of the plugin's package that stand beside it, and their links.
MAPPED = {"kernels": "sglang_smc/kernels", "patches": "sglang_smc/patches"}
ADDRESS = "SGLANG_SMC_REPOSITORY"
REVISION = "SGLANG_SMC_REVISION"


def run(folder: Path, *command: object, **variables: str) -> str:
    """What a command prints in a folder; it must end well."""
    ours = ("PYTHONPATH", ADDRESS, REVISION)
    outside = {name: value for name, value in os.environ.items() if name not in ours}
    return printed(*command, cwd=folder, env=outside | variables)


def build(source: Path, *options: str, **variables: str) -> Path:
    """Build in this environment, without an index; return the wheel."""
    words = [sys.executable, "-m", "build", "--no-isolation", *options, source]
    run(source.parent, *words, **variables)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def copied(folder: Path) -> Path:
    """What a build of the plugin needs of the checkout: building leaves files behind."""
    names = ("sglang_smc", *MAPPED, "pyproject.toml", "setup.py", "LICENSE", "README.md")
    return copy_of(folder, *names)


def copy_of(folder: Path, *names: str) -> Path:
    """Copy files and folders of the checkout, links as links."""
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=junk)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def unpacked(wheel: Path, folder: Path) -> Path:
    """The wheel's files, as an installer would lay them out."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Any:
    (found,) = distributions(path=[str(wheel)])
    return found.metadata
