"""Answers on disk: one JSONL file for each cell, which a later run continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from study import REPOSITORY, Log, code_fingerprint, digest


@dataclass(frozen=True)
class Record:
    """One answer, graded."""

    index: int
    right: bool
    part: int  # of a cell that was interrupted; 0 in one that was not
    at: float  # seconds since its part began
    output_ids: list[int]  # EOS and all
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


def fingerprint(pair: Path) -> dict[str, Any]:
    """The code and models that answers depend on."""
    models = [path for name in ("target", "draft") for path in (pair / name).iterdir()]
    task = REPOSITORY / "bench" / "pair" / "task.py"
    return {**code_fingerprint(), "pair": digest([*models, task])}
