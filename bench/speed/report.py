"""Summarize samples as rows, and the rows as CSV, Markdown and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from intervals import Interval, mean_of, speed_ratio
from results import interval_cell, number_cell, table
from speed.bound import least_round
from speed.grid import SMC, STANDALONE, Cell, System, simulated_acceptance
from speed.measure import CellLog, Measured
from speed.presets import Preset
from speed.remote import Sample

from sglang_smc.tools.plan.devices import Device


@dataclass(frozen=True)
class CellRow:
    """A cell's numbers; ``None`` for missing ones."""

    slug: str
    system: str
    family: str
    batch: int
    prompt: int
    pair: str
    dtype: str
    refused: str | None = None
    tokens_per_second: Interval | None = None  # of all requests together, end to end
    decode_tokens_per_second: Interval | None = None
    seconds_to_first: Interval | None = None  # mean over a batch's requests
    ratio_to_ar: Interval | None = None  # of decode tokens per second
    ratio_to_standalone: Interval | None = None  # likewise, the faster of chain and tree
    tokens_per_round: float | None = None
    simulated_tokens_per_round: float | None = None  # the acceptance that SGLang simulates
    round_seconds: Interval | None = None
    least_round_seconds: float | None = None
    fraction_of_bound: float | None = None


def make_rows(
    known: Mapping[Cell, CellLog], preset: Preset, machine: Device | None
) -> list[CellRow]:
    """Return a row for each cell with samples or a refusal."""
    measured = {cell: log.measured() for cell, log in known.items()}
    logs = {cell: _to_ar(some) for cell, some in measured.items()}
    rows = []
    for cell, log in known.items():
        row = _identity(cell, preset)
        if log.refused():
            rows.append(replace(row, refused=log.refused()))
        elif measured[cell]:
            numbers = _numbers([one.sample for one in measured[cell]])
            row = replace(row, **numbers, **_ratios(cell, logs))
            rows.append(_with_bound(row, cell, preset, machine))
    return rows


def _identity(cell: Cell, preset: Preset) -> CellRow:
    system = cell.system
    return CellRow(
        slug=cell.slug,
        system=system.name,
        family=system.family,
        batch=cell.batch,
        prompt=cell.prompt,
        pair=preset.pair.name,
        dtype=preset.pair.quantization or preset.dtype,
        simulated_tokens_per_round=simulated_acceptance(system, preset),
    )


def _numbers(samples: Sequence[Sample]) -> dict[str, Any]:
    def over(value: Callable[[Sample], float]) -> Interval:
        return mean_of([value(sample) for sample in samples])

    passes = sum(sum(sample.passes) for sample in samples)
    return {
        "tokens_per_second": over(lambda s: s.speed),
        "decode_tokens_per_second": over(lambda s: s.decode_speed),
        "seconds_to_first": over(lambda s: sum(s.first) / len(s.first)),
        "tokens_per_round": sum(s.decode_tokens for s in samples) / passes,
        "round_seconds": over(lambda s: s.decode_seconds / s.rounds),
    }


def _to_ar(ours: Sequence[Measured]) -> list[float]:
    """Return the logs of a cell's decoding speed over AR's, measured in turns."""
    pairs = [(one.sample.decode_speed, one.beside.decode_speed) for one in ours if one.beside]
    return [math.log(speed / plain) for speed, plain in pairs]


def _ratios(cell: Cell, logs: Mapping[Cell, list[float]]) -> dict[str, Interval]:
    """Return a cell's ratios to AR and, for SMC, to the faster of SGLang's chain and tree."""
    if not logs[cell]:
        return {}
    found = {"ratio_to_ar": speed_ratio(logs[cell])}
    beside = (Cell(System(family), cell.batch, cell.prompt) for family in STANDALONE)
    rivals = [logs[other] for other in beside if logs.get(other)]
    if rivals and cell.system.family in SMC:
        found["ratio_to_standalone"] = speed_ratio(logs[cell], max(rivals, key=fmean))
    return found


def _with_bound(row: CellRow, cell: Cell, preset: Preset, machine: Device | None) -> CellRow:
    if machine is None or row.round_seconds is None:
        return row
    seconds = least_round(cell, preset).seconds(machine)
    fraction = seconds / row.round_seconds.mean
    return replace(row, least_round_seconds=seconds, fraction_of_bound=fraction)


def _ms(seconds: float | None, form: str) -> str:
    return number_cell(seconds and 1000 * seconds, form)


def _mean(value: Interval | None) -> float | None:
    return value and value.mean


def _per_round(row: CellRow) -> str:
    told = "" if row.simulated_tokens_per_round is None else " (simulated)"
    return number_cell(row.tokens_per_round, ".2f") + told


COLUMNS: dict[str, Callable[[CellRow], str]] = {
    "": lambda row: row.system,
    "tokens / s": lambda row: number_cell(_mean(row.tokens_per_second), ".1f"),
    "decoding": lambda row: number_cell(_mean(row.decode_tokens_per_second), ".1f"),
    "to AR": lambda row: interval_cell(row.ratio_to_ar, ".2f"),
    "to STANDALONE": lambda row: interval_cell(row.ratio_to_standalone, ".2f"),
    "first token, ms": lambda row: _ms(_mean(row.seconds_to_first), ".1f"),
    "tokens / round": _per_round,
    "ms / round": lambda row: _ms(_mean(row.round_seconds), ".2f"),
    "at least, ms": lambda row: _ms(row.least_round_seconds, ".2f"),
    "of the bound": lambda row: number_cell(row.fraction_of_bound, ".0%"),
}


def markdown(rows: Sequence[CellRow], note: str) -> str:
    """Return one table for each batch and prompt length."""
    parts = [note]
    for batch, prompt in sorted({(row.batch, row.prompt) for row in rows}):
        here = [row for row in rows if (row.batch, row.prompt) == (batch, prompt)]
        ran = table(COLUMNS, [row for row in here if not row.refused])
        parts.append(f"**Batch {batch}, prompts of {prompt} tokens**\n\n{ran}")
    refused = {row.system: row.refused for row in rows if row.refused}
    parts += [f"{system}: not run here: {reason}" for system, reason in refused.items()]
    return "\n\n".join(parts) + "\n"
