"""From records to rows, and the rows as CSV, as Markdown and as two sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import results
from fidelity.bounding import Divergence
from fidelity.grid import AR_DRAFT, AR_TARGET, Cell
from fidelity.stats import mean_interval, paired_difference
from fidelity.store import Record, seconds
from results import (
    Interval,
    ess_share,
    interval_cell,
    interval_columns,
    markdown_table,
    number_cell,
    resample_rate,
    short,
    wilson,
)

from sglang_smc.demo.serving import tokens_per_pass
from sglang_smc.options.server import DEFAULTS


@dataclass(frozen=True)
class CellRow:
    """A cell's numbers; ``None`` where a number makes no sense for it."""

    slug: str
    family: str
    temperature: float
    mode: str | None
    num_particles: int | None
    num_steps: int | None
    resample_at: str | None
    evidence_threshold: float | None  # that of `auto` and the default too
    label: str  # without the temperature
    accuracy: Interval
    difference: Interval | None
    tokens_per_pass: float | None
    tokens_per_second: float
    ess_share: float | None
    resample_rate: float | None
    exact_rate: float | None  # the share of rounds that verified instead of weighing
    divergence: Divergence
    completion_tokens: int
    seconds: float


def make_rows(
    records: Mapping[Cell, list[Record]], bounds: Mapping[Cell, Divergence]
) -> list[CellRow]:
    """A row for each complete cell, held against the target at the same temperature."""
    references = {
        cell.temperature: _right(found)
        for cell, found in records.items()
        if cell.kind.family == AR_TARGET
    }
    rows = []
    for cell, found in records.items():
        reference = references.get(cell.temperature, {})
        divergence = _with_evidence(cell, found, bounds.get(cell, Divergence()))
        rows.append(_row(cell, found, reference, divergence))
    return rows


def _right(records: Sequence[Record]) -> dict[Any, bool]:
    return {record.index: record.right for record in records}


def _row(
    cell: Cell, records: list[Record], reference: Mapping[Any, bool], divergence: Divergence
) -> CellRow:
    infos = [record.info for record in records]
    smc = cell.kind.smc or {}
    mode = smc.get("mode", DEFAULTS.mode) if smc else None
    weighed = infos if mode == "smc" else []  # the others keep no population
    tokens, spent = sum(info["completion_tokens"] for info in infos), seconds(records)
    is_reference = cell.kind.family == AR_TARGET
    return CellRow(
        slug=cell.slug,
        family=cell.kind.family,
        temperature=cell.temperature,
        mode=mode,
        num_particles=smc.get("num_particles"),
        num_steps=smc.get("num_steps"),
        resample_at=smc.get("resample_at"),
        evidence_threshold=cell.kind.evidence_threshold,
        label=cell.kind.name,
        accuracy=wilson(sum(record.right for record in records), len(records)),
        difference=None if is_reference else paired_difference(_right(records), reference),
        tokens_per_pass=None if cell.kind.family == AR_DRAFT else tokens_per_pass(infos),
        tokens_per_second=tokens / max(spent, 1e-9),
        ess_share=ess_share(weighed),
        resample_rate=resample_rate(weighed),
        exact_rate=None if mode == "smc" else _exact_rate(infos),
        divergence=divergence,
        completion_tokens=tokens,
        seconds=spent,
    )


def _exact_rate(infos: Sequence[Mapping[str, Any]]) -> float | None:
    counted = [info for info in infos if "spec_smc_exact_ct" in info]
    rounds = sum(info["spec_verify_ct"] for info in counted)
    return sum(info["spec_smc_exact_ct"] for info in counted) / rounds if rounds else None


def _with_evidence(cell: Cell, records: Sequence[Record], found: Divergence) -> Divergence:
    """The upper bound from all answers, -E[log Z], beside those of few problems."""
    key = "spec_smc_log_evidence"
    logs = [record.info[key] for record in records if key in record.info]
    if not (cell.is_pure_smc and logs):
        return found
    upper = mean_interval([-value for value in logs])
    return replace(found, upper=upper)


def write_csv(rows: Sequence[CellRow], path: Path, provenance: Mapping[str, Any]) -> None:
    """One line for each cell; every interval in four columns."""
    results.write_csv([flat(row) for row in rows], path, provenance)


def flat(row: CellRow) -> dict[str, Any]:
    """A row without nesting."""
    content: dict[str, Any] = {}
    for name, value in {**vars(row), **_divergences(row)}.items():
        if name in INTERVALS:
            content |= interval_columns(name, value)
        elif name != "divergence":
            content[name] = short(value)
    return content


def _divergences(row: CellRow) -> dict[str, Interval | None]:
    values = row.divergence
    return {f"kl_{field.name}": getattr(values, field.name) for field in fields(values)}


INTERVALS = ("accuracy", "difference", *(f"kl_{field.name}" for field in fields(Divergence)))


HEADERS = (
    "",
    "accuracy",
    "points from AR target",
    "tokens / target pass",
    "tokens / s",
    "ESS / N",
    "resampled",
    "exact rounds",
    "KL(SMC, target), nats: at most",
    "few problems: at least",
    "at most",
    "KL(target, SMC): at most",
)


def markdown(rows: Sequence[CellRow], note: str) -> str:
    """One table for each temperature, below each other."""
    parts = [note]
    for temperature in sorted({row.temperature for row in rows}):
        lines = [_cells(row) for row in rows if row.temperature == temperature]
        parts.append(f"**Temperature {temperature:g}**\n\n{markdown_table(HEADERS, lines)}")
    return "\n\n".join(parts) + "\n"


def _cells(row: CellRow) -> list[str]:
    divergence = row.divergence
    return [
        row.label,
        interval_cell(row.accuracy, ".1f", scale=100),
        interval_cell(row.difference, "+.1f", scale=100),
        number_cell(row.tokens_per_pass, ".2f"),
        f"{row.tokens_per_second:.0f}",
        number_cell(row.ess_share, ".2f"),
        number_cell(row.resample_rate, ".0%"),
        number_cell(row.exact_rate, ".0%"),
        interval_cell(divergence.upper, ".2f"),
        interval_cell(divergence.lower, ".2f"),
        interval_cell(divergence.tight_upper, ".2f"),
        interval_cell(divergence.reverse_upper, ".2f"),
    ]


def fastest_within(rows: Sequence[CellRow], points: float) -> CellRow | None:
    """Of the rows that lost at most ``points`` (the paired estimate), the one with most tokens."""
    close = [
        row
        for row in rows
        if row.difference is not None
        and row.tokens_per_pass is not None
        and row.difference.mean >= -points / 100
    ]
    return max(close, key=lambda row: row.tokens_per_pass or 0.0, default=None)


def conclusions(rows: Sequence[CellRow]) -> str:
    """For each temperature: how far SMC gets within three points, and any mode within one."""
    lines = []
    for temperature in sorted({row.temperature for row in rows}):
        here = [row for row in rows if row.temperature == temperature]
        pure = [row for row in here if row.mode == "smc"]
        lines += [
            f"Temperature {temperature:g}:",
            f"  most tokens a pass, SMC within 3 points:      {_winner(pure, 3)}",
            f"  most tokens a pass, any mode within 1 point:  {_winner(here, 1)}",
        ]
    return "\n".join(lines)


def _winner(rows: Sequence[CellRow], points: float) -> str:
    row = fastest_within(rows, points)
    if row is None:
        return "none" if any(other.difference for other in rows) else "none was measured"
    return (
        f"{row.label}: {row.tokens_per_pass:.2f}, "
        f"{interval_cell(row.difference, '+.1f', scale=100)} points"
    )
