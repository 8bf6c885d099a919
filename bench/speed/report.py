"""Summarize samples as rows, and the rows as CSV, Markdown and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from results import (
    Interval,
    interval_cell,
    markdown_table,
    number_cell,
)
from speed.bound import least_round
from speed.engines import simulated_acceptance
from speed.grid import AR, AR_STOCK, SMC, STANDALONE, Cell
from speed.presets import Preset
from speed.ratios import Estimate, estimate, log_ratio
from speed.remote import Sample
from speed.store import CellLog, Measured

from sglang_smc.tools.plan.devices import Device


@dataclass(frozen=True)
class CellRow:
    """A cell's numbers; ``None`` for missing ones."""

    slug: str
    system: str
    family: str
    num_particles: int | None
    num_steps: int | None
    batch: int
    prompt: int
    pair: str
    dtype: str
    refused: str | None = None
    tokens_per_second: Interval | None = None  # of all requests together, end to end
    decode_tokens_per_second: Interval | None = None
    seconds_to_first: Interval | None = None  # mean over a batch's requests
    ratio_to_ar: Interval | None = None  # of decode tokens per second
    ratio_to_ar_end_to_end: Interval | None = None
    ratio_to_standalone: Interval | None = None  # likewise, the faster of chain and tree
    tokens_per_round: float | None = None
    simulated_tokens_per_round: float | None = None  # the acceptance that SGLang simulates
    round_seconds: Interval | None = None
    least_round_seconds: float | None = None
    least_round_bytes: float | None = None
    least_round_flops: float | None = None
    bound: str | None = None  # memory or compute
    fraction_of_bound: float | None = None
    retractions: int | None = None


def make_rows(
    known: Mapping[Cell, CellLog], preset: Preset, machine: Device | None
) -> list[CellRow]:
    """Return a row for each cell with samples or a refusal."""
    measured = {cell: log.measured() for cell, log in known.items()}
    ratios = {cell: _to_ar(cell, measured, attrgetter("decode_speed")) for cell in known}
    rows = []
    for cell, log in known.items():
        row = _identity(cell, preset)
        if log.refused():
            rows.append(replace(row, refused=log.refused()))
        elif measured[cell]:
            row = _with_samples(row, [one.sample for one in measured[cell]])
            row = _with_ratios(row, cell, ratios, measured)
            rows.append(_with_bound(row, cell, preset, machine))
    return rows


def _identity(cell: Cell, preset: Preset) -> CellRow:
    system = cell.system
    return CellRow(
        slug=cell.slug,
        system=system.name,
        family=system.family,
        num_particles=system.num_particles,
        num_steps=system.num_steps,
        batch=cell.batch,
        prompt=cell.prompt,
        pair=preset.pair.name,
        dtype=preset.pair.quantization or preset.dtype,
        simulated_tokens_per_round=simulated_acceptance(system, preset),
    )


def _with_samples(row: CellRow, samples: Sequence[Sample]) -> CellRow:
    passes = sum(sum(sample.passes) for sample in samples)
    return replace(
        row,
        tokens_per_second=_interval(s.speed for s in samples),
        decode_tokens_per_second=_interval(s.decode_speed for s in samples),
        seconds_to_first=_interval(sum(s.first) / len(s.first) for s in samples),
        tokens_per_round=sum(s.decode_tokens for s in samples) / passes,
        round_seconds=_interval(s.decode_seconds / s.rounds for s in samples),
        retractions=sum(info.get("num_retractions", 0) for s in samples for info in s.infos),
    )


def _interval(values: Any) -> Interval:
    return estimate(list(values)).interval()


def _to_ar(cell: Cell, measured: Mapping[Cell, list[Measured]], speed: Any) -> Estimate | None:
    """Return the log of a cell's speed over AR's, measured in turns or before and after."""
    ours = measured[cell]
    if cell.system.family == AR or not ours:
        return None
    if all(one.beside for one in ours):
        beside = [speed(one.beside) for one in ours]
        return log_ratio([speed(one.sample) for one in ours], beside, paired=True)
    runs = {one.run for one in ours}
    plain = [one for one in measured.get(cell.reference, []) if one.run in runs]
    if not plain:
        return None
    return log_ratio(
        [speed(one.sample) for one in ours], [speed(one.sample) for one in plain], paired=False
    )


def _with_ratios(
    row: CellRow,
    cell: Cell,
    ratios: Mapping[Cell, Estimate | None],
    measured: Mapping[Cell, list[Measured]],
) -> CellRow:
    ours, end_to_end = ratios[cell], _to_ar(cell, measured, attrgetter("speed"))
    if ours is None or end_to_end is None:
        return row
    rivals = [
        ratio
        for other, ratio in ratios.items()
        if ratio is not None
        and other.system.family in STANDALONE
        and (other.batch, other.prompt) == (cell.batch, cell.prompt)
    ]
    best = max(rivals, key=lambda ratio: ratio.mean, default=None)
    return replace(
        row,
        ratio_to_ar=ours.ratio(),
        ratio_to_ar_end_to_end=end_to_end.ratio(),
        ratio_to_standalone=ours.minus(best).ratio()
        if best and cell.system.family in SMC
        else None,
    )


def _with_bound(row: CellRow, cell: Cell, preset: Preset, machine: Device | None) -> CellRow:
    if machine is None or row.round_seconds is None:
        return row
    least = least_round(cell, preset)
    seconds = least.seconds(machine)
    return replace(
        row,
        least_round_seconds=seconds,
        least_round_bytes=least.bytes,
        least_round_flops=least.flops,
        bound=least.bound(machine),
        fraction_of_bound=seconds / row.round_seconds.mean,
    )


HEADERS = (
    "",
    "tokens / s",
    "decoding",
    "to AR",
    "to STANDALONE",
    "first token, ms",
    "tokens / round",
    "ms / round",
    "at least, ms",
    "of the bound",
)


def markdown(rows: Sequence[CellRow], note: str) -> str:
    """Return one table for each batch and prompt length."""
    parts = [note]
    for batch, prompt in sorted({(row.batch, row.prompt) for row in rows}):
        here = [row for row in rows if (row.batch, row.prompt) == (batch, prompt)]
        table = markdown_table(HEADERS, [_cells(row) for row in here if not row.refused])
        parts.append(f"**Batch {batch}, prompts of {prompt} tokens**\n\n{table}")
    refused = {row.system: row.refused for row in rows if row.refused}
    parts += [f"{system}: not run here: {reason}" for system, reason in refused.items()]
    return "\n\n".join(parts) + "\n"


def _cells(row: CellRow) -> list[str]:
    told = "" if row.simulated_tokens_per_round is None else " (simulated)"
    first, round_time = row.seconds_to_first, row.round_seconds
    return [
        row.system,
        number_cell(row.tokens_per_second and row.tokens_per_second.mean, ".1f"),
        number_cell(row.decode_tokens_per_second and row.decode_tokens_per_second.mean, ".1f"),
        interval_cell(row.ratio_to_ar, ".2f"),
        interval_cell(row.ratio_to_standalone, ".2f"),
        number_cell(first and 1000 * first.mean, ".1f"),
        number_cell(row.tokens_per_round, ".2f") + told,
        number_cell(round_time and 1000 * round_time.mean, ".2f"),
        number_cell(row.least_round_seconds and 1000 * row.least_round_seconds, ".2f"),
        number_cell(row.fraction_of_bound, ".0%"),
    ]


def conclusions(rows: Sequence[CellRow]) -> str:
    """Return the fastest setting at each batch and prompt length, and the plugin's cost for AR."""
    lines = []
    for batch, prompt in sorted({(row.batch, row.prompt) for row in rows}):
        here = [row for row in rows if (row.batch, row.prompt) == (batch, prompt)]
        fastest = max(
            (row for row in here if row.ratio_to_ar and row.family in SMC),
            key=lambda row: row.ratio_to_ar.mean if row.ratio_to_ar else 0.0,
            default=None,
        )
        if fastest:
            lines.append(_sentence(fastest, f"batch {batch}, prompt {prompt}: fastest SMC is"))
        lines += [
            _sentence(row, f"batch {batch}, prompt {prompt}:")
            for row in here
            if row.family == AR_STOCK and row.ratio_to_ar
        ]
    return "\n".join(lines)


def _sentence(row: CellRow, start: str) -> str:
    return f"{start} {row.system}, {interval_cell(row.ratio_to_ar, '.2f')} times AR"
