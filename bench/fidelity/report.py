"""Summarize scored answers as rows, and the rows as tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from answers import Record
from charts import COLOURS, GREY, ends, legend_below, picture
from fidelity.grid import AR_DRAFT, AR_TARGET, AUTO, DEFAULT, EXACT, MIXED, SMC, Cell
from fidelity.scoring import Score
from intervals import (
    Interval,
    kl_at_least,
    paired_difference,
    paired_ratio_difference,
    ratio,
    watched_tilt,
    wilson,
)
from matplotlib.axes import Axes
from results import ess_share, interval_cell, number_cell, resample_rate, table

from sglang_smc.options.server import DEFAULTS
from sglang_smc.tools.demo.serving import tokens_per_pass


@dataclass(frozen=True)
class CellRow:
    """A cell's numbers; ``None`` where a number does not apply."""

    slug: str
    family: str
    temperature: float
    num_particles: int | None
    evidence_threshold: float | None  # also the default of `auto` and smc
    label: str  # without the temperature
    accuracy: Interval
    difference: Interval | None  # accuracy minus AR's
    tokens_per_pass: float | None
    tilt: Interval
    innovation: Interval  # nats per token
    kl_at_least: Interval  # nats per answer
    log_p_difference: Interval | None  # nats per token, minus AR's
    server_tilt: Interval | None
    ess_share: float | None
    resample_rate: float | None
    kl_at_most: Interval | None  # only for the paper's algorithm: -E[log Z]


Answered = Sequence[tuple[Record, Score]]


def make_rows(answers: Mapping[Cell, Answered]) -> list[CellRow]:
    """Return a row for each complete cell, compared with AR at the same temperature."""
    references = {cell.temperature: a for cell, a in answers.items() if cell.family == AR_TARGET}
    rows = []
    for cell, found in answers.items():
        is_reference = cell.family == AR_TARGET
        rows.append(_row(cell, found, None if is_reference else references.get(cell.temperature)))
    return rows


def _row(cell: Cell, found: Answered, reference: Answered | None) -> CellRow:
    scores = [score for _, score in found]
    infos = [record.info for record, _ in found]
    smc = cell.smc or {}
    # The other modes keep no population.
    weighed = infos if smc and smc.get("mode", DEFAULTS.mode) == "smc" else []
    difference = log_p_difference = kl_at_most = None
    if reference is not None:
        difference = paired_difference(_right(found), _right(reference))
        ours, theirs = _log_p(scores), _log_p([score for _, score in reference])
        log_p_difference = paired_ratio_difference(ours, theirs)
    if (cell.family, cell.evidence_threshold) == (SMC, 0):
        # -E[log Z] bounds KL(SMC || target) from above, for E[Z] = 1: cut columns bias Z.
        kl_at_most = ratio(-np.array([info["spec_smc_log_evidence"] for info in infos]))
    return CellRow(
        slug=cell.slug,
        family=cell.family,
        temperature=cell.temperature,
        num_particles=smc.get("num_particles"),
        evidence_threshold=cell.evidence_threshold,
        label=cell.label,
        accuracy=wilson(sum(record.right for record, _ in found), len(found)),
        difference=difference,
        tokens_per_pass=None if cell.family == AR_DRAFT else tokens_per_pass(infos),
        tilt=ratio(_column(scores, "tilt"), _column(scores, "information")),
        innovation=ratio(_column(scores, "innovation"), _column(scores, "tokens")),
        kl_at_least=kl_at_least([np.array(score.log_ratios) for score in scores]),
        log_p_difference=log_p_difference,
        server_tilt=watched_tilt(infos),
        ess_share=ess_share(weighed),
        resample_rate=resample_rate(weighed),
        kl_at_most=kl_at_most,
    )


def _right(found: Answered) -> dict[Any, bool]:
    return {record.index: record.right for record, _ in found}


def _column(scores: Sequence[Score], name: str) -> np.ndarray:
    """Return one field of all scores, ``[n]``."""
    return np.array([vars(score)[name] for score in scores], dtype=float)


def _log_p(scores: Sequence[Score]) -> tuple[np.ndarray, np.ndarray]:
    return _column(scores, "log_p"), _column(scores, "tokens")


COLUMNS: dict[str, Callable[[CellRow], str]] = {
    "": lambda row: row.label,
    "tokens / target pass": lambda row: number_cell(row.tokens_per_pass, ".2f"),
    "tilt to the draft": lambda row: interval_cell(row.tilt, "+.3f"),
    "KL to the target, nats an answer, at least": lambda row: interval_cell(row.kl_at_least, ".2f"),
    "innovation, nats / token": lambda row: interval_cell(row.innovation, "+.4f"),
    "E[log p] / token minus AR": lambda row: interval_cell(row.log_p_difference, "+.4f"),
    "the server's own tilt": lambda row: interval_cell(row.server_tilt, "+.3f"),
    "accuracy, %": lambda row: interval_cell(row.accuracy, ".1f", scale=100),
    "points from AR": lambda row: interval_cell(row.difference, "+.1f", scale=100),
}


def markdown(rows: Sequence[CellRow], note: str) -> str:
    """Return a table for each temperature, with the upper bound of the paper's algorithm below."""
    parts = [note]
    for temperature in sorted({row.temperature for row in rows}):
        here = [row for row in rows if row.temperature == temperature]
        parts.append(f"**Temperature {temperature:g}**\n\n{table(COLUMNS, here)}")
        parts += [
            f"{row.label}, by its evidence: KL to the target at most "
            f"{interval_cell(row.kl_at_most, '.2f')}."
            for row in here
            if row.kl_at_most
        ]
    return "\n\n".join(parts) + "\n"


# --- Plot

#: Families by name, with colour, marker, and the offset (in points) and side of their labels.
SIDES = {
    "verified: exact, mixed, auto": ((EXACT, MIXED, AUTO), COLOURS[0], "o", (7, -8), "left"),
    "weighed: smc": ((SMC, DEFAULT), COLOURS[1], "D", (-7, 14), "right"),
}
#: Settings that are emphasized by their names.
NAMED = (EXACT, AUTO, DEFAULT)


def plot_rows(rows: Sequence[CellRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    shape = {"columns": len(temperatures), "sharex": True, "sharey": True}
    with picture(path, (0.6 + 5.0 * len(temperatures), 5.0), **shape) as (figure, (panels,)):
        for axes, temperature in zip(panels, temperatures, strict=True):
            _panel(axes, [row for row in rows if row.temperature == temperature])
            axes.set_xlabel("tokens per target pass")
            axes.set_title(f"Temperature {temperature:g}", fontweight="bold")
        panels[0].set_ylabel("KL to the target, nats an answer, at least")
        legend_below(figure, panels[0], ncols=2)


def _panel(axes: Axes, rows: Sequence[CellRow]) -> None:
    axes.axhline(0, color="black", lw=1, zorder=1)
    for name, (families, colour, marker, offset, side) in SIDES.items():
        here = [row for row in rows if row.family in families]
        here.sort(key=lambda row: row.tokens_per_pass or 0.0)
        x, kl = [row.tokens_per_pass or 0.0 for row in here], [row.kl_at_least for row in here]
        heights = [value.mean for value in kl]
        style = {
            "fmt": marker,
            "color": colour,
            "mec": "white",
            "ls": ":",
            "lw": 1,
            "elinewidth": 1,
        }
        axes.errorbar(x, heights, ends(kl), label=name, ms=6, zorder=4, **style)
        for row, at in zip(here, zip(x, heights, strict=True), strict=True):
            _label(axes, row, at, colour, offset, side)
    for row in rows:
        if row.family == AR_TARGET:
            text = f"AR: {row.accuracy.mean:.1%} right"
            axes.annotate(text, (0.02, 0.97), xycoords="axes fraction", va="top", color=GREY)
    axes.margins(x=0.18, y=0.1)
    axes.grid(alpha=0.25, lw=0.6)


def _label(
    axes: Axes,
    row: CellRow,
    at: tuple[float, float],
    colour: str,
    offset: tuple[int, int],
    side: str,
) -> None:
    """Label a point with its name, and below it in small type its accuracy."""
    is_named, (right, up) = row.family in NAMED, offset
    name = row.label if is_named else f"c = {row.evidence_threshold:g}"
    accuracy = f"{row.accuracy.mean:.1%} right"
    weight = "bold" if is_named else "normal"
    for text, lower, size, shade in ((name, 0, 9, colour), (accuracy, 9, 6.5, GREY)):
        place = {"xytext": (right, up - lower), "textcoords": "offset points", "ha": side}
        style = {"fontsize": size, "color": shade, "weight": weight if shade == colour else None}
        axes.annotate(text, at, va="center", **place, **style)
