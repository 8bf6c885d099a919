"""Store samples in one JSONL file for each cell, which a later run continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speed.remote import Sample
from study import Log


@dataclass(frozen=True)
class Measured:
    """One repeat; ``beside`` is plain decoding of the same requests just before it."""

    run: str  # the call that measured it
    repeat: int
    sample: Sample
    beside: Sample | None = None


class CellLog:
    """The stored repeats of a cell, or the reason why it cannot run here."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def measured(self) -> list[Measured]:
        """Return the repeats."""
        return [_measured(entry) for entry in self.log.read() if "refused" not in entry]

    def refused(self) -> str | None:
        """Return the engine's error if the cell cannot run here, else None."""
        reasons = [entry["refused"] for entry in self.log.read() if "refused" in entry]
        return reasons[-1] if reasons else None

    def missing(self, repeats: int) -> list[int]:
        """Return the missing repeats; none if the cell cannot run."""
        if self.refused():
            return []
        return sorted(set(range(repeats)) - {one.repeat for one in self.measured()})

    def add(self, measured: Measured) -> None:
        """Write one repeat."""
        self._append(asdict(measured))

    def refuse(self, reason: str) -> None:
        """Write the reason why the cell cannot run here."""
        self._append({"refused": reason})

    def _append(self, entry: dict[str, Any]) -> None:
        with self.log.writing() as append:
            append(entry)


def _measured(entry: Mapping[str, Any]) -> Measured:
    beside = entry["beside"]
    return Measured(
        entry["run"], entry["repeat"], Sample(**entry["sample"]), beside and Sample(**beside)
    )
