"""Draw points with intervals, one panel a temperature, in colours distinct in grey, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from results import Interval

matplotlib.use("Agg")

#: Okabe and Ito's.
COLOURS = ("#0072B2", "#D55E00", "#999999", "#000000", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


class Point(NamedTuple):
    """A point of a series, with the interval of its height."""

    x: float
    y: Interval
    series: str
    label: str


def scatter(
    path: Path,
    panels: Mapping[str, Sequence[Point]],
    styles: Mapping[str, tuple[str, str]],
    names: tuple[str, str],
    plain: float | None,
    *,
    logarithmic: bool = False,
) -> None:
    """Write points as a PNG to ``path``.

    Args:
        panels: the points of each panel, by its title.
        styles: the colour and marker of each series.
        names: of the axes.
        plain: where plain decoding is on the first axis; None where it is a series.
        logarithmic: whether the first axis is.
    """
    shape = {"figsize": (0.6 + 5.0 * len(panels), 5.0), "sharex": True, "sharey": True}
    figure, all_axes = plt.subplots(
        1, len(panels), layout="constrained", squeeze=False, dpi=150, **shape
    )
    for axes, (title, points) in zip(all_axes.flat, panels.items(), strict=True):
        axes.axhline(0, color="black", lw=1, zorder=1)
        if plain is not None:
            axes.axvline(plain, color="#6E6E6E", lw=1, ls=":", label="AR")
        drawn = {point.series for point in points}
        for name in (name for name in styles if name in drawn):
            here = sorted(point for point in points if point.series == name)
            y = [point.y for point in here]
            colour, marker = styles[name]
            ends = [[v.mean - v.low for v in y], [v.high - v.mean for v in y]]
            style = {
                "color": colour,
                "fmt": marker,
                "mec": "white",
                "label": name,
                "clip_on": False,
            }
            axes.errorbar([point.x for point in here], [v.mean for v in y], ends, **style)
            for place, point in enumerate(here):
                # Names are on the left, at several heights; numbers are on the right.
                is_name = len(point.label) > 2
                offset = (-6, 3 + place % 3 * 13) if is_name else (5, 3)
                style = {"color": colour, "textcoords": "offset points", "fontsize": 7}
                style["ha"] = "right" if is_name else "left"
                axes.annotate(point.label, (point.x, point.y.mean), offset, **style)
        axes.set_xscale("log" if logarithmic else "linear")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(names[0])
        axes.margins(x=0.18, y=0.1)
        if not logarithmic:
            axes.set_xlim(left=0)
        if all(point.y.low >= 0 for point in points):
            axes.set_ylim(bottom=0)  # nothing is below
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0, 0].set_ylabel(names[1])
    entries = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(
        *entries, loc="outside lower center", ncols=min(4, 2 * len(panels)), frameon=False
    )
    figure.savefig(path)
    plt.close(figure)
