"""From answers to a table: intervals, the rows to compare, and where the numbers come from."""

from __future__ import annotations

import csv
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from chat import Pass
from tabulate import tabulate

Z95 = 1.959964
PACKAGES = ("sglang-smc", "sglang", "torch", "transformers", "openai")


class Interval(NamedTuple):
    """An estimate with its 95 % interval; ``n`` is the number of trials."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Row:
    """One server's numbers; ``None`` where a number makes no sense for it."""

    name: str
    accuracy: Interval
    tokens_per_target_pass: float | None
    tokens_per_second: float
    seconds_to_first: float
    seconds_per_request: float
    ess_share: float | None
    resample_rate: float | None
    completion_tokens: int
    seconds: float


def wilson(hits: int, n: int, z: float = Z95) -> Interval:
    """A proportion with Wilson's interval, which stays inside 0 to 1 at both ends."""
    mean, spread = hits / n, z * z / n
    middle = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(mean * (1 - mean) * spread + spread * spread / 4) / (1 + spread)
    return Interval(mean, max(0.0, middle - half), min(1.0, middle + half), n)


def tokens_per_pass(meta_infos: list[dict[str, Any]]) -> float:
    """Tokens for each decoding pass of the target; exactly 1 without speculation.

    The pass over the prompt yields the first token in every server, so both are left out.
    """
    tokens = sum(info["completion_tokens"] - 1 for info in meta_infos)
    passes = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in meta_infos)
    return tokens / max(1, passes)


def ess_share(meta_infos: list[dict[str, Any]]) -> float | None:
    """Mean over rounds of the effective sample size, as a share of N."""
    rounds = _rounds(meta_infos)
    if not rounds:
        return None
    total = sum(
        info["spec_smc_ess_mean"] / info["spec_smc_num_particles"] * info["spec_smc_rounds_ct"]
        for info in meta_infos
    )
    return total / rounds


def resample_rate(meta_infos: list[dict[str, Any]]) -> float | None:
    """The share of rounds that resampled."""
    rounds = _rounds(meta_infos)
    return sum(info["spec_smc_resample_ct"] for info in meta_infos) / rounds if rounds else None


def _rounds(meta_infos: list[dict[str, Any]]) -> int:
    return sum(info.get("spec_smc_rounds_ct", 0) for info in meta_infos)


def summarise(name: str, run: Pass, *, uses_target: bool = True) -> Row:
    """The row of one server."""
    infos, n = list(run.meta_infos.values()), len(run.answers)
    tokens = sum(info["completion_tokens"] for info in infos)
    return Row(
        name=name,
        accuracy=wilson(sum(answer.right for answer in run.answers), n),
        tokens_per_target_pass=tokens_per_pass(infos) if uses_target else None,
        tokens_per_second=tokens / run.seconds,
        seconds_to_first=sum(answer.seconds_to_first for answer in run.answers) / n,
        seconds_per_request=sum(answer.seconds for answer in run.answers) / n,
        ess_share=ess_share(infos),
        resample_rate=resample_rate(infos),
        completion_tokens=tokens,
        seconds=run.seconds,
    )


HEADERS = (
    "",
    "accuracy\n[95 %]",
    "n",
    "tokens\n/ target\npass",
    "tokens\n/ s",
    "first\ntoken",
    "whole\nanswer",
    "mean\nESS / N",
    "resampled\nrounds",
)


def table(rows: list[Row]) -> str:
    """The rows side by side, for a terminal."""
    cells = [_cells(row) for row in rows]
    align = ("left", *["right"] * (len(HEADERS) - 1))
    return tabulate(cells, HEADERS, tablefmt="simple", colalign=align, disable_numparse=True)


def _cells(row: Row) -> list[str]:
    mean, low, high, n = row.accuracy
    return [
        row.name,
        f"{mean:.1%} [{100 * low:.1f}, {100 * high:.1f}]",
        str(n),
        number_cell(row.tokens_per_target_pass, ".2f", "-"),
        f"{row.tokens_per_second:.0f}",
        f"{1000 * row.seconds_to_first:.0f} ms",
        f"{row.seconds_per_request:.2f} s",
        number_cell(row.ess_share, ".2f", "-"),
        number_cell(row.resample_rate, ".0%", "-"),
    ]


def answer_lines(name: str, run: Pass) -> list[dict[str, Any]]:
    """One entry for each answer: what the client saw, and what the server said about it."""
    return [
        {"server": name, **asdict(answer), "meta_info": run.meta_infos[answer.request_id]}
        for answer in run.answers
    ]


def interval_columns(name: str, value: Interval | None) -> dict[str, float | None]:
    """An interval as four columns of a CSV, empty ones where there is none."""
    values = value or (None,) * len(Interval._fields)
    parts = zip(Interval._fields, values, strict=True)
    return {f"{name}_{part}": short(number) for part, number in parts}


def short(value: Any) -> Any:
    """A number with the digits that are worth keeping; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_csv(
    lines: Sequence[Mapping[str, Any]], path: Path, provenance: Mapping[str, Any]
) -> None:
    """One line for each row, with where it comes from in columns of their own."""
    origin = {key: provenance[key] for key in ("date", "git_sha", "hardware")}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, **origin} for line in lines)


def markdown_table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells below headers; all but the first column are numbers."""
    rule = ["---"] + ["---:"] * (len(headers) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headers, rule, *lines])


def interval_cell(value: Interval | None, form: str, scale: float = 1.0) -> str:
    """An interval for a table; nothing where there is none."""
    if value is None:
        return ""
    mean, low, high = (format(scale * number, form) for number in value[:3])
    return f"{mean} [{low}, {high}]"


def number_cell(value: float | None, form: str, missing: str = "") -> str:
    """A number for a table."""
    return missing if value is None else format(value, form)


def provenance(repository: Path) -> dict[str, Any]:
    """What one needs to know to make the numbers again."""
    return {
        "argv": sys.argv,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_sha": _git(repository, "rev-parse", "HEAD"),
        "git_changes": bool(_git(repository, "status", "--porcelain")),
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "hardware": hardware(),
        "load_average": list(os.getloadavg()),
    }


def hardware() -> str:
    """What SGLang runs on here: the accelerator's name, else the number of CPUs."""
    import torch  # takes seconds to import, and is needed once all is measured

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPUs"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(repository: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
