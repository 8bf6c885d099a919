"""Summarize samples as rows, and the rows as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from intervals import Interval, mean_of, speed_ratio
from results import interval_cell, number_cell, table
from speed import grid
from speed.remote import TimedBatch

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CellRow:
    """A cell's numbers; ``None`` for missing ones."""

    slug: str
    system: str
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
    ratio_to_fixed: Interval | None = None  # likewise, of an adaptive server to the fastest N, K
    tokens_per_round: float | None = None
    simulated_tokens_per_round: float | None = None  # the acceptance that SGLang simulates
    round_seconds: Interval | None = None
    replayed_share: float | None = None  # of rounds, from CUDA graphs


def make_rows(
    cells: Iterable[grid.SpeedCell], results: Results, preset: grid.Preset
) -> list[CellRow]:
    """Return a row for each cell with a result or a failure."""
    return [
        CellRow(
            slug=cell.slug,
            system=cell.system.name,
            batch=cell.batch,
            prompt=cell.prompt,
            pair=preset.pair.name,
            dtype=preset.pair.quantization or preset.number_format,
            simulated_tokens_per_round=grid.simulated_acceptance(cell.system, preset),
            refused=results[cell.slug].get("failed"),
            replayed_share=results[cell.slug].get("replayed_share"),
            **_numbers(cell, results, preset),
        )
        for cell in cells
        if cell.slug in results
    ]


def _numbers(cell: grid.SpeedCell, results: Results, preset: grid.Preset) -> dict[str, Any]:
    samples = samples_of(cell, results)
    if not samples:
        return {}

    def over(value: Callable[[TimedBatch], float]) -> Interval:
        return mean_of([value(sample) for sample in samples])

    return {
        "tokens_per_second": over(lambda s: s.speed),
        "decode_tokens_per_second": over(lambda s: s.decode_speed),
        "seconds_to_first": over(lambda s: sum(s.first) / len(s.first)),
        "tokens_per_round": sum(s.decode_tokens for s in samples)
        / max(1, sum(sum(s.passes) for s in samples)),
        "round_seconds": over(lambda s: s.round_seconds),
        **_ratios(cell, results, preset),
    }


def samples_of(cell: grid.SpeedCell, results: Results, key: str = "samples") -> list[TimedBatch]:
    """Return the samples of a cell; none of a failure."""
    return [TimedBatch(**sample) for sample in results.get(cell.slug, {}).get(key, ())]


def to_ar(cell: grid.SpeedCell, results: Results) -> list[float]:
    """Return the logs of a cell's decoding speeds over those of AR beside it."""
    pairs = zip(samples_of(cell, results), samples_of(cell, results, "beside"), strict=False)
    return [math.log(ours.decode_speed / plain.decode_speed) for ours, plain in pairs]


def _ratios(cell: grid.SpeedCell, results: Results, preset: grid.Preset) -> dict[str, Interval]:
    """Return a cell's ratios to AR and, for SMC, to the faster of SGLang's chain and tree.

    For an adaptive server also to the fastest of the preset's fixed sizes.

    Without AR beside it, the ratio is to the samples of AR's own cell.
    """
    logs = to_ar(cell, results)
    found = dict[str, Interval]()
    plain = replace(cell, system=grid.PLAIN)
    both = [samples_of(one, results) for one in (cell, plain)]
    if logs:
        found["ratio_to_ar"] = speed_ratio(logs)
    elif cell != plain and all(both):
        speeds = ([math.log(sample.decode_speed) for sample in some] for some in both)
        found["ratio_to_ar"] = speed_ratio(*speeds)
    if logs and cell.system.family in grid.SMC:
        stock = [grid.System(family) for family in grid.STANDALONE]
        found |= _to_fastest("ratio_to_standalone", logs, cell, stock, results)
    if logs and cell.system.family == grid.EXACT_ADAPTIVE:
        fixed = [grid.System(grid.EXACT, n, k) for n, k in preset.exact_sizes]
        found |= _to_fastest("ratio_to_fixed", logs, cell, fixed, results)
    return found


def _to_fastest(
    name: str,
    logs: Sequence[float],
    cell: grid.SpeedCell,
    systems: Iterable[grid.System],
    results: Results,
) -> dict[str, Interval]:
    """Return a cell's ratio to the fastest of some systems on its sizes; nothing without any."""
    beside = (replace(cell, system=system) for system in systems)
    rivals = [rival for other in beside if (rival := to_ar(other, results))]
    return {name: speed_ratio(logs, max(rivals, key=fmean))} if rivals else {}


# --- The table


def _mean(value: Interval | None, form: str, scale: float = 1.0) -> str:
    return number_cell(value and scale * value.mean, form)


def _per_round(row: CellRow) -> str:
    told = "" if row.simulated_tokens_per_round is None else " (simulated)"
    return number_cell(row.tokens_per_round, ".2f") + told


TO_STANDALONE = "to STANDALONE"
TO_FIXED = "to the best fixed"
COLUMNS: dict[str, Callable[[CellRow], str]] = {
    "": lambda row: row.system,
    "batch": lambda row: str(row.batch),
    "prompt": lambda row: str(row.prompt),
    "tokens / s": lambda row: _mean(row.tokens_per_second, ".1f"),
    "decoding": lambda row: _mean(row.decode_tokens_per_second, ".1f"),
    "to AR": lambda row: interval_cell(row.ratio_to_ar, ".2f"),
    TO_STANDALONE: lambda row: interval_cell(row.ratio_to_standalone, ".2f"),
    TO_FIXED: lambda row: interval_cell(row.ratio_to_fixed, ".2f"),
    "first token, ms": lambda row: _mean(row.seconds_to_first, ".1f", 1000),
    "tokens / round": _per_round,
    "ms / round": lambda row: _mean(row.round_seconds, ".2f", 1000),
    "replayed": lambda row: number_cell(row.replayed_share, ".0%"),
}


def markdown(rows: Sequence[CellRow], note: str) -> str:
    """Return a row for each cell that ran, those of a batch and prompt together; and the others."""
    ran = [row for row in rows if not row.refused]
    ran.sort(key=lambda row: (row.batch, row.prompt))
    refused = {row.slug: f"- {row.slug}: {short(row.refused)}" for row in rows if row.refused}
    is_grid = any(row.ratio_to_fixed for row in ran)  # has no rival but its own fixed sizes
    unused = TO_STANDALONE if is_grid else TO_FIXED
    told = {name: cell for name, cell in COLUMNS.items() if name != unused}
    return "\n\n".join([note, table(told, ran), "\n".join(refused.values())]).rstrip() + "\n"


def short(text: str) -> str:
    """Return a failure in one line."""
    return " ".join(text.split())[:300]
