"""What a benchmark measures, on disk: JSONL files that a later run continues.

The first line says what the entries were measured with. It must be equal to what this run
measures with, so that a file never holds a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

FORMAT = 1


class BenchError(RuntimeError):
    """The measurement cannot go on; the message says why and what to do."""


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


def code_fingerprint(repository: Path) -> dict[str, Any]:
    """The code that measurements depend on; edits count, committed or not."""
    code = [
        path
        for folder in ("sglang_smc", "kernels", "patches")
        for path in (repository / folder).glob("*.py")
    ]
    code += (repository / "sglang_smc" / "smc").glob("*.py")
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


def prepare_folder(folder: Path) -> None:
    """Make the output folder, which git is not to see wherever it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
