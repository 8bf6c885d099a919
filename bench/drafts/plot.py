"""Plot nats to the target against expected tokens per second, a panel per temperature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import charts
from charts import GREY, SKY, ends, legend_below, picture
from drafts.grid import PROPOSALS, STANDALONE
from drafts.report import DraftRow, plain_seconds
from fidelity.grid import AUTO, EXACT
from intervals import Interval
from matplotlib.axes import Axes

#: Okabe and Ito's colours, one per proposal.
COLOURS = dict(zip((one.name for one in PROPOSALS), (*charts.COLOURS, SKY), strict=True))
MARKERS = {EXACT: "o", AUTO: "D", STANDALONE: "s"}
#: Height, in nats, of each proposal's lane at 0, so that exact rows do not cover each other.
LANE = 0.06


def plot_rows(rows: Sequence[DraftRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    shape = {"rows": len(temperatures), "sharex": True, "sharey": True}
    with picture(path, (9.0, 0.8 + 4.2 * len(temperatures)), **shape) as (figure, panels):
        for axes, temperature in zip(panels[:, 0], temperatures, strict=True):
            _panel(axes, [row for row in rows if row.temperature == temperature])
            axes.set_title(f"Temperature {temperature:g}; beside a point its N", fontsize=9)
            axes.set_ylabel("0, or KL to the target,\nnats an answer, at least")
        panels[-1, 0].set_xlabel("tokens a second to expect of an 8B on an H200, at most")
        legend_below(figure, panels[0, 0], ncols=4)


def _panel(axes: Axes, rows: Sequence[DraftRow]) -> None:
    plain = 1 / plain_seconds()
    axes.axvline(plain, color=GREY, lw=1, ls=":")
    axes.annotate("AR", (plain, 0.94), xycoords=("data", "axes fraction"), color=GREY)
    drawn = [row for row in rows if row.proposal and row.rule in MARKERS]
    for (proposal, rule), group in groupby(drawn, key=lambda row: (row.proposal, row.rule)):
        here, low = list(group), -LANE * list(COLOURS).index(proposal)
        speeds = [row.tokens_per_second for row in here]
        values = [row.kl_at_least or Interval(0.0, 0.0, 0.0, 0) for row in here]
        heights = [value.mean or low for value in values]
        style = {"color": COLOURS[proposal], "fmt": MARKERS[rule], "ms": 6, "elinewidth": 1}
        axes.errorbar(speeds, heights, ends(values), label=f"{proposal} {rule}", **style)
        for row, at in zip(here, zip(speeds, heights, strict=True), strict=True):
            place = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(f"{row.num_particles}", at, color=COLOURS[proposal], **place)
    axes.axhspan(-LANE * len(COLOURS), 0, color=GREY, alpha=0.06, lw=0)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick >= 0])
    axes.grid(alpha=0.25, lw=0.6)
