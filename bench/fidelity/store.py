"""Answers on disk: one JSONL file for each cell, which a later run continues.

The first line says what the answers were measured with. It must be equal to what this run
measures with, so that a file never holds a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

FORMAT = 1


class FidelityError(RuntimeError):
    """The measurement cannot go on; the message says why and what to do."""


class Log:
    """A JSONL file of entries below a header; being killed at any byte costs the last line."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists

    def read(self) -> list[dict[str, Any]]:
        """All entries; raises FidelityError where they were measured otherwise."""
        header, *entries = self._lines() or [self._identity]
        changes = differences(header, self._identity)
        if changes:
            raise FidelityError(f"{self.path} was measured otherwise: {'; '.join(changes)}")
        return entries

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


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What differs between two identities, in words."""
    return [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


@dataclass(frozen=True)
class Record:
    """One answer, graded."""

    index: int
    right: bool
    part: int  # of a cell that was interrupted; 0 in one that was not
    at: float  # seconds since its part began
    info: dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """The records of a cell, of which there should be ``problems``."""

    log: Log
    problems: int

    def records(self) -> list[Record]:
        return [Record(**entry) for entry in self.log.read()]

    def missing(self) -> list[int]:
        """The problems not yet answered."""
        return sorted(set(range(self.problems)) - {record.index for record in self.records()})

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[Record], None]]:
        with self.log.writing() as append:
            yield lambda record: append(asdict(record))


def seconds(records: list[Record]) -> float:
    """Wall time of all parts; of an interrupted one, up to its last answer."""
    ends: dict[int, float] = {}
    for record in records:
        ends[record.part] = max(record.at, ends.get(record.part, 0.0))
    return sum(ends.values())


def fingerprint(repository: Path, pair: Path) -> dict[str, Any]:
    """The code and models that answers depend on; edits count, committed or not."""
    code = [
        path
        for folder in ("sglang_smc", "kernels", "patches")
        for path in (repository / folder).glob("*.py")
    ]
    code += (repository / "sglang_smc" / "smc").glob("*.py")
    models = [path for name in ("target", "draft") for path in (pair / name).iterdir()]
    return {
        "format": FORMAT,
        "plugin": digest(code),
        "pair": digest([*models, repository / "bench" / "pair" / "task.py"]),
        "sglang": version("sglang"),
        "torch": version("torch"),
    }


def digest(paths: Iterable[Path]) -> str:
    """A short hash of the files' names and content."""
    content = hashlib.sha256()
    for path in sorted(paths):
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:12]
