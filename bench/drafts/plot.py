"""The picture: nats to the target against tokens a second to expect, a panel a temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import charts
import matplotlib.pyplot as plt
from drafts.cost import plain_seconds
from drafts.grid import AUTO, EXACT, LIKELIEST, PROPOSALS, SAMPLED, STANDALONE
from drafts.report import DraftRow
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

GREY = "#6E6E6E"
#: One colour a proposal, that of its place.
COLOURS = {
    proposal.name: charts.COLOURS[place % len(charts.COLOURS)]
    for place, proposal in enumerate(PROPOSALS)
}
MARKERS = {EXACT: "o", AUTO: "D", LIKELIEST: "x", SAMPLED: "+", STANDALONE: "s"}
#: What is of the target's law by its rule, and has no answers that could tell, stands there.
NOWHERE_ELSE = 0.0


def plot_rows(rows: Sequence[DraftRow], path: Path) -> None:
    """Write the picture as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    figure, panels = plt.subplots(
        len(temperatures),
        1,
        figsize=(9.0, 0.8 + 3.6 * len(temperatures)),
        layout="constrained",
        sharex=True,
        squeeze=False,
        dpi=150,
    )
    for axes, temperature in zip(panels[:, 0], temperatures, strict=True):
        _panel(axes, [row for row in rows if row.temperature == temperature and row.proposal])
        axes.set_title(f"Temperature {temperature:g}", fontweight="bold")
        axes.set_ylabel("KL to the target,\nnats an answer, at least")
    panels[-1, 0].set_xlabel("tokens a second to expect of an 8B on an H200, at most")
    figure.legend(handles=_legend(rows), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _panel(axes: Axes, rows: Sequence[DraftRow]) -> None:
    axes.axvline(1 / plain_seconds(), color=GREY, lw=1, ls=":", zorder=1)
    axes.annotate("AR", (1 / plain_seconds(), 0.95), xycoords=("data", "axes fraction"), color=GREY)
    axes.axhline(0, color="black", lw=1, zorder=1)
    for row in rows:
        _point(axes, row)
    axes.margins(x=0.06, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)


def _point(axes: Axes, row: DraftRow) -> None:
    """With its interval, and its N beside it."""
    colour, kl = COLOURS[row.proposal], row.kl_at_least
    y = kl.mean if kl else NOWHERE_ELSE
    error = [[y - kl.low], [kl.high - y]] if kl else None
    axes.errorbar(
        row.tokens_per_second,
        y,
        yerr=error,
        fmt=MARKERS[row.rule],
        ms=6,
        color=colour,
        elinewidth=1,
        zorder=4,
    )
    if row.is_smc:
        place = {"xytext": (4, 5), "textcoords": "offset points", "fontsize": 7, "color": colour}
        axes.annotate(f"N={row.num_particles}", (row.tokens_per_second, y), **place)


def _legend(rows: Sequence[DraftRow]) -> list[Line2D]:
    names = {row.proposal for row in rows}
    rules = {row.rule for row in rows}
    colours = [
        Line2D([], [], color=COLOURS[name], lw=4, label=name) for name in COLOURS if name in names
    ]
    shapes = [
        Line2D([], [], color="black", ls="", marker=marker, label=rule)
        for rule, marker in MARKERS.items()
        if rule in rules
    ]
    return colours + shapes
