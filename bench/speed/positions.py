"""What a round costs, against the position in the answer that it has come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import results
from charts import COLOURS
from results import short
from speed.grid import Cell
from study import Log

#: Positions are put together in bins of so many tokens.
BIN = 100


@dataclass(frozen=True)
class Point:
    """The rounds that began within a bin of positions."""

    system: str
    batch: int
    prompt: int
    position: int  # the bin's last: 100 holds positions 1 to 100
    rounds: int
    round_seconds: float  # median, from the start of one round to that of the next
    #: Of that, what is not model forwards, which grow by their attention; None for AR.
    other_seconds: float | None


def make_points(logs: Mapping[Cell, Log]) -> list[Point]:
    """The points of every cell that was timed."""
    return [point for cell, log in logs.items() for point in _points(cell, log.read())]


def _points(cell: Cell, entries: Sequence[Mapping[str, Any]]) -> list[Point]:
    bins: dict[int, list[_Step]] = {}
    for entry in entries:
        for burst in entry["bursts"]:
            for place, step in enumerate(_steps(burst, cell.batch)):
                position = 1 + place * entry["tokens_per_round"]
                if step is not None:
                    bins.setdefault(int(position // BIN + 1) * BIN, []).append(step)
    return [
        Point(
            cell.system.name,
            cell.batch,
            cell.prompt,
            position,
            len(found),
            median(step.whole for step in found),
            _median([step.other for step in found if step.other is not None]),
        )
        for position, found in sorted(bins.items())
    ]


class _Step(NamedTuple):
    whole: float
    other: float | None


def _steps(burst: Mapping[str, Any], batch: int) -> Iterator[_Step | None]:
    """What each step took; None for those of fewer requests."""
    rounds = iter(burst["rounds"])
    for (start, size), (end, _) in pairwise(burst["steps"]):
        one = next(rounds, None)
        forwards = sum(one["forwards"].values()) if one else 0.0
        whole = end - start
        other = whole - forwards if forwards else None  # in a CUDA graph none is seen
        yield _Step(whole, other) if size == batch else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def write_csv(points: Sequence[Point], path: Path, provenance: Mapping[str, Any]) -> None:
    """One line for each point."""
    lines = [{name: short(value) for name, value in vars(point).items()} for point in points]
    results.write_csv(lines, path, provenance)


def growth(points: Sequence[Point]) -> str:
    """For each line of the plot: what the last rounds cost against the first."""
    lines = []
    for name, line in _lines(points).items():
        first, last = line[0], line[-1]
        ratio = last.round_seconds / first.round_seconds
        text = (
            f"{name}: {1000 * first.round_seconds:.1f} ms a round up to position {first.position}, "
            f"{1000 * last.round_seconds:.1f} ms at {last.position}, {ratio:.2f} times as much"
        )
        if first.other_seconds is not None and last.other_seconds is not None:
            text += (
                f"; beside the models {1000 * first.other_seconds:.1f} and "
                f"{1000 * last.other_seconds:.1f} ms"
            )
        lines.append(text)
    return "\n".join(lines)


def plot_points(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Milliseconds a round against the position, a line for each cell."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained", dpi=150)
    for place, (name, line) in enumerate(_lines(points).items()):
        axes.plot(
            [point.position - BIN / 2 for point in line],
            [1000 * point.round_seconds for point in line],
            marker="o",
            ms=3,
            color=COLOURS[place % len(COLOURS)],
            label=name,
        )
        if all(point.other_seconds is not None for point in line):
            axes.plot(
                [point.position - BIN / 2 for point in line],
                [1000 * point.other_seconds for point in line if point.other_seconds is not None],
                ls=":",
                color=COLOURS[place % len(COLOURS)],
                label=f"{name}: beside the models",
            )
    axes.set(xlabel="output position, tokens", ylabel="ms a round (median)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _lines(points: Sequence[Point]) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for point in points:
        name = f"{point.system}, batch {point.batch}, prompt {point.prompt}"
        lines.setdefault(name, []).append(point)
    return lines
