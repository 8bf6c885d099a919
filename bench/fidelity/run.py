"""Measure each mode's distance from the target's distribution and its tokens per target pass.

    make fidelity                                        # everything, resumable at any point
    .venv/bin/python bench/fidelity --list               # lists the cells
    .venv/bin/python bench/fidelity --only 'exact-*'     # a part of it
    .venv/bin/python bench/fidelity --problems 20        # a quick run, in another --output-dir

Engines answer; plain models compute, for each token of each answer, the distributions of target
and draft. Every answer is written with its scores as soon as it is complete, so after an
interruption the same command continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers
import numpy as np
from answers import COMMON
from charts import COLOURS, Point, scatter
from fidelity.scoring import ScoredAnswer, ScoredStudy
from intervals import (
    Interval,
    kl_at_least,
    paired_difference,
    paired_ratio_difference,
    ratio,
    watched_tilt,
    wilson,
)
from results import (
    Report,
    by_temperature,
    interval_cell,
    number_cell,
    over_rounds,
    table,
    tokens_a_pass,
)

from sglang_smc.options.server import (
    AUTO_EVIDENCE_THRESHOLD,
    DEFAULTS,
    EVIDENCE_THRESHOLD,
    LONG_LAG,
)

# --- Cells: each mode, and plain decoding, at each temperature

AR_TARGET = "AR target"
AR_DRAFT = "AR draft"
EXACT = "exact"
AUTO = "auto"
SMC = "smc"
DEFAULT = "smc default"
LATE = f"smc lag {LONG_LAG}"  # the default with a longer lag
#: Evidence thresholds besides those of `auto` and of the default; 0 is the paper's algorithm.
AUTO_THRESHOLDS = (4.0, 1.0, 0.5)
SMC_THRESHOLDS = (1.0, 0.0)
#: N and K are the server's defaults throughout.
SIZES = {"num_particles": DEFAULTS.num_particles, "num_steps": DEFAULTS.num_steps}
SMC_ENGINE: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": SIZES["num_steps"],
    "speculative_smc_num_particles": SIZES["num_particles"],
}


@dataclass(frozen=True)
class FidelityCell(answers.Cell):
    """A setting at a temperature; the engine is "target", "draft" or "smc"."""

    family: str = ""
    evidence_threshold: float | None = None  # in force, set or default


def cells(temperatures: Iterable[float]) -> list[FidelityCell]:
    """Return all settings at each temperature, grouped by engine."""
    found = [cell for temperature in temperatures for cell in _cells(temperature)]
    return sorted(found, key=lambda cell: ("target", "draft", "smc").index(cell.engine))


def _cells(temperature: float) -> list[FidelityCell]:
    def smc(family: str, c: float | None = None, **asked: Any) -> FidelityCell:
        label = family
        if "evidence_threshold" in asked:
            c = asked["evidence_threshold"]
            label = f"{family} c={c:g}"
        return FidelityCell(label, "smc", temperature, {**SIZES, **asked}, 1, family, c)

    # `auto` and the default have thresholds too, and are measured under these names.
    verified = [c for c in AUTO_THRESHOLDS if c != AUTO_EVIDENCE_THRESHOLD]
    weighed = [c for c in SMC_THRESHOLDS if c != EVIDENCE_THRESHOLD]
    block = {"mode": "smc", "resample_at": "block"}
    return [
        FidelityCell(AR_TARGET, "target", temperature, family=AR_TARGET),
        FidelityCell(AR_DRAFT, "draft", temperature, family=AR_DRAFT),
        smc(EXACT, mode="exact"),
        *(smc(AUTO, mode="auto", evidence_threshold=c) for c in verified),
        *(smc(SMC, **block, evidence_threshold=c) for c in weighed),
        smc(AUTO, AUTO_EVIDENCE_THRESHOLD, mode="auto"),
        smc(DEFAULT, EVIDENCE_THRESHOLD),
        smc(LATE, EVIDENCE_THRESHOLD, max_lag=LONG_LAG),
    ]


# --- Rows


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The distance from the target; ``None`` where a number does not apply."""

    accuracy: Interval
    difference: Interval | None  # accuracy minus AR's
    tilt: Interval  # in the direction of the shipped draft
    innovation: Interval  # nats per token
    kl_at_least: Interval  # nats per answer; in the same direction
    log_p_difference: Interval | None  # nats per token, minus AR's
    server_tilt: Interval | None  # in the direction of the draft at work


@dataclass(frozen=True, kw_only=True)
class FidelityRow(Quality):
    """A cell's numbers; ``None`` where a number does not apply."""

    slug: str
    family: str
    temperature: float
    num_particles: int | None
    evidence_threshold: float | None  # also the default of `auto` and smc
    label: str  # without the temperature
    tokens_per_pass: float | None
    ess_share: float | None
    resample_rate: float | None
    kl_at_most: Interval | None  # only for the paper's algorithm: -E[log Z]


Answered = Sequence[ScoredAnswer]


def make_rows(answers: Mapping[FidelityCell, Answered]) -> list[FidelityRow]:
    """Return a row for each complete cell, compared with AR at the same temperature."""
    references = {cell.temperature: a for cell, a in answers.items() if cell.family == AR_TARGET}
    return [
        _row(cell, found, None if cell.family == AR_TARGET else references.get(cell.temperature))
        for cell, found in answers.items()
    ]


def _row(cell: FidelityCell, found: Answered, reference: Answered | None) -> FidelityRow:
    infos = [one.info for one in found]
    smc = cell.smc or {}
    tokens = _column(found, "tokens")
    # The other modes keep no population.
    weighed = infos if smc and smc.get("mode", DEFAULTS.mode) == "smc" else []
    difference = log_p_difference = kl_at_most = None
    if reference is not None:
        difference = paired_difference(*({a.index: a.right for a in x} for x in (found, reference)))
        sums = ((_column(x, "log_p"), _column(x, "tokens")) for x in (found, reference))
        log_p_difference = paired_ratio_difference(*sums)
    if (cell.family, cell.evidence_threshold) == (SMC, 0):
        # -E[log Z] bounds KL(SMC || target) from above, for E[Z] = 1: cut columns bias Z.
        kl_at_most = ratio(-np.array([info["spec_smc_log_evidence"] for info in infos]))
    return FidelityRow(
        slug=cell.slug,
        family=cell.family,
        temperature=cell.temperature,
        num_particles=smc.get("num_particles"),
        evidence_threshold=cell.evidence_threshold,
        label=cell.label,
        accuracy=wilson(sum(one.right for one in found), len(found)),
        difference=difference,
        tokens_per_pass=None if cell.family == AR_DRAFT else tokens_a_pass(infos).mean,
        tilt=ratio(_column(found, "tilt"), _column(found, "information")),
        innovation=ratio(_column(found, "innovation"), tokens),
        kl_at_least=kl_at_least([np.array(one.log_ratios) for one in found]),
        log_p_difference=log_p_difference,
        server_tilt=watched_tilt(infos),
        ess_share=over_rounds(weighed, "spec_smc_ess_mean", per="spec_smc_num_particles"),
        resample_rate=over_rounds(weighed, "spec_smc_resample_ct", per="spec_smc_rounds_ct"),
        kl_at_most=kl_at_most,
    )


def _column(found: Answered, name: str) -> np.ndarray:
    """Return one field of all answers, ``[n]``."""
    return np.array([getattr(one, name) for one in found], dtype=float)


COLUMNS: dict[str, Callable[[FidelityRow], str]] = {
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


def markdown(rows: Sequence[FidelityRow], note: str) -> str:
    """Return a table for each temperature, with the upper bound of the paper's algorithm below."""
    parts = [note]
    for title, here in by_temperature(rows).items():
        parts.append(f"**{title}**\n\n{table(COLUMNS, here)}")
        parts += [
            f"{row.label}, by its evidence: KL to the target at most "
            f"{interval_cell(row.kl_at_most, '.2f')}."
            for row in here
            if row.kl_at_most
        ]
    return "\n\n".join(parts) + "\n"


VERIFIED = "verified: exact, auto"
WEIGHED = "weighed: smc"
SERIES = dict.fromkeys((EXACT, AUTO), VERIFIED) | dict.fromkeys((SMC, DEFAULT), WEIGHED)
STYLES = {VERIFIED: (COLOURS[0], "o"), WEIGHED: (COLOURS[1], "D")}


def plot_rows(rows: Sequence[FidelityRow], path: Path) -> None:
    """Write KL against tokens per pass as a PNG to ``path``, with the accuracy of each point."""
    panels = {title: list(map(_point, here)) for title, here in by_temperature(rows).items()}
    names = "tokens per target pass", "KL to the target, nats an answer, at least"
    scatter(path, panels, STYLES, names, plain=1.0)


def _point(row: FidelityRow) -> Point:
    label = f"{row.label}, {row.accuracy.mean:.1%} right"
    return Point(row.tokens_per_pass or 0.0, row.kl_at_least, SERIES.get(row.family, ""), label)


# --- The study


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    sizes = f"N={SIZES['num_particles']}, K={SIZES['num_steps']}"
    return (
        f"The shipped pair, {sizes}; {answers.about(origin)}"
        "Tilt: 0 is the target's law. Innovation: log p + H, 0 under the target."
    )


class Fidelity(ScoredStudy[FidelityCell]):
    """The study, with one engine for all modes."""

    name = "fidelity"
    about = "Tokens per target pass, accuracy, and distance from the target's law, of all modes."
    problems = 2000
    report = Report("fidelity", FidelityRow, markdown, plot_rows)
    note = staticmethod(note)

    def grid(self) -> list[FidelityCell]:
        return cells(self.options.temperatures)

    def engine(self, name: str) -> dict[str, Any]:
        return COMMON | (SMC_ENGINE if name == "smc" else {})

    def models(self, name: str) -> tuple[str, str | None]:
        return ("target", "draft") if name == "smc" else (name, None)

    def rows(self) -> list[FidelityRow]:
        return make_rows(self.complete())


main = Fidelity.main
