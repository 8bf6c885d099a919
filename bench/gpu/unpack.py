"""Create a folder with SGLang and this tree's plugin, using only the standard library.

`.sg` holds SGLang and its dependencies for the GPU machine: a payload with an ``assemble.py`` that
unpacks it to a folder and writes an ``env.sh`` there, wheels, or both. Unpacked files are kept.
The plugin runs from the tree: the folder links to it, and has its entry points.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

PURE = re.compile(r"[^/]+\.data/(?:purelib|platlib)/(.*)")
DATA = re.compile(r"[^/]+\.data/")
TREE = Path(__file__).resolve().parents[2]
PACKAGE = "sglang_smc"
ENTRIES = re.compile(r'\[project\.entry-points\."([^"]+)"\]')


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack SGLang, and link the plugin.")
    parser.add_argument("--site", type=Path, required=True, help="where to")
    parser.add_argument("--payload", type=Path, default=Path(".sg"))
    options = parser.parse_args()
    unpack(options.site, options.payload)


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
    (information / "entry_points.txt").write_text("\n".join(entry_points(tree)) + "\n")


def entry_points(tree: Path) -> list[str]:
    """Return the lines of an ``entry_points.txt``, from the tables in pyproject.toml."""
    lines: list[str] = []
    table = None
    for line in (tree / "pyproject.toml").read_text().splitlines():  # Python 3.10 has no tomllib
        if line.startswith("["):
            table = ENTRIES.match(line)
            lines += [f"[{table[1]}]"] if table else []
        elif table and "=" in line:
            lines.append(line.replace('"', ""))
    return lines


def once(mark: Path, sources: Sequence[Path], work: object) -> None:
    """Call ``work`` unless ``mark`` records that it ran with the same files."""
    state = hashlib.sha256()
    for path in sources:
        if path.is_file():
            state.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                for piece in iter(lambda: file.read(1 << 22), b""):
                    state.update(piece)
    if mark.exists() and mark.read_text() == state.hexdigest():
        return
    assert callable(work)
    work()
    mark.write_text(state.hexdigest())


def install(wheel: Path, site: Path) -> None:
    """Install a wheel without scripts, as pip does with --no-deps --target."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        remove_older(wheel.name.split("-")[0], site)
        for name in names:
            inside = PURE.match(name)
            if DATA.match(name) and not inside:
                continue
            target = site / (inside[1] if inside else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
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
    main()
