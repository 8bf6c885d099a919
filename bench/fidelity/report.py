"""Summarize scored answers as rows, and the rows as CSV, Markdown and sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from answers import Record, seconds
from fidelity.grid import AR_DRAFT, AR_TARGET, SMC, Cell
from fidelity.nats import kl_at_least, watched_tilt
from fidelity.scoring import Score
from intervals import Interval, paired_difference, paired_ratio_difference, ratio, wilson
from results import ess_share, interval_cell, number_cell, resample_rate, table

from sglang_smc.options.server import DEFAULTS
from sglang_smc.tools.demo.serving import tokens_per_pass

#: Limits for `auto`, at both temperatures.
MOST_TILT, MOST_NATS = 0.15, 0.15


@dataclass(frozen=True)
class CellRow:
    """A cell's numbers; ``None`` where a number does not apply."""

    slug: str
    family: str
    temperature: float
    mode: str | None
    num_particles: int | None
    num_steps: int | None
    evidence_threshold: float | None  # also the default of `auto` and smc
    label: str  # without the temperature
    accuracy: Interval
    difference: Interval | None  # accuracy minus AR's
    tokens_per_pass: float | None
    tilt: Interval
    innovation: Interval  # nats per token
    sharpening: Interval  # innovation over its variance: locally the shift of 1 / temperature
    kl_at_least: Interval  # nats per answer
    log_p_difference: Interval | None  # nats per token, minus AR's
    server_tilt: Interval | None
    tokens_per_second: float
    ess_share: float | None
    resample_rate: float | None
    exact_rate: float | None  # share of rounds that verify instead of weighting
    kl_at_most: Interval | None  # only for the paper's algorithm: -E[log Z]
    completion_tokens: int
    seconds: float


Answered = Sequence[tuple[Record, Score]]


def make_rows(answers: Mapping[Cell, Answered]) -> list[CellRow]:
    """Return a row for each complete cell, compared with AR at the same temperature."""
    references = {c.temperature: a for c, a in answers.items() if c.family == AR_TARGET}
    rows = []
    for cell, found in answers.items():
        is_reference = cell.family == AR_TARGET
        reference = None if is_reference else references.get(cell.temperature)
        rows.append(_row(cell, found, reference))
    return rows


def _row(cell: Cell, found: Answered, reference: Answered | None) -> CellRow:
    records, scores = [record for record, _ in found], [score for _, score in found]
    infos = [record.info for record in records]
    smc = cell.smc or {}
    mode = smc.get("mode", DEFAULTS.mode) if smc else None
    weighed = infos if mode == "smc" else []  # the other modes keep no population
    tokens, spent = sum(info["completion_tokens"] for info in infos), seconds(records)
    innovation = _column(scores, "innovation")
    return CellRow(
        slug=cell.slug,
        family=cell.family,
        temperature=cell.temperature,
        mode=mode,
        num_particles=smc.get("num_particles"),
        num_steps=smc.get("num_steps"),
        evidence_threshold=cell.evidence_threshold,
        label=cell.label,
        accuracy=wilson(sum(record.right for record in records), len(records)),
        difference=paired_difference(_right(found), _right(reference)) if reference else None,
        tokens_per_pass=None if cell.family == AR_DRAFT else tokens_per_pass(infos),
        tilt=ratio(_column(scores, "tilt"), _column(scores, "information")),
        innovation=ratio(innovation, _column(scores, "tokens")),
        sharpening=ratio(innovation, _column(scores, "variance")),
        kl_at_least=kl_at_least([np.array(score.log_ratios) for score in scores]),
        log_p_difference=_log_p_difference(found, reference) if reference else None,
        server_tilt=watched_tilt(infos),
        tokens_per_second=tokens / max(spent, 1e-9),
        ess_share=ess_share(weighed),
        resample_rate=resample_rate(weighed),
        exact_rate=None if mode == "smc" else _exact_rate(infos),
        kl_at_most=_kl_at_most(cell, records),
        completion_tokens=tokens,
        seconds=spent,
    )


def _right(found: Answered) -> dict[Any, bool]:
    return {record.index: record.right for record, _ in found}


def _column(scores: Sequence[Score], name: str) -> np.ndarray:
    """Return one field of all scores, ``[n]``."""
    return np.array([getattr(score, name) for score in scores], dtype=float)


def _log_p_difference(found: Answered, reference: Answered) -> Interval:
    """Return E[log p] per token minus AR's, over the same problems in the same order."""
    ours, theirs = ([score for _, score in answers] for answers in (found, reference))
    return paired_ratio_difference(_log_p(ours), _log_p(theirs))


def _log_p(scores: Sequence[Score]) -> tuple[np.ndarray, np.ndarray]:
    return _column(scores, "log_p"), _column(scores, "tokens")


def _exact_rate(infos: Sequence[Mapping[str, Any]]) -> float | None:
    counted = [info for info in infos if "spec_smc_exact_ct" in info]
    rounds = sum(info["spec_verify_ct"] for info in counted)
    return sum(info["spec_smc_exact_ct"] for info in counted) / rounds if rounds else None


def _kl_at_most(cell: Cell, records: Sequence[Record]) -> Interval | None:
    """Return the upper bound -E[log Z] of KL(SMC || target), for E[Z] = 1: cut columns bias Z."""
    if (cell.family, cell.evidence_threshold) != (SMC, 0):
        return None
    return ratio(-np.array([record.info["spec_smc_log_evidence"] for record in records]))


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


# --- In words


def conclusions(rows: Sequence[CellRow]) -> str:
    """Return for each temperature AR's own statistics, and the fastest setting within limits."""
    lines = []
    for temperature in sorted({row.temperature for row in rows}):
        here = [row for row in rows if row.temperature == temperature]
        lines.append(f"Temperature {temperature:g}:")
        lines += [_check(row) for row in here if row.family == AR_TARGET]
        lines.append(
            f"  most tokens a pass at a tilt of at most {MOST_TILT:g} and at most {MOST_NATS:g} "
            f"nats:  {_winner(here)}"
        )
    return "\n".join(lines)


def _check(row: CellRow) -> str:
    """Return AR's statistics: if their intervals exclude 0, all others are in doubt."""
    return (
        f"  AR itself (0 is expected):  tilt {interval_cell(row.tilt, '+.3f')}, "
        f"innovation {interval_cell(row.innovation, '+.4f')}"
    )


def most_tokens_within(rows: Sequence[CellRow], tilt: float, nats: float) -> CellRow | None:
    """Return the row with most tokens per pass, of those with estimates within both limits."""
    close = [
        row
        for row in rows
        if row.tokens_per_pass and row.tilt.mean <= tilt and row.kl_at_least.mean <= nats
    ]
    return max(close, key=lambda row: row.tokens_per_pass or 0.0, default=None)


def _winner(rows: Sequence[CellRow]) -> str:
    row = most_tokens_within(rows, MOST_TILT, MOST_NATS)
    return "none" if row is None else f"{row.label}: {row.tokens_per_pass:.2f}"
