"""Split the time of an SMC round into parts, and compare it with its model forwards alone."""

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
from results import Interval, interval_cell, interval_columns, markdown_table, short
from speed.grid import Cell
from speed.ratios import log_ratio
from study import BenchError

DRAFT, TARGET, BETWEEN = "draft forwards", "target forward", "between rounds"
GAPS = "gaps"  # time of a replayed round during which no kernel runs
#: Notes on the table of parts, by the method of measurement.
RUN_AGAIN = (
    "Medians in ms. The ratio is of a whole round over its own forwards, run again alone on the "
    "same rows, with a 95 % interval. Parts are without the forwards in them."
)
REPLAYED = (
    "In ms. Rounds are replayed from CUDA graphs and timed by CUDA events; parts are sums of their "
    "kernels by name, in other rounds that torch's profiler saw. Forwards alone are the kernels of "
    "both models; the ratio is of a whole round over these, with a 95 % interval. Gaps are what no "
    "kernel fills."
)


@dataclass(frozen=True)
class RoundRow:
    """A round of one cell, in seconds; medians over rounds, except the ratio."""

    slug: str
    system: str
    batch: int
    prompt: int
    rounds: int
    round_seconds: float
    forwards_alone_seconds: float
    #: A round over its forwards alone; both from the same round if the forwards were repeated.
    ratio_to_forwards: Interval
    parts: dict[str, float]  # of a round without forwards, then forwards and scheduler
    replayed: bool = False  # from a CUDA graph: forwards and parts are sums of kernels


def make_row(cell: Cell, entries: Sequence[Mapping[str, Any]]) -> RoundRow:
    """Return the row of a cell from the timers' output, without rounds of fewer requests."""
    bursts = [burst for entry in entries for burst in entry["bursts"]]
    replayed = [burst["replays"] for burst in bursts if burst.get("replays")]
    if replayed:
        return _of_replays(cell, bursts, replayed)
    rounds = [one for burst in bursts for one in burst["rounds"] if _counts(one, cell)]
    both = [one for one in rounds if one["alone"]]
    if not both:
        raise BenchError(
            f"No forwards were seen in the rounds of {cell.name}: they run from a CUDA graph, and "
            "the profiler saw no kernels of it."
        )
    whole, alone = [one["round"] for one in both], [one["alone"] for one in both]
    names = dict.fromkeys(name for one in rounds for name in one["parts"])
    parts = {name: median(one["parts"].get(name, 0.0) for one in rounds) for name in names}
    return RoundRow(
        slug=cell.slug,
        system=cell.system.name,
        batch=cell.batch,
        prompt=cell.prompt,
        rounds=len(rounds),
        round_seconds=median(one["round"] for one in rounds),
        forwards_alone_seconds=median(alone),
        ratio_to_forwards=log_ratio(whole, alone, paired=True).ratio(),
        parts={
            DRAFT: median(one["forwards"]["draft"] for one in rounds),
            TARGET: median(one["forwards"]["target"] for one in rounds),
            **parts,
            BETWEEN: _between(bursts, cell.batch),
        },
    )


def _counts(one: Mapping[str, Any], cell: Cell) -> bool:
    """Return whether a round has all requests, and no profiler, which costs time."""
    return one["batch"] == cell.batch and not one.get("recorded")


def _of_replays(
    cell: Cell, bursts: Sequence[Mapping[str, Any]], replayed: Sequence[Mapping[str, Any]]
) -> RoundRow:
    """Return a row with kernel sums of profiled rounds as parts; other rounds give the time."""
    whole = [one["round"] for burst in bursts for one in burst["rounds"] if _counts(one, cell)]
    if not whole:
        raise BenchError(f"All rounds of {cell.name} were profiled: its answers are too short.")
    forwards = list(chain.from_iterable(one["forwards"] for one in replayed))
    busy = list(chain.from_iterable(one["busy"] for one in replayed))
    parts: dict[str, float] = {}
    for one in replayed:
        for phase, kind, *_, seconds in one["sums"]:
            part = part_of(phase, kind)
            parts[part] = parts.get(part, 0.0) + seconds * one["rounds"] / len(busy)
    return RoundRow(
        slug=cell.slug,
        system=cell.system.name,
        batch=cell.batch,
        prompt=cell.prompt,
        rounds=len(whole),
        round_seconds=median(whole),
        forwards_alone_seconds=median(forwards),
        ratio_to_forwards=log_ratio(whole, forwards, paired=False).ratio(),
        parts={
            **parts,
            GAPS: max(0.0, median(whole) - fmean(busy)),
            BETWEEN: _between(bursts, cell.batch),
        },
        replayed=True,
    )


def _between(bursts: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Return the median time from the end of a round to the start of the next: the scheduler.

    A step begins just before its round, so the difference of their lengths is the time between.
    Rounds with repeated forwards are left out, as their steps contain the repetition.
    """
    found = [
        later - earlier - one["round"]
        for burst in bursts
        for ((earlier, _), (later, _)), one in zip(
            pairwise(burst["steps"]), burst["rounds"], strict=False
        )
        if one["batch"] == batch and not one["alone"] and not one.get("recorded")
    ]
    return median(found) if found else 0.0


def flat(row: RoundRow, names: Sequence[str]) -> dict[str, Any]:
    """Return a row without nesting; ``names`` are the parts of all rows."""
    content = {k: short(v) for k, v in vars(row).items() if k not in ("parts", "ratio_to_forwards")}
    content |= interval_columns("ratio_to_forwards", row.ratio_to_forwards)
    parts = {f"{name.replace(' ', '_')}_seconds": row.parts.get(name) for name in names}
    return content | {name: short(value) for name, value in parts.items()}


def part_names(rows: Sequence[RoundRow]) -> list[str]:
    """Return the parts of all rows, the largest first."""
    names = dict.fromkeys(name for row in rows for name in row.parts)
    return sorted(names, key=lambda name: -fmean(row.parts.get(name, 0.0) for row in rows))


def write_csv(rows: Sequence[RoundRow], path: Path, provenance: Mapping[str, Any]) -> None:
    """Write one line for each cell."""
    names = part_names(rows)
    results.write_csv([flat(row, names) for row in rows], path, provenance)


def markdown(rows: Sequence[RoundRow]) -> str:
    """Return a table with the milliseconds of each round and its parts."""
    names = part_names(rows)
    note = REPLAYED if any(row.replayed for row in rows) else RUN_AGAIN
    headers = ["", "batch", "prompt", "ms / round", "forwards alone", "ratio", *names]
    lines = [
        [
            row.system,
            str(row.batch),
            str(row.prompt),
            _ms(row.round_seconds),
            _ms(row.forwards_alone_seconds),
            interval_cell(row.ratio_to_forwards, ".2f"),
            *(_ms(row.parts.get(name, 0.0)) for name in names),
        ]
        for row in rows
    ]
    return f"{note}\n\n{markdown_table(headers, lines)}\n"


def _ms(value: float) -> str:
    return f"{1000 * value:.2f}"


def plot_rows(rows: Sequence[RoundRow], path: Path, *, title: str) -> None:
    """Plot each cell's round as a bar of its parts, and a mark for its forwards alone."""
    with picture(path, (11, 1.8 + 0.5 * len(rows))) as (figure, ((axes,),)):
        labels = [f"{row.system}, batch {row.batch}, {row.prompt}" for row in rows]
        left = [0.0] * len(rows)
        for place, name in enumerate(part_names(rows)):
            widths = [max(0.0, 1000 * row.parts.get(name, 0.0)) for row in rows]
            axes.barh(labels, widths, left=left, label=name, **shade(place))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        alone = [1000 * row.forwards_alone_seconds for row in rows]
        axes.plot(alone, labels, "k|", ms=18, mew=2, label="forwards alone")
        axes.invert_yaxis()
        axes.set(xlabel="ms a round", title=title)
        legend_below(figure, axes, ncols=6)
