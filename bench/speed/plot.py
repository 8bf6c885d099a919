"""Plot the speed relative to plain decoding, and the share of the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from charts import COLOURS, ends, legend_below, picture
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from results import hardware
from speed.report import CellRow

MARKERS = "osD^v"
#: Limit of the axis, as a multiple of the largest ratio.
WIDEST = 1.5
INCHES_PER_SYSTEM, INCHES_BESIDE = 0.42, 2.0


def plot_rows(rows: Sequence[CellRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``: panels for each prompt length, if anything ran."""
    shown = [row for row in rows if row.round_seconds]
    if not shown:
        return
    names = list(dict.fromkeys(row.system for row in shown))
    batches = sorted({row.batch for row in shown})
    prompts = sorted({row.prompt for row in shown})
    height = INCHES_BESIDE + INCHES_PER_SYSTEM * len(names)
    size, shape = (11, height * len(prompts)), {"rows": len(prompts), "columns": 2}
    with picture(path, size, **shape, sharey=True) as (figure, panels):
        for (left, right), prompt in zip(panels, prompts, strict=True):
            here = [row for row in shown if row.prompt == prompt]
            _ratios(left, here, names, batches)
            _bounds(right, here, names, batches)
            left.set_yticks(range(len(names)), names)
            left.set_title(f"Prompts of {prompt} tokens", loc="left", fontweight="bold")
        panels[0][0].set_ylim(len(names) - 0.5, -0.5)  # the first on top
        legend_below(figure, panels[0][1], ncols=len(batches))
        figure.suptitle(f"{shown[0].pair} on {hardware()}")


def _ratios(
    axes: Axes, rows: Sequence[CellRow], names: Sequence[str], batches: Sequence[int]
) -> None:
    axes.axvline(1.0, color="black", lw=1)
    for row in rows:
        if row.ratio_to_ar:
            # A single repeat has no interval to draw.
            errors = ends([row.ratio_to_ar]) if math.isfinite(row.ratio_to_ar.high) else None
            at = _height(row, names, batches)
            axes.errorbar(row.ratio_to_ar.mean, at, xerr=errors, capsize=3, **_style(row, batches))
    axes.set_xlabel("decoding speed, as a multiple of AR's (95 % interval)")
    _tidy(axes)
    # A wide interval is cut off, so that the others stay readable.
    largest = max((row.ratio_to_ar.mean for row in rows if row.ratio_to_ar), default=1.0)
    axes.set_xlim(0, WIDEST * max(1.0, largest))


def _bounds(
    axes: Axes, rows: Sequence[CellRow], names: Sequence[str], batches: Sequence[int]
) -> None:
    labelled = set()
    for row in rows:
        if row.fraction_of_bound is not None:
            label = None if row.batch in labelled else f"batch {row.batch}"
            labelled.add(row.batch)
            at = _height(row, names, batches)
            axes.errorbar(row.fraction_of_bound, at, label=label, **_style(row, batches))
    axes.set_xlabel("share of the roofline that is reached")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _tidy(axes)
    axes.set_xlim(left=0)


def _height(row: CellRow, names: Sequence[str], batches: Sequence[int]) -> float:
    """Return the vertical position of a row: batches of a system are a little apart."""
    apart = (batches.index(row.batch) - (len(batches) - 1) / 2) / (len(batches) + 1)
    return names.index(row.system) + 0.8 * apart


def _style(row: CellRow, batches: Sequence[int]) -> dict[str, Any]:
    place = batches.index(row.batch)
    return {"color": COLOURS[place % len(COLOURS)], "fmt": MARKERS[place % len(MARKERS)]}


def _tidy(axes: Axes) -> None:
    axes.grid(axis="x", alpha=0.25, lw=0.6)
