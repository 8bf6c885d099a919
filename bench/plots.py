"""Plot the rows of the demo's tables side by side."""

from __future__ import annotations

from pathlib import Path

from charts import COLOURS, ends, picture
from comparison import Row
from matplotlib.axes import Axes


def plot_rows(rows: list[Row], path: Path, *, title: str, concurrency: int) -> None:
    """Write the comparison as a PNG to ``path``."""
    with picture(path, (14, 4.2), columns=4) as (figure, (panels,)):
        figure.suptitle(title)
        alone = {row.name: row.alone.tokens_per_second for row in rows}
        crowd = {row.name: row.crowd.tokens_per_second for row in rows}
        _bars(panels[0], alone, "Tokens per second\none user", "{:.0f}")
        _bars(
            panels[1], crowd, f"Tokens per second, whole server\n{concurrency} at a time", "{:.0f}"
        )
        found = {row.name: row.tokens_per_target_pass for row in rows}
        passes = {name: height for name, height in found.items() if height is not None}
        _bars(panels[2], passes, "Tokens\nper target pass", "{:.2f}")
        _accuracy(panels[3], rows)


def _accuracy(axes: Axes, rows: list[Row]) -> None:
    _bars(axes, {row.name: row.accuracy.mean for row in rows}, "Accuracy\nwith 95 % interval")
    for place, row in enumerate(rows):
        mean, _, high, _ = row.accuracy
        error = ends([row.accuracy])
        axes.errorbar(place, mean, yerr=error, fmt="none", ecolor="black", capsize=5)
        _label(axes, place, high, f"{mean:.1%}")
    axes.set(ylim=(0, 1.09))


def _bars(axes: Axes, heights: dict[str, float], title: str, form: str | None = None) -> None:
    places = range(len(heights))
    shades = [COLOURS[place % len(COLOURS)] for place in places]
    names = [name.replace(", ", ",\n") for name in heights]  # side by side they would overlap
    axes.bar(places, list(heights.values()), color=shades, width=0.6, tick_label=names)
    axes.margins(x=0.12, y=0.12)
    axes.set_title(title)
    if form:
        for place, height in enumerate(heights.values()):
            _label(axes, place, height, form.format(height))


def _label(axes: Axes, place: int, height: float, text: str) -> None:
    axes.annotate(
        text, (place, height), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom"
    )
