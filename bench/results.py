"""Summarize SMC's server statistics; write rows as CSV, tables and plots, with provenance."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from intervals import Interval, ratio
from study import REPOSITORY, copy

from sglang_smc.command.machine import installed

PACKAGES = ("sglang-smc", "sglang", "torch", "transformers", "openai", "triton", "sglang-kernel")
#: The tree's commit, for a copy without history; see CONTRIBUTING.md, "On a GPU".
COMMIT = REPOSITORY / ".sg" / "commit.txt"
GPU = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory")


def over_rounds(meta_infos: Sequence[Mapping[str, Any]], key: str, per: str) -> float | None:
    """Return the mean of ``key / per`` over answers, weighted by their rounds; None without any."""
    rounds = [info.get("spec_smc_rounds_ct", 0) for info in meta_infos]
    shares = [n and info[key] / info[per] * n for n, info in zip(rounds, meta_infos, strict=True)]
    return sum(shares) / sum(rounds) if any(rounds) else None


def tokens_a_pass(meta_infos: Sequence[Mapping[str, Any]]) -> Interval:
    """Return the tokens per target pass, without prefill and its token; 1 of plain decoding."""
    return ratio(*tokens_and_passes(meta_infos))


def tokens_and_passes(meta_infos: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return each answer's tokens after the first, and its target passes after prefill, ``[n]``."""
    tokens = [info["completion_tokens"] - 1 for info in meta_infos]
    passes = [info.get("spec_verify_ct") or n for info, n in zip(meta_infos, tokens, strict=True)]
    return np.array(tokens, dtype=float), np.array(passes, dtype=float)


def by_temperature(rows: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the rows of each temperature, by its title."""
    ordered = sorted(rows, key=lambda row: row.temperature)
    groups = groupby(ordered, key=lambda row: row.temperature)
    return {f"Temperature {temperature:g}": list(some) for temperature, some in groups}


# --- Rows, dataclasses of numbers and intervals, as files

R = TypeVar("R")


def flat(row: Any) -> dict[str, Any]:
    """Return a row without nesting: each interval in four columns."""
    content: dict[str, Any] = {}
    for field in fields(row):
        value = getattr(row, field.name)
        if "Interval" in str(field.type):
            names = (f"{field.name}_{part}" for part in Interval._fields)
            content |= dict(zip(names, value or (None,) * 4, strict=True))
        else:
            content[field.name] = value
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in content.items()}


def _row(kind: type[R], line: Mapping[str, str]) -> R:
    content: dict[str, Any] = {}
    for field in fields(kind):
        name = field.name
        said = str(field.type)
        if "Interval" in said:
            parts = [_number(line.get(f"{name}_{part}", "")) for part in Interval._fields]
            content[name] = None if parts[0] is None else Interval(*parts)
        elif "str" in said:
            content[name] = line[name] or ("" if said == "str" else None)
        else:
            content[name] = _number(line[name])
    return kind(**content)


def _number(text: str) -> Any:
    return float(text) if text in ("inf", "-inf", "nan") else json.loads(text or "null")


@dataclass(frozen=True)
class Report(Generic[R]):
    """The files of a study: rows as CSV, their table and plot, their provenance.

    Args:
        name: of the study and its files.
        row: the dataclass of a row.
        markdown: returns a page of rows, below a note.
        plot: draws the rows into a PNG.
    """

    name: str
    row: type[R]
    markdown: Callable[[Sequence[R], str], str]
    plot: Callable[[Sequence[R], Path], None] | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the provenance, the CSV, the table and the plot, if any."""
        ends = ("csv", "md", "png") if self.plot else ("csv", "md")
        return ("provenance.json", *(f"{self.name}.{end}" for end in ends))

    def write(
        self,
        folder: Path,
        rows: Sequence[R],
        settings: Mapping[str, Any],
        note: Callable[[Mapping[str, Any]], str],
    ) -> str:
        """Write all files, with a note on the provenance above the table; return the page."""
        source, numbers, page, *picture = (folder / name for name in self.files)
        origin = provenance(settings)
        source.write_text(json.dumps(origin, indent=2, default=str) + "\n")
        columns = {key: origin[key] for key in ("date", "git_sha", "hardware")}
        lines = [{**flat(row), **columns} for row in rows]
        with numbers.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        text = self.markdown(self.read(folder), note(origin))
        page.write_text(text)
        if self.plot:
            self.plot(self.read(folder), picture[0])
        return text

    def publish(self, folder: Path, to: Path) -> None:
        """Copy all files of a folder to one of the repository."""
        copy((folder / name for name in self.files), to)

    def read(self, folder: Path) -> list[R]:
        """Return the rows in a folder; other columns are ignored, and missing intervals None."""
        with (folder / f"{self.name}.csv").open() as file:
            return [_row(self.row, line) for line in csv.DictReader(file)]


def markdown_table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells below headers; all columns but the first are numbers."""
    rule = ["---"] + ["---:"] * (len(headers) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headers, rule, *lines])


def table(columns: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]) -> str:
    """Return a table with a line for each row; columns map a header to a row's cell."""
    lines = [[cell(row) for cell in columns.values()] for row in rows]
    return markdown_table(list(columns), lines)


def interval_cell(value: Interval | None, form: str, scale: float = 1.0) -> str:
    """Return an interval as a table cell, empty for None."""
    if value is None:
        return ""
    mean, low, high = (format(scale * number, form) for number in value[:3])
    return f"{mean} [{low}, {high}]"


def number_cell(value: float | None, form: str) -> str:
    """Return a number as a table cell, empty for None."""
    return "" if value is None else format(value, form)


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of numbers: settings, versions, hardware and date.

    Settings instead of the command line, which may name folders of this machine.
    """
    travelling = COMMIT.read_text().strip() if COMMIT.exists() else None
    return {
        "settings": dict(settings),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_sha": _git("rev-parse", "HEAD") or travelling,
        "git_changes": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version()}
        | {package: installed(package) for package in PACKAGES},
        "platform": platform.platform(),
        "hardware": hardware(),
        "gpu": gpu(*GPU),
        "load_average": list(os.getloadavg()),
    }


def hardware() -> str:
    """Return the device that SGLang uses here: the accelerator's name, else the number of CPUs."""
    import torch  # slow to import, and needed only after the measurement

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPUs"


def gpu(*names: str) -> dict[str, str] | None:
    """Return what the driver says of the first GPU; None without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(names, map(str.strip, done.stdout.split(",")), strict=True))


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
