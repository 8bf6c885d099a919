"""Store results as lines of JSON that a later call continues, on this machine or another."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: The file of results; each line is a call's provenance, or a result.
RESULTS = "results.jsonl"


class Records:
    """All stored results, and the files for new ones.

    Args:
        writes: folders that are brought to hold every result.
        reads: further folders with results of earlier calls.
        call: provenance of this call: the machine, versions, the date.
    """

    def __init__(
        self, writes: Sequence[Path], reads: Sequence[Path], call: Mapping[str, Any]
    ) -> None:
        self._lock = threading.Lock()
        lines = dict.fromkeys(line for folder in (*reads, *writes) for line in _lines(folder))
        self._found = [json.loads(line) for line in lines]
        self._paths = [folder / RESULTS for folder in dict.fromkeys(writes)]
        self._call = str(call["id"])
        for path in self._paths:
            _complete(path, lines)
        self._append({"call": self._call, "provenance": dict(call)})

    def add(
        self, stage: str, part: str, identity: Mapping[str, Any], content: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write one result."""
        entry = {"stage": stage, "part": part, "identity": _plain(identity), "call": self._call}
        return self._append({**entry, **content})

    def _append(self, entry: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            text = json.dumps(entry)
            entry = json.loads(text)
            self._found.append(entry)
            for path in self._paths:
                with path.open("a") as file:
                    file.write(text + "\n")
            return entry

    def has(self, stage: str, part: str, identity: Mapping[str, Any]) -> bool:
        """Return whether there is a result with the same identity."""
        found = self.of(stage).get(part)
        return found is not None and found["identity"] == _plain(identity)

    def is_of_this_call(self, stage: str, part: str) -> bool:
        """Return whether a part's last result is of this call."""
        return self.of(stage)[part]["call"] == self._call

    def of(self, stage: str) -> dict[str, dict[str, Any]]:
        """Return the last result of each part of a stage."""
        return {one["part"]: one for one in self._found if one.get("stage") == stage}


def read_results(
    folder: Path,
) -> tuple[dict[str, dict[str, dict[str, Any]]], dict[str, dict[str, Any]]]:
    """Return the last result of each part by stage, and the calls that measured them."""
    entries = [json.loads(line) for line in _lines(folder)]
    stages: dict[str, dict[str, dict[str, Any]]] = {}
    for one in entries:
        if "stage" in one:
            stages.setdefault(one["stage"], {})[one["part"]] = one
    used = {one["call"] for parts in stages.values() for one in parts.values()}
    calls = {one["call"]: one["provenance"] for one in entries if "provenance" in one}
    return stages, {name: found for name, found in calls.items() if name in used}


def _plain(identity: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(identity, default=str))


def _lines(folder: Path) -> list[str]:
    """Return complete lines; a killed call may have left a partial one."""
    path = folder / RESULTS
    if not path.exists():
        return []
    return [line.rstrip("\n") for line in path.open() if line.endswith("\n") and line.strip()]


def _complete(path: Path, lines: Mapping[str, Any]) -> None:
    """Bring a file to hold exactly these lines."""
    text = "".join(f"{line}\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
