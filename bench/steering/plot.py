"""Plot accuracy against N, a panel for each model and potential."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import charts
from charts import ends, legend_below, picture
from matplotlib.axes import Axes
from steering.grid import POTENTIALS
from steering.report import METHODS, ONE, TITLES, Row

#: Choices among samples have thin dashed lines, SMC thick ones.
COLOURS: dict[str, str] = dict(zip(METHODS[1:], (*charts.COLOURS, charts.SKY), strict=True))
NAMES = {"steps": "a rule for arithmetic", "judge": "the trained reward model"}


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the plot as a PNG to ``path``."""
    models = list(dict.fromkeys(row.model for row in rows))
    size = (4.6 * len(POTENTIALS), 0.8 + 3.4 * len(models))
    shape = {"rows": len(models), "columns": len(POTENTIALS), "sharex": True, "sharey": "row"}
    with picture(path, size, **shape) as (figure, panels):
        for line, model in zip(panels, models, strict=True):
            for axes, name in zip(line, POTENTIALS, strict=True):
                _panel(axes, [r for r in rows if r.model == model and r.potential in ("", name)])
                axes.set_title(f"{TITLES[model]}\n{NAMES[name]}", fontsize=9)
            line[0].set_ylabel("accuracy, %")
        for axes in panels[-1]:
            axes.set_xlabel("samples or particles N")
        legend_below(figure, panels[0, 0], ncols=4)


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.method == ONE:
            axes.axhline(100 * row.accuracy.mean, color="black", lw=1, ls=":", label=ONE)
    for place, method in enumerate(COLOURS):
        here = [row for row in rows if row.method == method]
        # Lines are slightly beside their N, so that intervals do not overlap.
        shift = 2 ** (0.25 * (place / len(COLOURS) - 0.5))
        wide, style, marker = (2, "-", "o") if method.startswith("SMC") else (1, "--", "s")
        axes.errorbar(
            [shift * row.num_particles for row in here],
            [100 * row.accuracy.mean for row in here],
            ends([row.accuracy for row in here], 100),
            color=COLOURS[method],
            label=method,
            **{"lw": wide, "ls": style, "marker": marker, "ms": 4, "elinewidth": 0.8},
        )
    counts = sorted({row.num_particles for row in rows} - {1})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.grid(alpha=0.25, lw=0.6)
