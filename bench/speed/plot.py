"""Plot the speed relative to plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from charts import COLOURS, ends, legend_below, picture
from matplotlib.axes import Axes
from results import hardware
from speed.report import CellRow

MARKERS = "osD^v"
#: Limit of the axis, as a multiple of the largest ratio.
WIDEST = 1.5
INCHES_PER_SYSTEM, INCHES_BESIDE = 0.42, 2.0


def plot_rows(rows: Sequence[CellRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``: a panel for each prompt length, if anything ran."""
    shown = [row for row in rows if row.ratio_to_ar]
    if not shown:
        return
    names = list(dict.fromkeys(row.system for row in shown))
    batches = sorted({row.batch for row in shown})
    prompts = sorted({row.prompt for row in shown})
    height = INCHES_BESIDE + INCHES_PER_SYSTEM * len(names)
    size, shape = (8, height * len(prompts)), {"rows": len(prompts)}
    with picture(path, size, **shape) as (figure, panels):
        for axes, prompt in zip(panels[:, 0], prompts, strict=True):
            _panel(axes, [row for row in shown if row.prompt == prompt], names, batches)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(f"Prompts of {prompt} tokens", loc="left", fontweight="bold")
            axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
        legend_below(figure, panels[0, 0], ncols=len(batches))
        figure.suptitle(f"{shown[0].pair} on {hardware()}")


def _panel(
    axes: Axes, rows: Sequence[CellRow], names: Sequence[str], batches: Sequence[int]
) -> None:
    axes.axvline(1.0, color="black", lw=1)
    ratios = {row: row.ratio_to_ar for row in rows if row.ratio_to_ar}
    for place, batch in enumerate(batches):
        here = {row: ratio for row, ratio in ratios.items() if row.batch == batch}
        # Batches of a system are a little apart; a single repeat has no interval to draw.
        apart = 0.8 * (place - (len(batches) - 1) / 2) / (len(batches) + 1)
        drawn = [math.isfinite(ratio.high) for ratio in here.values()]
        axes.errorbar(
            [ratio.mean for ratio in here.values()],
            [names.index(row.system) + apart for row in here],
            xerr=ends(list(here.values())) if all(drawn) else None,
            fmt=MARKERS[place % len(MARKERS)],
            color=COLOURS[place % len(COLOURS)],
            capsize=3,
            label=f"batch {batch}",
        )
    axes.set_xlabel("decoding speed, as a multiple of AR's (95 % interval)")
    axes.grid(axis="x", alpha=0.25, lw=0.6)
    # A wide interval is cut off, so that the others stay readable.
    axes.set_xlim(0, WIDEST * max([1.0, *(ratio.mean for ratio in ratios.values())]))
