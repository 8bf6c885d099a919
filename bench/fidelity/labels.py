"""Labels beside points, where they hide neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

#: Where a label may go: the direction from its point to its nearest edge.
_DIRECTIONS = ((1, 0), (-1, 0), (1, 0.7), (1, -0.7), (-1, 0.7), (-1, -0.7), (0, 1), (0, -1))
_DISTANCES = (8, 14, 22, 32, 44)  # 72 to an inch
_MARGIN = 2.0  # lines are boxes without a width


class Label(NamedTuple):
    """A text that belongs to a point in data coordinates."""

    x: float
    y: float
    text: str
    colour: str


def place(axes: Axes, labels: Sequence[Label], obstacles: Sequence[Bbox], size: float) -> None:
    """Write all labels. Limits must be final, and ``obstacles`` are in display coordinates.

    Boxes are rows ``x0, y0, x1, y1`` in here. Each label takes the best place that those before it
    have left.
    """
    taken = np.array([box.extents for box in obstacles]).reshape(-1, 4)
    inside = np.array([axes.bbox.extents])
    for label in sorted(labels, key=lambda label: (label.x, -label.y)):
        text = _write(axes, label, size)
        extent = text.get_window_extent()
        boxes, distances = _places(axes, label, extent.width, extent.height)
        hidden = _overlaps(boxes, taken, _MARGIN).sum(1)
        outside = extent.width * extent.height - _overlaps(boxes, inside, 0)[:, 0]
        best = boxes[np.argmin(4 * hidden + 20 * outside + 2 * distances)]
        _move(axes, text, label, best)
        taken = np.vstack([taken, best])


def _write(axes: Axes, label: Label, size: float) -> Annotation:
    text = axes.annotate(
        label.text,
        (label.x, label.y),
        xytext=(0, 0),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=size,
        color=label.colour,
        zorder=6,
        arrowprops={"arrowstyle": "-", "color": label.colour, "lw": 0.6, "alpha": 0.6},
    )
    text.set_in_layout(False)
    return text


def _places(axes: Axes, label: Label, width: float, height: float) -> tuple[np.ndarray, np.ndarray]:
    """The boxes where a text of this size may stand ``[P, 4]``, and how far away each is."""
    dots = axes.figure.dpi / 72
    point = axes.transData.transform((label.x, label.y))
    half = np.array([width, height]) / 2
    boxes, distances = [], []
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            reach = np.array([half[0], 0.0 if right else half[1]]) + distance * dots
            middle = point + reach * (right, up)
            boxes.append([*(middle - half), *(middle + half)])
            distances.append(distance * dots)
    return np.array(boxes), np.array(distances)


def _overlaps(boxes: np.ndarray, others: np.ndarray, margin: float) -> np.ndarray:
    """The areas ``[P, M]`` that boxes ``[P, 4]`` share with others ``[M, 4]`` and their margins."""
    one, two = boxes[:, None], others[None]
    low = np.maximum(one[..., :2], two[..., :2] - margin)
    high = np.minimum(one[..., 2:], two[..., 2:] + margin)
    return np.clip(high - low, 0, None).prod(-1)


def _move(axes: Axes, text: Annotation, label: Label, box: np.ndarray) -> None:
    """Put the text into its box; a line leads to its point."""
    middle = (box[:2] + box[2:]) / 2
    offset = middle - axes.transData.transform((label.x, label.y))
    text.set_position(tuple(offset * 72 / axes.figure.dpi))
