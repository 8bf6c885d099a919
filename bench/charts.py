"""Share plot settings: a headless backend, and colours distinct to colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import Interval

matplotlib.use("Agg")

# Okabe and Ito's colours, distinct to colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#999999", "#009E73", "#CC79A7")
GREY, SKY = "#6E6E6E", "#56B4E9"


@contextmanager
def picture(
    path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **shared: Any
) -> Iterator[tuple[Figure, np.ndarray]]:
    """Yield panels ``[rows, columns]`` to draw on, and write them as a PNG to ``path``."""
    figure, panels = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, dpi=150, **shared
    )
    yield figure, panels
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def legend_below(figure: Figure, axes: Axes, ncols: int) -> None:
    """Place one panel's legend below all panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=ncols, frameon=False)


def ends(values: Sequence[Interval], scale: float = 1.0) -> list[list[float]]:
    """Return how far intervals extend below and above their means, as `errorbar` takes it."""
    return [
        [scale * (value.mean - value.low) for value in values],
        [scale * (value.high - value.mean) for value in values],
    ]
