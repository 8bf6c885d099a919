"""Plot nats to the target against tokens per target pass, a panel per temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from charts import COLOURS, GREY, ends, legend_below, picture
from fidelity.grid import AR_TARGET, AUTO, DEFAULT, EXACT, MIXED, SMC
from fidelity.report import CellRow
from matplotlib.axes import Axes


class Side(NamedTuple):
    """A family of settings: the style of its points, and the side of their labels."""

    name: str
    families: tuple[str, ...]
    colour: str
    marker: str
    offset: tuple[int, int]  # of labels, in points
    align: str


# The markers are distinct in grey.
SIDES = (
    Side("verified: exact, mixed, auto", (EXACT, MIXED, AUTO), COLOURS[0], "o", (7, -8), "left"),
    Side("weighed: smc", (SMC, DEFAULT), COLOURS[1], "D", (-7, 14), "right"),
)
#: Settings that are emphasized by their names.
NAMED = (EXACT, AUTO, DEFAULT)


def plot_rows(rows: Sequence[CellRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    shape = {"columns": len(temperatures), "sharex": True, "sharey": True}
    with picture(path, (0.6 + 5.0 * len(temperatures), 5.0), **shape) as (figure, (panels,)):
        for axes, temperature in zip(panels, temperatures, strict=True):
            _panel(axes, [row for row in rows if row.temperature == temperature])
            axes.set_xlabel("tokens per target pass")
            axes.set_title(f"Temperature {temperature:g}", fontweight="bold")
        panels[0].set_ylabel("KL to the target, nats an answer, at least")
        legend_below(figure, panels[0], ncols=2)


def _panel(axes: Axes, rows: Sequence[CellRow]) -> None:
    axes.axhline(0, color="black", lw=1, zorder=1)
    for side in SIDES:
        _side(axes, side, [row for row in rows if row.family in side.families])
    for row in rows:
        if row.family == AR_TARGET:
            text = f"AR: {row.accuracy.mean:.1%} right"
            axes.annotate(text, (0.02, 0.97), xycoords="axes fraction", va="top", color=GREY)
    axes.margins(x=0.18, y=0.1)
    axes.grid(alpha=0.25, lw=0.6)


def _side(axes: Axes, side: Side, rows: Sequence[CellRow]) -> None:
    """Draw points with intervals along a line, by tokens per target pass."""
    rows = sorted(rows, key=lambda row: row.tokens_per_pass or 0.0)
    x = [row.tokens_per_pass or 0.0 for row in rows]
    axes.errorbar(
        x,
        [row.kl_at_least.mean for row in rows],
        yerr=ends([row.kl_at_least for row in rows]),
        fmt=side.marker,
        ls=":",
        lw=1,
        ms=6,
        color=side.colour,
        mec="white",
        elinewidth=1,
        label=side.name,
        zorder=4,
    )
    for row in rows:
        _label(axes, side, row)


def _label(axes: Axes, side: Side, row: CellRow) -> None:
    """Label a point with its name, and below it in small type its accuracy."""
    at = (row.tokens_per_pass or 0.0, row.kl_at_least.mean)
    right, up = side.offset
    style = {"xytext": (right, up), "textcoords": "offset points", "ha": side.align}
    weight = "bold" if row.family in NAMED else "normal"
    c = row.evidence_threshold
    name = row.label if row.family in NAMED else f"c = {c:g}"
    axes.annotate(name, at, va="center", fontsize=9, color=side.colour, weight=weight, **style)
    style["xytext"] = (right, up - 9)
    text = f"{row.accuracy.mean:.1%} right"
    axes.annotate(text, at, va="center", fontsize=6.5, color=GREY, **style)
