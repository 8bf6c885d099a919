"""Summarize scored answers as rows, the rows as CSV, and these as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from drafts.chains import Counter, Rounds
from drafts.cost import BATCH, CONTEXT, DEVICE, TARGET, plain_seconds, round_seconds
from drafts.grid import AUTO, DRAFT, EXACT, PROPOSALS, Proposal, label, proposal_of, rule_of
from fidelity.grid import AR_TARGET, Cell
from fidelity.nats import ratio
from fidelity.report import Answered, CellRow, make_rows
from results import Interval, interval_cell, markdown_table, number_cell


@dataclass(frozen=True)
class DraftRow:
    """A line of the table; None where a number does not apply."""

    label: str  # without the temperature
    proposal: str  # empty for the target alone
    rule: str
    num_particles: int
    temperature: float
    tokens_per_pass: Interval
    accuracy: Interval | None
    difference: Interval | None  # accuracy minus AR's
    innovation: Interval | None  # nats per token
    log_p_difference: Interval | None  # nats per token, minus AR's
    kl_at_least: Interval | None  # nats per answer; in the direction of the shipped draft
    tilt: Interval | None  # in the direction of the shipped draft
    server_tilt: Interval | None  # to the proposal itself
    round_ms: float  # for an 8B, by the planner
    tokens_per_second: float  # by these round times
    to_draft_model: float | None  # of the same rule, N and temperature
    plugin: str  # fingerprint of the code that answered

    @property
    def is_smc(self) -> bool:
        return self.rule in (EXACT, AUTO)


def rows_of(
    answers: Mapping[Cell, Answered], plugins: Mapping[Cell, str], count: Counter
) -> list[DraftRow]:
    """Return a row for each complete cell, and for SGLang's rules if AR's answers are complete."""
    found, engines = [], {cell.engine for cell in answers}
    for cell, row in zip(answers, make_rows(answers), strict=True):
        found.append(_measured(cell, row, answers[cell], plugins[cell]))
        if cell.kind.family == AR_TARGET:
            counted = [one for one in PROPOSALS if one.name in engines]
            found += _computed(cell, answers[cell], plugins[cell], counted, count)
    return sorted(_compared(found), key=_place)


#: Columns shared with the rows of the fidelity study.
SHARED = ("accuracy", "difference", "innovation", "log_p_difference", "kl_at_least", "tilt")
SHARED += ("server_tilt",)


def _measured(cell: Cell, row: CellRow, found: Answered, plugin: str) -> DraftRow:
    proposal, num_particles = proposal_of(cell.engine), row.num_particles or 1
    infos = [record.info for record, _ in found]
    tokens = np.array([info["completion_tokens"] - 1 for info in infos], dtype=float)
    passes = np.array([info["spec_verify_ct"] for info in infos]) if proposal else tokens
    numbers = {name: getattr(row, name) for name in SHARED}
    yielded = ratio(tokens, passes)
    return _row(row.label, proposal, rule_of(cell), num_particles, cell, yielded, plugin, numbers)


def _computed(
    cell: Cell, found: Answered, plugin: str, counted: Sequence[Proposal], count: Counter
) -> Iterator[DraftRow]:
    """Yield rows of SGLang's rules, which keep the target's distribution."""
    records = [record for record, _ in found]
    tokens = np.array([len(record.output_ids) - 1 for record in records], dtype=float)
    for proposal in counted:
        rounds: Rounds = count(proposal, records, cell.temperature)
        for rule, numbers in rounds.items():
            name, yielded = label(proposal.name, rule, 1), ratio(tokens, numbers)
            yield _row(name, proposal, rule, 1, cell, yielded, plugin, dict.fromkeys(SHARED))


def _row(
    label: str,
    proposal: Proposal | None,
    rule: str,
    num_particles: int,
    cell: Cell,
    yielded: Interval,
    plugin: str,
    numbers: Mapping[str, Any],
) -> DraftRow:
    seconds = _seconds(proposal, num_particles)
    return DraftRow(
        label=label,
        proposal=proposal.name if proposal else "",
        rule=rule,
        num_particles=num_particles,
        temperature=cell.temperature,
        tokens_per_pass=yielded,
        round_ms=1e3 * seconds,
        tokens_per_second=yielded.mean / seconds,
        to_draft_model=None,
        plugin=plugin,
        **numbers,
    )


def _seconds(proposal: Proposal | None, num_particles: int) -> float:
    return round_seconds(proposal.planned, num_particles) if proposal else plain_seconds()


def _compared(rows: Sequence[DraftRow]) -> list[DraftRow]:
    """Return rows with the ratio to the draft model's row of the same rule, N and temperature."""
    speed = {_like(row): row.tokens_per_second for row in rows if row.proposal == DRAFT.name}
    return [
        replace(row, to_draft_model=row.tokens_per_second / speed[_like(row)])
        if row.proposal and _like(row) in speed
        else row
        for row in rows
    ]


def _like(row: DraftRow) -> tuple[str, int, float]:
    return row.rule, row.num_particles, row.temperature


def _place(row: DraftRow) -> tuple[float, int, bool]:
    """Return the sort key: temperature, proposal, SMC before SGLang's rules."""
    names = ["", *(proposal.name for proposal in PROPOSALS)]
    return row.temperature, names.index(row.proposal), not row.is_smc


HEADERS = (
    "",
    "tokens / target pass",
    "ms a round of an 8B",
    "tokens / s to expect",
    "times the draft model",
    "KL to the target, nats an answer, at least",
    "innovation, nats / token",
    "E[log p] / token minus AR",
    "tilt to the shipped draft",
    "the server's own tilt",
    "accuracy, %",
    "points from AR",
)


def markdown(rows: Sequence[DraftRow], note: str) -> str:
    """Return Markdown: for each temperature each proposal's fastest row, and all rows."""
    parts = [note]
    for temperature in sorted({row.temperature for row in rows}):
        here = [row for row in rows if row.temperature == temperature]
        parts.append(
            f"**Temperature {temperature:g}: the most tokens / s**\n\n{_bottom_line(here)}"
        )
        table = markdown_table(HEADERS, [_cells(row) for row in here])
        parts.append(f"**Temperature {temperature:g}: all**\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _cells(row: DraftRow) -> list[str]:
    return [
        row.label,
        interval_cell(row.tokens_per_pass, ".2f"),
        f"{row.round_ms:.2f}",
        f"{row.tokens_per_second:,.0f}",
        number_cell(row.to_draft_model, ".2f"),
        interval_cell(row.kl_at_least, ".2f"),
        interval_cell(row.innovation, "+.4f"),
        interval_cell(row.log_p_difference, "+.4f"),
        interval_cell(row.tilt, "+.3f"),
        interval_cell(row.server_tilt, "+.3f"),
        interval_cell(row.accuracy, ".1f", scale=100),
        interval_cell(row.difference, "+.1f", scale=100),
    ]


def fastest(rows: Iterable[DraftRow], proposal: str, rules: Sequence[str]) -> DraftRow | None:
    """Return a proposal's fastest row by these rules."""
    ours = [row for row in rows if row.proposal == proposal and row.rule in rules]
    return max(ours, key=lambda row: row.tokens_per_second, default=None)


BEST_HEADERS = (
    "",
    "setting",
    "tokens / target pass",
    "tokens / s to expect",
    "times the draft model",
    "times AR",
)


def _bottom_line(rows: Sequence[DraftRow]) -> str:
    """Return the fastest rows at equal fidelity: exact beside exact, auto beside auto."""
    lines, plain = [], 1 / plain_seconds()
    for rule in (EXACT, AUTO):
        model = fastest(rows, DRAFT.name, (rule,))
        for proposal in PROPOSALS:
            best = fastest(rows, proposal.name, (rule,))
            if best is None:
                continue
            speed = best.tokens_per_second
            lines.append(
                [
                    proposal.name,
                    f"{rule} N={best.num_particles}",
                    interval_cell(best.tokens_per_pass, ".2f"),
                    f"{speed:,.0f}",
                    number_cell(speed / model.tokens_per_second if model else None, ".2f"),
                    f"{speed / plain:.2f}",
                ]
            )
    return markdown_table(BEST_HEADERS, lines)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    last = origin["settings"]["problems"] - 1
    return (
        f"The shipped pair and its heads, K = 8; held-out problems 0 to {last}, "
        f"each with its number as the seed; on {origin['hardware']}, {origin['date'][:10]}. In "
        "brackets 95 % intervals, over answers. Milliseconds are the planner's bound for a round "
        f"of {TARGET} on an {DEVICE.upper()}, batch {BATCH}, {CONTEXT:,} tokens of context, with a "
        "draft of the same kind; tokens / s to expect are tokens / target pass over these, a "
        "bound, too, and no measurement on a GPU. KL and tilt are looked for in the direction of "
        "the shipped draft, whatever drafted; the server's own tilt is to the draft at work. "
        "Chains are SGLang's rules at N = 1, computed from p and q on AR's answers, which leave "
        "the target's law as it is: of the likeliest tokens (its rule for a chain), and of samples "
        "(`--speculative-use-rejection-sampling`). STANDALONE is SGLang's, measured."
    )
