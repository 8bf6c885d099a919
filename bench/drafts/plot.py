"""Plot nats to the target against expected tokens per second, a panel per temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import charts
from charts import GREY, SKY, ends, picture
from drafts.cost import plain_seconds
from drafts.grid import AUTO, EXACT, LIKELIEST, PROPOSALS, SAMPLED, STANDALONE
from drafts.report import DraftRow
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

#: Okabe and Ito's colours, one per proposal.
COLOURS = dict(zip((one.name for one in PROPOSALS), (*charts.COLOURS, SKY), strict=True))
MARKERS = {EXACT: "o", AUTO: "D", LIKELIEST: "x", SAMPLED: "+", STANDALONE: "s"}
#: Height, in nats, of each proposal's lane below 0, for rows that follow the target by their rule
#: or do not differ measurably.
LANE = 0.06


def plot_rows(rows: Sequence[DraftRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    shape = {"rows": len(temperatures), "sharex": True, "sharey": True}
    with picture(path, (9.0, 0.8 + 4.2 * len(temperatures)), **shape) as (figure, panels):
        for axes, temperature in zip(panels[:, 0], temperatures, strict=True):
            _panel(axes, [row for row in rows if row.temperature == temperature and row.proposal])
            axes.set_title(f"Temperature {temperature:g}", fontweight="bold")
        panels[-1, 0].set_xlabel("tokens a second to expect of an 8B on an H200, at most")
        figure.legend(handles=_legend(rows), loc="outside lower center", ncols=5, frameon=False)


def _panel(axes: Axes, rows: Sequence[DraftRow]) -> None:
    plain = 1 / plain_seconds()
    axes.axvline(plain, color=GREY, lw=1, ls=":", zorder=1)
    axes.annotate("AR", (plain, 0.94), xycoords=("data", "axes fraction"), color=GREY)
    axes.axhline(0, color="black", lw=1, zorder=1)
    axes.axhspan(-LANE * (len(PROPOSALS) + 0.7), 0, color=GREY, alpha=0.06, lw=0, zorder=0)
    for row in rows:
        _point(axes, row)
    _scale(axes, max((row.kl_at_least.high for row in rows if row.kl_at_least), default=0.0))
    axes.margins(x=0.06)
    axes.grid(alpha=0.25, lw=0.6)


def _scale(axes: Axes, highest: float) -> None:
    """Label the axis: nats above 0, and the names of the lanes below."""
    nats = [tenth / 10 for tenth in range(0, int(10 * highest) + 2)]
    names = {_lane(name): name for name in COLOURS}
    axes.set_yticks([*names, *nats], [*names.values(), *(f"{value:g}" for value in nats)])
    for label in axes.get_yticklabels():
        label.set_fontsize(8)
    axes.set_ylabel("0, or KL to the target,\nnats an answer, at least")


def _lane(proposal: str) -> float:
    return -LANE * (list(COLOURS).index(proposal) + 1)


def _point(axes: Axes, row: DraftRow) -> None:
    """Draw a row's point, with its interval if there is one, and its N."""
    colour, kl = COLOURS[row.proposal], row.kl_at_least
    differs = kl is not None and kl.mean > 0
    y = kl.mean if kl and differs else _lane(row.proposal)
    axes.errorbar(
        row.tokens_per_second,
        y,
        yerr=ends([kl]) if kl and differs else None,
        fmt=MARKERS[row.rule],
        ms=6,
        color=colour,
        elinewidth=1,
        zorder=4,
    )
    if row.is_smc:
        place = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7, "color": colour}
        axes.annotate(f"{row.num_particles}", (row.tokens_per_second, y), **place)


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
    number = Line2D([], [], ls="", label="beside it: N")
    return [*colours, *shapes, number]
