"""What all benchmarks share: a command line, cells on disk that a later run continues, an end.

A file of a cell is JSONL. Its first line says what the entries were measured with. It must be
equal to what this run measures with, so that a file never holds a mixture.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

# Of these the benchmarks import from here what they need, beside what stands below.
from sglang_smc.demo.script import ScriptError
from sglang_smc.demo.script import as_script as as_script
from sglang_smc.demo.script import bar as bar
from sglang_smc.demo.script import main_of as main_of

FORMAT = 1
REPOSITORY = Path(__file__).resolve().parents[1]
PAIR = REPOSITORY / "bench" / "pair"
PUBLISHED = REPOSITORY / "bench" / "results"
ANOTHER_RUN = (
    "Ask for what was measured there, choose another --output-dir, or start anew with --fresh, "
    "which deletes what the folder has of the selected cells."
)


class BenchError(ScriptError):
    """The measurement cannot go on; the message says why and what to do."""


# --- The command line


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of ``bench/NAME`` whose help tells the defaults, with where its files go."""
    found = argparse.ArgumentParser(
        prog=f"bench/{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    folder = Path(f"{name}-output")
    found.add_argument("--output-dir", type=Path, default=folder, help="where all files go")
    return found


def grid_parser(name: str, description: str, *, look: str) -> argparse.ArgumentParser:
    """The same for a study of cells; ``look`` is the flag that only lists them."""
    found = parser(name, description)
    add = found.add_argument
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="slugs, as a shell matches")
    add(look, dest="look", action="store_true", help="print the cells, and what is done, and stop")
    add("--fresh", action="store_true", help="forget what the output folder has of these cells")
    add("--publish", action="store_true", help=f"also copy the results to bench/results/{name}")
    return found


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


# --- A study of cells


class HasSlug(Protocol):
    """Whatever files and patterns have a name for."""

    @property
    def slug(self) -> str: ...


C = TypeVar("C", bound=HasSlug)
W = TypeVar("W")
R = TypeVar("R")


def slug_of(name: str) -> str:
    """As files and patterns have it: ``smc-block-n8-k4`` of ``SMC block N=8 K=4``."""
    return name.lower().replace("=", "").replace(" ", "-")


def matching(cells: Iterable[C], patterns: Sequence[str]) -> list[C]:
    """The cells whose slug matches one of these, as a shell would."""
    return [cell for cell in cells if any(fnmatchcase(cell.slug, p) for p in patterns)]


def selected(cells: Iterable[C], patterns: Sequence[str], *, look: str) -> list[C]:
    """The cells whose slug matches a pattern; raises BenchError where none does."""
    found = matching(cells, patterns)
    if not found:
        raise BenchError(f"No cell matches --only {' '.join(patterns)}; {look} shows all.")
    return found


class Plan(Protocol):
    """Which cells a run completes, and which files of the output folder it may read."""

    options: argparse.Namespace

    def logs(self) -> list[Log]:
        """The files that this run reads, which must have been measured as it measures."""
        ...

    def own_logs(self) -> list[Log]:
        """Those of the selected cells, which ``--fresh`` deletes."""
        ...

    def status(self) -> str:
        """A line for each selected cell."""
        ...


def complete(plan: Plan, measure: Callable[[], str], publish: Callable[[], None]) -> None:
    """Do what the options ask for; ``measure`` returns what there is to say of the results."""
    options, began = plan.options, time.monotonic()
    if options.fresh and not options.look:
        for log in plan.own_logs():
            log.delete()
    for log in plan.logs():
        check(log)
    if options.look:
        print(plan.status())
        return
    prepare_folder(options.output_dir)
    print(f"\n{measure()}\n\n{time.monotonic() - began:.0f} s. All is in {options.output_dir}/.")
    if options.publish:
        publish()


def copy(paths: Iterable[Path], folder: Path) -> None:
    """Copy results to where the repository keeps them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(path, folder / path.name)


def prepare_folder(folder: Path) -> None:
    """Make the output folder, which git is not to see wherever it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")


# --- Processes


def in_processes(function: Callable[[W], R], work: Sequence[W], jobs: int) -> Iterator[R]:
    """What ``function`` makes of each piece of work, in any order; one thread a process.

    For models too small to share one among cores. A Ctrl-C reaches the parent alone, which ends
    the others.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(work), jobs), _begin_process) as pool:
        yield from pool.imap_unordered(function, work)
        pool.close()
        pool.join()  # an orderly end; leaving the block early kills the workers instead


def _begin_process() -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


# --- Files of cells


class Log:
    """A JSONL file of entries below a header; being killed at any byte costs the last line."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists

    def read(self) -> list[dict[str, Any]]:
        """All entries; raises BenchError where they were measured otherwise."""
        header, *entries = self._lines() or [self._identity]
        changes = differences(header, self._identity)
        if changes:
            raise BenchError(f"{self.path} was measured otherwise: {'; '.join(changes)}")
        return entries

    def header(self) -> dict[str, Any]:
        """What the file says that it was measured with; nothing where there is none."""
        return next(iter(self._lines()), {})

    @property
    def fits(self) -> bool:
        """Whether it was measured as this run measures."""
        try:
            self.read()
        except BenchError:
            return False
        return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """What appends an entry, at once visible to others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:

            def append(entry: dict[str, Any]) -> None:
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()

            _drop_half_line(file)
            if file.tell() == 0:
                append(self._identity)
            yield append

    def delete(self) -> None:
        """Start anew."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.open() if line.endswith("\n")]


def _drop_half_line(file: Any) -> None:
    """Cut what a killed run left behind the last end of a line, and go to the end."""
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, 2)


def check(log: Log) -> None:
    """Raise BenchError, before anything is started, where a file does not fit."""
    try:
        log.read()
    except BenchError as error:
        raise BenchError(f"{error}\n{ANOTHER_RUN}") from error


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What differs between two identities, in words."""
    return [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def code_fingerprint() -> dict[str, Any]:
    """The code that measurements depend on; edits count, committed or not."""
    folders = [REPOSITORY / name for name in ("sglang_smc", "kernels", "patches")]
    code = [path for folder in folders for path in folder.rglob("*.py")]
    return {
        "format": FORMAT,
        "plugin": digest(code),
        "sglang": version("sglang"),
        "torch": version("torch"),
    }


def digest(paths: Iterable[Path]) -> str:
    """A short hash of the files' names and content."""
    content = hashlib.sha256()
    for path in sorted(paths):
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:12]
