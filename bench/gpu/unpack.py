"""Make a folder that Python finds SGLang and this plugin in; needs the standard library alone.

`.sg` holds SGLang and its dependencies for the GPU machine: a payload with an ``assemble.py`` that
unpacks it to a folder and writes an ``env.sh`` there, wheels, or both. `dist` holds the wheel of
this tree. What is there already is not unpacked again.
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack SGLang and the plugin.")
    parser.add_argument("--site", type=Path, required=True, help="where to")
    parser.add_argument("--payload", type=Path, default=Path(".sg"))
    parser.add_argument("--dist", type=Path, default=Path("dist"))
    options = parser.parse_args()
    unpack(options.site, options.payload, options.dist)


def unpack(site: Path, payload: Path, dist: Path) -> None:
    """Bring ``site`` up to date; its ``env.sh`` is what a shell is to source."""
    site.mkdir(parents=True, exist_ok=True)
    assemble = payload / "assemble.py"
    if assemble.exists():
        parts = [path for path in sorted(payload.iterdir()) if path.suffix not in (".md", ".whl")]
        command = [sys.executable, str(assemble), str(payload), "--site", str(site)]
        once(site / ".assembled", parts, lambda: subprocess.run(command, check=True))
    wheels = [*sorted(payload.glob("*.whl")), the_wheel(dist)]
    for wheel in wheels:
        once(site / f".{wheel.name.split('-')[0]}", [wheel], lambda w=wheel: install(w, site))
    environment = site / "env.sh"
    if not environment.exists():
        environment.write_text(f'export PYTHONPATH="{site}${{PYTHONPATH:+:$PYTHONPATH}}"\n')


def the_wheel(dist: Path) -> Path:
    """The plugin's own; there is one, so that nobody wonders which was measured."""
    found = sorted(dist.glob("sglang_smc-*.whl"))
    if len(found) != 1:
        sys.exit(
            f"{dist}/ holds {len(found)} wheels of sglang-smc and has to hold one: "
            "bash bench/gpu/run.sh pack makes it, where there is a network."
        )
    return found[0]


def once(mark: Path, sources: Sequence[Path], work: object) -> None:
    """Do it unless ``mark`` says that it was done with the very same files."""
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
    """What pip does with --no-deps --target, of a wheel without scripts."""
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
    """An older version, so that no file of it stays behind."""
    for information in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(information)
    if (site / name / "__init__.py").exists():
        shutil.rmtree(site / name)


if __name__ == "__main__":
    main()
