"""Split the time of an SMC round into the kernels of its models, its own, and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import results
from charts import legend_below, picture, shade
from gpu.replays import part_of
from intervals import Interval, log_ratio
from results import interval_cell, interval_columns, markdown_table, number_cell, short
from speed.grid import Cell
from study import BenchError

BETWEEN = "between rounds"  # the scheduler
GAPS = "gaps"  # time of a round during which no kernel runs
NOTE = (
    "In ms. Rounds are timed by CUDA events; parts are sums of their kernels by name, in other "
    "rounds that torch's profiler saw. Forwards are the kernels of both models; the ratio is of a "
    "whole round over these, with a 95 % interval. Gaps are what no kernel fills."
)


@dataclass(frozen=True)
class RoundRow:
    """A round of one cell, in seconds; medians over rounds, except the ratio and the parts."""

    slug: str
    system: str
    batch: int
    prompt: int
    rounds: int
    round_seconds: float
    forwards_seconds: float | None  # None without kernels, as on a CPU
    ratio_to_forwards: Interval | None
    parts: dict[str, float]


def make_row(cell: Cell, bursts: Sequence[Mapping[str, Any]]) -> RoundRow:
    """Return the row of a cell from the timers' output, without rounds of fewer requests."""
    whole = [
        one["round"]
        for burst in bursts
        for one in burst["rounds"]
        if one["batch"] == cell.batch and not one["recorded"]  # the profiler costs time
    ]
    if not whole:
        raise BenchError(f"All rounds of {cell.name} were profiled: its answers are too short.")
    kernels = [burst["kernels"] for burst in bursts if burst["kernels"]]
    forwards = list(chain.from_iterable(one["forwards"] for one in kernels))
    busy = list(chain.from_iterable(one["busy"] for one in kernels))
    parts: dict[str, float] = {}
    total = sum(one["rounds"] for one in kernels)
    for one in kernels:
        for phase, kind, *_, seconds in one["sums"]:
            part = part_of(phase, kind)
            parts[part] = parts.get(part, 0.0) + seconds * one["rounds"] / total
    if busy:
        parts[GAPS] = max(0.0, median(whole) - fmean(busy))
    return RoundRow(
        slug=cell.slug,
        system=cell.system.name,
        batch=cell.batch,
        prompt=cell.prompt,
        rounds=len(whole),
        round_seconds=median(whole),
        forwards_seconds=median(forwards) if forwards else None,
        ratio_to_forwards=log_ratio(whole, forwards, paired=False).ratio() if forwards else None,
        parts={**parts, BETWEEN: _between(bursts, cell.batch)},
    )


def _between(bursts: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Return the median time from the end of a round to the start of the next: the scheduler.

    A step begins just before its round, so the difference of their lengths is the time between.
    """
    found = [
        later - earlier - one["round"]
        for burst in bursts
        for ((earlier, _), (later, _)), one in zip(
            pairwise(burst["steps"]), burst["rounds"], strict=False
        )
        if one["batch"] == batch and not one["recorded"]
    ]
    return median(found) if found else 0.0


def part_names(rows: Sequence[RoundRow]) -> list[str]:
    """Return the parts of all rows, the largest first."""
    names = dict.fromkeys(name for row in rows for name in row.parts)
    return sorted(names, key=lambda name: -fmean(row.parts.get(name, 0.0) for row in rows))


def write_csv(rows: Sequence[RoundRow], path: Path, provenance: Mapping[str, Any]) -> None:
    """Write one line for each cell."""
    lines, names = [], part_names(rows)
    for row in rows:
        line = {k: v for k, v in vars(row).items() if k not in ("parts", "ratio_to_forwards")}
        line |= interval_columns("ratio_to_forwards", row.ratio_to_forwards)
        line |= {f"{name.replace(' ', '_')}_seconds": row.parts.get(name) for name in names}
        lines.append({name: short(value) for name, value in line.items()})
    results.write_csv(lines, path, provenance)


def markdown(rows: Sequence[RoundRow]) -> str:
    """Return a table with the milliseconds of each round and its parts."""
    names = part_names(rows)
    headers = ["", "batch", "prompt", "ms / round", "forwards", "ratio", *names]
    lines = [
        [
            row.system,
            str(row.batch),
            str(row.prompt),
            _ms(row.round_seconds),
            _ms(row.forwards_seconds),
            interval_cell(row.ratio_to_forwards, ".2f"),
            *(_ms(row.parts.get(name, 0.0)) for name in names),
        ]
        for row in rows
    ]
    return f"{NOTE}\n\n{markdown_table(headers, lines)}\n"


def _ms(value: float | None) -> str:
    return number_cell(value and 1000 * value, ".2f")


def plot_rows(rows: Sequence[RoundRow], path: Path, *, title: str) -> None:
    """Plot each cell's round as a bar of its parts, and a mark for its forwards."""
    with picture(path, (11, 1.8 + 0.5 * len(rows))) as (figure, ((axes,),)):
        labels = [f"{row.system}, batch {row.batch}, {row.prompt}" for row in rows]
        left = [0.0] * len(rows)
        for place, name in enumerate(part_names(rows)):
            widths = [max(0.0, 1000 * row.parts.get(name, 0.0)) for row in rows]
            axes.barh(labels, widths, left=left, label=name, **shade(place))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        forwards = [1000 * (row.forwards_seconds or 0.0) for row in rows]
        axes.plot(forwards, labels, "k|", ms=18, mew=2, label="forwards")
        axes.invert_yaxis()
        axes.set(xlabel="ms a round", title=title)
        legend_below(figure, axes, ncols=6)
