"""Share the frame of all benchmarks: command line, resumable files of cells, exit status.

A cell's file is JSONL. Its first line is the identity that its entries were measured with. It must
equal that of this run, so that a file never holds a mixture.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

# The benchmarks import these from here.
from sglang_smc.command.program import ScriptError, main_of, number, positive
from sglang_smc_tools.commands import as_script, bar

__all__ = ("as_script", "bar", "main_of", "number", "positive")
FORMAT = 3
REPOSITORY = Path(__file__).resolve().parents[1]
PAIR = REPOSITORY / "bench" / "pair"
PUBLISHED = REPOSITORY / "bench" / "results"
GOES_ON = "All results so far are kept: the same command goes on from here."
ANOTHER_RUN = (
    "Ask for what was measured there, choose another --output-dir, or start anew with --fresh, "
    "which deletes what the folder has of the selected cells."
)
C = TypeVar("C")


class BenchError(ScriptError):
    """An error that ends the measurement; the message gives the reason and the remedy."""


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of ``bench/NAME`` with ``--output-dir`` and defaults in its help."""
    made = argparse.ArgumentParser(
        prog=f"bench/{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    folder = Path(f"{name}-output")
    made.add_argument("--output-dir", type=Path, default=folder, help="where all files go")
    return made


def slug_of(name: str) -> str:
    """Return the name for files and patterns: ``smc-block-n8-k4`` of ``SMC block N=8 K=4``."""
    return name.lower().replace("=", "").replace(" ", "-")


def add_selection(made: argparse.ArgumentParser) -> None:
    """Add the options that select cells and say what becomes of them."""
    add = made.add_argument
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="slugs, as a shell matches")
    add("--list", "--dry-run", action="store_true", help="print the cells, and stop")
    add("--fresh", action="store_true", help="measure again what the folder has of these cells")
    add("--publish", action="store_true", help="also copy to bench/results")


def selected(cells: Iterable[C], patterns: Sequence[str]) -> list[C]:
    """Return the cells with a matching ``slug``; raise BenchError without any."""
    found = matching(cells, patterns)
    if not found:
        raise BenchError(f"No cell matches --only {' '.join(patterns)}; --list shows all.")
    return found


def matching(cells: Iterable[C], patterns: Sequence[str]) -> list[C]:
    """Return the cells with a ``slug`` that matches a shell pattern."""
    return [cell for cell in cells if any(fnmatchcase(cell.slug, p) for p in patterns)]


def copy(paths: Iterable[Path], folder: Path) -> None:
    """Copy results to a folder of the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(path, folder / path.name)


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what a page has between two marks."""
    before, _, rest = page.read_text().partition(marks[0])
    page.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{rest.partition(marks[1])[2]}")


def prepare_folder(folder: Path) -> None:
    """Create the output folder, ignored by git wherever it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")


# --- Files of cells


class Log:
    """A JSONL file of entries below a header; being killed at any byte costs only the last line."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists

    def read(self) -> list[dict[str, Any]]:
        """Return all entries; raise BenchError if their identity differs."""
        header, *entries = whole_lines(self.path) or [self._identity]
        changes = [
            f"{name} is {header.get(name)!r} there and {self._identity.get(name)!r} here"
            for name in sorted(header.keys() | self._identity.keys())
            if header.get(name) != self._identity.get(name)
        ]
        if changes:
            told = "; ".join(changes)
            raise BenchError(f"{self.path} was measured otherwise: {told}\n{ANOTHER_RUN}")
        return entries

    def header(self) -> dict[str, Any]:
        """Return the identity that the file names, empty without a file."""
        return next(iter(whole_lines(self.path)), {})

    def drop(self) -> None:
        """Delete the file, for a measurement that starts anew."""
        self.path.unlink(missing_ok=True)

    @property
    def fits(self) -> bool:
        """Return whether the file's identity equals this run's."""
        return self.header() in ({}, self._identity)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yield a function that appends an entry, visible at once to others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:

            def append(entry: dict[str, Any]) -> None:
                file.write(json.dumps(entry).encode() + b"\n")

            file.seek(0)
            if not file.truncate(file.read().rfind(b"\n") + 1):  # half a line of a killed run
                append(self._identity)
            yield append


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL file; a killed call may have left half a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.open() if line.endswith("\n")]


def code_fingerprint() -> dict[str, Any]:
    """Return the fingerprint of the code that measurements depend on, committed or not."""
    folders = [REPOSITORY / name for name in ("sglang_smc", "kernels", "patches")]
    code = [path for folder in folders for path in folder.rglob("*.py")]
    return {
        "format": FORMAT,
        "plugin": digest(code),
        "sglang": version("sglang"),
        "torch": version("torch"),
    }


def digest(paths: Iterable[Path]) -> str:
    """Return a short hash of the files' names and contents."""
    content = hashlib.sha256()
    for path in sorted(paths):
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:12]
