"""The picture: accuracy against tokens per target pass, one panel for each temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import charts  # noqa: F401  (no screen)
import matplotlib.pyplot as plt
from fidelity.grid import (
    AR_DRAFT,
    AR_TARGET,
    AUTO,
    CUT_FAMILIES,
    DEFAULT,
    EXACT,
    MIXED,
    SMC_BLOCK,
    SMC_CUT,
    SMC_TOKEN,
)
from fidelity.labels import Label, place
from fidelity.report import CellRow
from fidelity.stats import frontier
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import Bbox

from sglang_smc.options.server import DEFAULTS


class Style(NamedTuple):
    """How the points of a family look; ``ink`` is for what is written and drawn beside them."""

    fill: str
    marker: str
    size: float
    ink: str
    edge: str = "white"


BLACK = "#000000"
# Okabe and Ito's colours, told apart by colour-blind readers; the markers do the same in grey.
# What has a name of its own stands out by a black edge.
STYLES = {
    AR_TARGET: Style(BLACK, "s", 7, BLACK),
    EXACT: Style("#0072B2", "o", 7, "#0072B2"),
    SMC_BLOCK: Style("#D55E00", "D", 7, "#D55E00"),
    SMC_TOKEN: Style("#009E73", "^", 8, "#009E73"),
    SMC_CUT: Style("#E69F00", "v", 8, "#B87F00"),
    MIXED: Style("#CC79A7", "P", 10, "#B0508A"),
    AUTO: Style("#CC79A7", "X", 10, BLACK, edge=BLACK),
    DEFAULT: Style("#F0E442", "*", 14, BLACK, edge=BLACK),
}
GREY = "#6E6E6E"
#: How far below the target, and how that is drawn.
BANDS = (
    (0.01, "#56B4E9", 0.30, "up to 1 point below it"),
    (0.03, "#56B4E9", 0.13, "up to 3 points below it"),
)
#: Answering some requests with one and some with the other gives the points between them.
MIXTURE_OF = ("exact N=8 K=8", "SMC block N=8 K=8")


def plot_rows(rows: Sequence[CellRow], path: Path, *, problems: int) -> None:
    """Write the picture as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    figure, panels = plt.subplots(
        1,
        len(temperatures),
        figsize=(0.6 + 5.2 * len(temperatures), 6.4),
        layout="constrained",
        sharex=True,
        squeeze=False,
        dpi=150,
    )
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        _panel(axes, [row for row in rows if row.temperature == temperature])
        axes.set_title(f"Temperature {temperature:g}", fontweight="bold")
        axes.set_xlabel("tokens per target pass")
    panels[0][0].set_ylabel(f"accuracy on {problems} held-out problems, 95 % interval")
    figure.legend(handles=_legend(rows), loc="outside lower center", ncols=6, frameon=False)
    figure.canvas.draw()  # settles the layout, which labels are placed in
    figure.set_layout_engine("none")
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        _label(axes, [row for row in rows if row.temperature == temperature])
    figure.savefig(path)
    plt.close(figure)


def _panel(axes: Axes, rows: Sequence[CellRow]) -> None:
    """All of a panel but its labels."""
    shown = [row for row in rows if row.tokens_per_pass is not None]
    _target_and_bands(axes, rows)
    _mixture(axes, shown)
    _frontier(axes, shown)
    for row in shown:
        _point(axes, row)
    _limits(axes, shown)
    _draft(axes, rows)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)


def _target_and_bands(axes: Axes, rows: Sequence[CellRow]) -> None:
    for row in rows:
        if row.family == AR_TARGET:
            top = row.accuracy.mean
            for points, colour, alpha, _ in BANDS:
                axes.axhspan(top - points, top, color=colour, alpha=alpha, lw=0, zorder=0)
            axes.axhline(top, color="black", lw=1, zorder=1)


def _mixture(axes: Axes, rows: Sequence[CellRow]) -> None:
    ends = [_at(row) for row in rows if row.label in MIXTURE_OF]
    if len(ends) == len(MIXTURE_OF):
        axes.plot(*zip(*ends, strict=True), color=GREY, lw=1.2, ls=(0, (2, 2)), alpha=0.7, zorder=1)


def _frontier(axes: Axes, rows: Sequence[CellRow]) -> None:
    points = frontier([_at(row) for row in rows])
    if points:
        axes.plot(*zip(*points, strict=True), color="black", lw=2.2, alpha=0.35, zorder=2)


def _point(axes: Axes, row: CellRow) -> None:
    style = STYLES[row.family]
    mean, low, high, _ = row.accuracy
    axes.errorbar(
        row.tokens_per_pass or 0.0,
        mean,
        yerr=[[mean - low], [high - mean]],
        fmt=style.marker,
        ms=style.size,
        color=style.fill,
        ecolor=style.ink,
        mec=style.edge,
        mew=0.8,
        elinewidth=1,
        zorder=4,
    )[2][0].set_alpha(0.45)


def _limits(axes: Axes, rows: Sequence[CellRow]) -> None:
    """Room for labels on all sides."""
    lows, highs = [row.accuracy.low for row in rows], [row.accuracy.high for row in rows]
    bottom, top = min(lows, default=0), max(highs, default=1)
    room = max(0.04 * (top - bottom), 0.01)
    axes.set_ylim(bottom - 2 * room, min(1.0, top + room))
    axes.set_xlim(0.4, max([row.tokens_per_pass or 0 for row in rows], default=8) + 1.1)


def _draft(axes: Axes, rows: Sequence[CellRow]) -> None:
    """The floor lies far below everything else, so it is told and not drawn."""
    for row in rows:
        if row.family == AR_DRAFT:
            text = f"↓ AR draft alone: {row.accuracy.mean:.1%}"
            axes.annotate(
                text, (0.02, 0.015), xycoords="axes fraction", color=GREY, fontsize="small"
            )


def _label(axes: Axes, rows: Sequence[CellRow]) -> None:
    shown = [row for row in rows if row.tokens_per_pass is not None]
    labels = [Label(*_at(row), _short_name(row), STYLES[row.family].ink) for row in shown]
    boxes = [box for row in shown for box in _boxes(axes, row)]
    place(axes, labels, [*boxes, *_line_boxes(axes, shown)], size=8.5)


def _short_name(row: CellRow) -> str:
    """What the legend does not say of a point."""
    if row.family == AR_TARGET:
        return f"{row.accuracy.mean:.1%}"
    if row.family == DEFAULT:
        return "default"
    if row.family == AUTO:
        return AUTO
    if row.family in CUT_FAMILIES:
        size = f" N{row.num_particles}" if row.num_particles != DEFAULTS.num_particles else ""
        return f"c={row.evidence_threshold:g}{size}"
    return f"N{row.num_particles} K{row.num_steps}"


def _boxes(axes: Axes, row: CellRow) -> Iterator[Bbox]:
    """The marker and the interval of a point, in display coordinates."""
    x = row.tokens_per_pass or 0.0
    middle, low, high = (axes.transData.transform((x, y)) for y in row.accuracy[:3])
    radius = (STYLES[row.family].size / 2 + 1) * axes.figure.dpi / 72
    yield Bbox.from_extents(*(middle - radius), *(middle + radius))
    yield Bbox.from_extents(*low, *high)


def _line_boxes(axes: Axes, rows: Sequence[CellRow]) -> Iterator[Bbox]:
    """Small boxes along the target's line, the frontier and the mixture."""
    for row in rows:
        if row.family == AR_TARGET:
            yield from _along(axes, [(x, row.accuracy.mean) for x in axes.get_xlim()])
    yield from _along(axes, frontier([_at(row) for row in rows]))
    yield from _along(axes, [_at(row) for row in rows if row.label in MIXTURE_OF])


def _along(axes: Axes, points: Sequence[tuple[float, float]]) -> Iterator[Bbox]:
    for start, end in pairwise(axes.transData.transform(points) if len(points) > 1 else ()):
        for part in range(60):
            at = start + part / 60 * (end - start)
            yield Bbox.from_extents(*(at - 1.5), *(at + 1.5))


def _at(row: CellRow) -> tuple[float, float]:
    """Where a row is drawn; those without passes of the target are not."""
    return row.tokens_per_pass or 0.0, row.accuracy.mean


def _legend(rows: Sequence[CellRow]) -> list[Line2D | Patch]:
    families = {row.family for row in rows}
    points: list[Line2D | Patch] = [
        Line2D(
            [],
            [],
            marker=style.marker,
            ms=style.size,
            color=style.fill,
            mec=style.edge,
            ls="",
            label=name,
        )
        for name, style in STYLES.items()
        if name in families
    ]
    return [
        *points,
        Line2D([], [], color="black", lw=2.2, alpha=0.35, label="Pareto frontier"),
        Line2D([], [], color=GREY, lw=1.2, ls=(0, (2, 2)), alpha=0.7, label="exact to SMC, N8 K8"),
        *(Patch(color=c, alpha=a, lw=0, label=f"{text}") for _, c, a, text in BANDS),
    ]
