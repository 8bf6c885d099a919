"""Plot nats to the target against tokens per target pass, a panel per temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from charts import COLOURS, GREY, ends, legend_below, picture
from fidelity.grid import AR_TARGET, AUTO, DEFAULT, EXACT, MIXED, SMC
from fidelity.report import CellRow
from matplotlib.axes import Axes

#: Families by name, with colour, marker, and the offset (in points) and side of their labels.
SIDES = {
    "verified: exact, mixed, auto": ((EXACT, MIXED, AUTO), COLOURS[0], "o", (7, -8), "left"),
    "weighed: smc": ((SMC, DEFAULT), COLOURS[1], "D", (-7, 14), "right"),
}
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
    for name, (families, colour, marker, offset, side) in SIDES.items():
        here = [row for row in rows if row.family in families]
        here.sort(key=lambda row: row.tokens_per_pass or 0.0)
        x, kl = [row.tokens_per_pass or 0.0 for row in here], [row.kl_at_least for row in here]
        heights = [value.mean for value in kl]
        style = {
            "fmt": marker,
            "color": colour,
            "mec": "white",
            "ls": ":",
            "lw": 1,
            "elinewidth": 1,
        }
        axes.errorbar(x, heights, ends(kl), label=name, ms=6, zorder=4, **style)
        for row, at in zip(here, zip(x, heights, strict=True), strict=True):
            _label(axes, row, at, colour, offset, side)
    for row in rows:
        if row.family == AR_TARGET:
            text = f"AR: {row.accuracy.mean:.1%} right"
            axes.annotate(text, (0.02, 0.97), xycoords="axes fraction", va="top", color=GREY)
    axes.margins(x=0.18, y=0.1)
    axes.grid(alpha=0.25, lw=0.6)


def _label(
    axes: Axes,
    row: CellRow,
    at: tuple[float, float],
    colour: str,
    offset: tuple[int, int],
    side: str,
) -> None:
    """Label a point with its name, and below it in small type its accuracy."""
    is_named, (right, up) = row.family in NAMED, offset
    name = row.label if is_named else f"c = {row.evidence_threshold:g}"
    accuracy = f"{row.accuracy.mean:.1%} right"
    weight = "bold" if is_named else "normal"
    for text, lower, size, shade in ((name, 0, 9, colour), (accuracy, 9, 6.5, GREY)):
        place = {"xytext": (right, up - lower), "textcoords": "offset points", "ha": side}
        style = {"fontsize": size, "color": shade, "weight": weight if shade == colour else None}
        axes.annotate(text, at, va="center", **place, **style)
