"""The demo's picture: the rows of its table, drawn side by side."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from results import Row

# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#999999", "#009E73", "#CC79A7")
PARTICLES_COLOUR = "#E69F00"


def plot_rows(rows: list[Row], path: Path, *, title: str, hardware: str) -> None:
    """Write the comparison as a PNG to ``path``; ``hardware`` says what ran the servers."""
    widths = [max(2, len(rows)), max(2, len(rows) - 1), max(2, len(rows)), 2]
    figure, panels = plt.subplots(
        1, 4, figsize=(14, 4.2), layout="constrained", width_ratios=widths
    )
    figure.suptitle(title)
    _accuracy(panels[0], rows)
    _tokens_per_pass(panels[1], rows)
    _tokens_per_second(panels[2], rows, hardware)
    _particles(panels[3], rows)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _accuracy(axes: Axes, rows: list[Row]) -> None:
    _bars(axes, {row.name: row.accuracy.mean for row in rows}, COLOURS)
    for place, row in enumerate(rows):
        mean, low, high, _ = row.accuracy
        error = [[mean - low], [high - mean]]
        axes.errorbar(place, mean, yerr=error, fmt="none", ecolor="black", capsize=5)
        _label(axes, place, high, f"{mean:.1%}")
    axes.set(title="Accuracy\nwith 95 % interval", ylabel="share of problems right", ylim=(0, 1.09))


def _tokens_per_pass(axes: Axes, rows: list[Row]) -> None:
    found = {row.name: row.tokens_per_target_pass for row in rows}
    heights = {name: height for name, height in found.items() if height is not None}
    _bars(axes, heights, COLOURS, "{:.2f}")
    axes.set(title="Tokens\nper target pass", ylabel="tokens per pass")


def _tokens_per_second(axes: Axes, rows: list[Row], hardware: str) -> None:
    _bars(axes, {row.name: row.tokens_per_second for row in rows}, COLOURS, "{:.0f}")
    axes.set(title=f"Tokens per second, whole server\n{hardware}", ylabel="tokens / s")


def _particles(axes: Axes, rows: list[Row]) -> None:
    """Of the first row whose particles are weighed."""
    for row in rows:
        if row.ess_share is not None and row.resample_rate is not None:
            heights = {"mean\nESS / N": row.ess_share, "resampled\nrounds": row.resample_rate}
            _bars(axes, heights, (PARTICLES_COLOUR,), "{:.2f}")
            axes.set(title=f"Particles\n({row.name})", ylabel="share", ylim=(0, 1.09))
            return


def _bars(
    axes: Axes, heights: dict[str, float], colours: tuple[str, ...], form: str | None = None
) -> None:
    places = range(len(heights))
    shades = [colours[place % len(colours)] for place in places]
    names = [name.replace(", ", ",\n") for name in heights]  # side by side they would touch
    axes.bar(places, list(heights.values()), color=shades, width=0.6, tick_label=names)
    axes.margins(x=0.12, y=0.12)
    if form:
        for place, height in enumerate(heights.values()):
            _label(axes, place, height, form.format(height))


def _label(axes: Axes, place: int, height: float, text: str) -> None:
    axes.annotate(
        text, (place, height), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom"
    )
