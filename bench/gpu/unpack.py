"""Create a folder with SGLang and this tree's plugin, using only the standard library.

`.sg` holds SGLang and its dependencies for the GPU machine: a payload with an ``assemble.py`` that
unpacks it to a folder and writes an ``env.sh`` there, wheels, or both. Unpacked files are kept.
The plugin runs from the tree: the folder links to it, and has its entry points.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
PACKAGE = "sglang_smc"
ENTRIES = re.compile(r'\[project\.entry-points\."([^"]+)"\]')


def unpack(site: Path, payload: Path, tree: Path = TREE) -> None:
    """Bring ``site`` up to date; a shell then sources its ``env.sh``."""
    site.mkdir(parents=True, exist_ok=True)
    assemble = payload / "assemble.py"
    if assemble.exists():
        beside = (".md", ".txt", ".whl")
        parts = [path for path in sorted(payload.iterdir()) if path.suffix not in beside]
        command = [sys.executable, str(assemble), str(payload), "--site", str(site)]
        once(site / ".assembled", parts, lambda: subprocess.run(command, check=True))
    for wheel in sorted(payload.glob("*.whl")):
        once(site / f".{wheel.name.split('-')[0]}", [wheel], lambda w=wheel: install(w, site))
    link(tree, site)
    environment = site / "env.sh"
    if not environment.exists():
        environment.write_text(f'export PYTHONPATH="{site}${{PYTHONPATH:+:$PYTHONPATH}}"\n')


def link(tree: Path, site: Path) -> None:
    """Link the package and write its entry points, for Python and SGLang to find."""
    remove_older(PACKAGE, site)
    (site / PACKAGE).symlink_to(tree / PACKAGE, target_is_directory=True)
    version = re.search(r'__version__ = "(.+)"', (tree / PACKAGE / "__init__.py").read_text())
    assert version is not None, "tests hold it against the changelog"
    information = site / f"{PACKAGE}-{version[1]}.dist-info"
    information.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: sglang-smc\nVersion: {version[1]}\n"
    (information / "METADATA").write_text(metadata)
    points = entry_points((tree / "pyproject.toml").read_text())
    (information / "entry_points.txt").write_text("\n".join(points) + "\n")


def entry_points(pyproject: str) -> list[str]:
    """Return the lines of an ``entry_points.txt``; Python 3.10 has no tomllib."""
    lines: list[str] = []
    table = None
    for line in pyproject.splitlines():
        if line.startswith("["):
            table = ENTRIES.match(line)
            lines += [f"[{table[1]}]"] if table else []
        elif table and "=" in line:
            lines.append(line.replace('"', ""))
    return lines


def once(mark: Path, sources: Sequence[Path], work: Callable[[], object]) -> None:
    """Call ``work`` unless ``mark`` records that it ran with the same files."""
    state = hashlib.sha256()
    for path in filter(Path.is_file, sources):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    if not mark.exists() or mark.read_text() != state.hexdigest():
        work()
        mark.write_text(state.hexdigest())


def install(wheel: Path, site: Path) -> None:
    """Install a wheel without scripts."""
    remove_older(wheel.name.split("-")[0], site)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for inside in (*site.glob("*.data/purelib"), *site.glob("*.data/platlib")):
        shutil.copytree(inside, site, dirs_exist_ok=True)
    print(f"installed {wheel.name} in {site}", flush=True)


def remove_older(name: str, site: Path) -> None:
    """Remove an older version, so that none of its files remain."""
    for information in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(information)
    if (site / name).is_symlink():
        (site / name).unlink()
    elif (site / name / "__init__.py").exists():
        shutil.rmtree(site / name)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), TREE / ".sg")
