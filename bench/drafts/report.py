"""Summarize scored answers as rows, and the rows as tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import charts
from charts import GREY, SKY, ends, legend_below, picture
from drafts.grid import DRAFT, NUM_STEPS, PROPOSALS, STANDALONE, proposal_of, rule_of
from fidelity.grid import AUTO, EXACT, Cell
from fidelity.report import Answered, CellRow, make_rows
from intervals import Interval
from matplotlib.axes import Axes
from results import interval_cell, number_cell, table, tokens_a_pass

from sglang_smc.options.server import LAG
from sglang_smc.tools.plan import shapes
from sglang_smc.tools.plan.devices import named
from sglang_smc.tools.plan.roofline import Scenario, ar_step

TARGET, DEVICE, BATCH, CONTEXT = "llama-3.1-8b", "h200", 1, 2000
#: Mean tokens of each particle's own tail, as in the planner.
TAIL = LAG // 2


@lru_cache
def round_seconds(planned: str, num_particles: int) -> float:
    """Return a lower bound of the time of a round of K steps of an 8B.

    Args:
        planned: the draft, one of `sglang_smc.tools.plan.shapes.DRAFTS`.
    """
    target, draft = shapes.from_config(TARGET), shapes.draft_from_config(planned)
    device = named(DEVICE, shapes.lowest_precision(target, draft))
    scenario = Scenario(target, draft, device, CONTEXT, TAIL)
    return scenario.smc(BATCH, num_particles, NUM_STEPS).seconds


@lru_cache
def plain_seconds() -> float:
    """Return a lower bound of the time per token of an 8B without speculation."""
    return ar_step(shapes.from_config(TARGET), BATCH, CONTEXT + TAIL).seconds(named(DEVICE))


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


#: Columns shared with the rows of the fidelity study.
SHARED = ("accuracy", "difference", "innovation", "log_p_difference", "kl_at_least", "tilt")
SHARED += ("server_tilt",)


def rows_of(answers: Mapping[Cell, Answered], plugin: Callable[[Cell], str]) -> list[DraftRow]:
    """Return a row for each complete cell; ``plugin`` names the code that measured it."""
    pairs = zip(answers.items(), make_rows(answers), strict=True)
    found = [_row(cell, row, some, plugin(cell)) for (cell, some), row in pairs]
    return sorted(_compared(found), key=_place)


def _row(cell: Cell, row: CellRow, found: Answered, plugin: str) -> DraftRow:
    proposal, num_particles = proposal_of(cell.engine), row.num_particles or 1
    seconds = round_seconds(proposal.planned, num_particles) if proposal else plain_seconds()
    yielded = tokens_a_pass([record.info for record, _ in found])
    return DraftRow(
        label=row.label,
        proposal=proposal.name if proposal else "",
        rule=rule_of(cell),
        num_particles=num_particles,
        temperature=cell.temperature,
        tokens_per_pass=yielded,
        round_ms=1e3 * seconds,
        tokens_per_second=yielded.mean / seconds,
        to_draft_model=None,
        plugin=plugin,
        **{name: getattr(row, name) for name in SHARED},
    )


def _compared(rows: Sequence[DraftRow]) -> list[DraftRow]:
    """Return rows with the ratio to the draft model's row of the same rule, N and temperature."""
    like = {row: (row.rule, row.num_particles, row.temperature) for row in rows}
    speed = {like[row]: row.tokens_per_second for row in rows if row.proposal == DRAFT.name}
    ratios = {row: row.tokens_per_second / speed[like[row]] for row in rows if like[row] in speed}
    return [replace(row, to_draft_model=ratios.get(row)) for row in rows]


def _place(row: DraftRow) -> tuple[float, int, bool]:
    """Return the sort key: temperature, proposal, SMC before SGLang's rules."""
    names = ["", *(proposal.name for proposal in PROPOSALS)]
    return row.temperature, names.index(row.proposal), not row.is_smc


COLUMNS: dict[str, Callable[[DraftRow], str]] = {
    "": lambda row: row.label,
    "tokens / target pass": lambda row: interval_cell(row.tokens_per_pass, ".2f"),
    "ms a round of an 8B": lambda row: f"{row.round_ms:.2f}",
    "tokens / s to expect": lambda row: f"{row.tokens_per_second:,.0f}",
    "times the draft model": lambda row: number_cell(row.to_draft_model, ".2f"),
    "KL to the target, nats an answer, at least": lambda row: interval_cell(row.kl_at_least, ".2f"),
    "innovation, nats / token": lambda row: interval_cell(row.innovation, "+.4f"),
    "E[log p] / token minus AR": lambda row: interval_cell(row.log_p_difference, "+.4f"),
    "tilt to the shipped draft": lambda row: interval_cell(row.tilt, "+.3f"),
    "the server's own tilt": lambda row: interval_cell(row.server_tilt, "+.3f"),
    "accuracy, %": lambda row: interval_cell(row.accuracy, ".1f", scale=100),
    "points from AR": lambda row: interval_cell(row.difference, "+.1f", scale=100),
}
#: Of the fastest rows: a proposal's row, beside the draft model's by the same rule.
BEST: dict[str, Callable[[tuple[DraftRow, DraftRow | None]], str]] = {
    "": lambda pair: pair[0].proposal,
    "setting": lambda pair: f"{pair[0].rule} N={pair[0].num_particles}",
    "tokens / target pass": lambda pair: interval_cell(pair[0].tokens_per_pass, ".2f"),
    "tokens / s to expect": lambda pair: f"{pair[0].tokens_per_second:,.0f}",
    "times the draft model": lambda pair: number_cell(_times(*pair), ".2f"),
    "times AR": lambda pair: f"{pair[0].tokens_per_second * plain_seconds():.2f}",
}


def _times(row: DraftRow, model: DraftRow | None) -> float | None:
    return row.tokens_per_second / model.tokens_per_second if model else None


def markdown(rows: Sequence[DraftRow], note: str) -> str:
    """Return Markdown: for each temperature each proposal's fastest row, and all rows."""
    parts = [note]
    for temperature in sorted({row.temperature for row in rows}):
        here = [row for row in rows if row.temperature == temperature]
        parts.append(
            f"**Temperature {temperature:g}: the most tokens / s**\n\n{_bottom_line(here)}"
        )
        parts.append(f"**Temperature {temperature:g}: all**\n\n{table(COLUMNS, here)}")
    return "\n\n".join(parts) + "\n"


def fastest(rows: Iterable[DraftRow], proposal: str, rules: Sequence[str]) -> DraftRow | None:
    """Return a proposal's fastest row by these rules."""
    ours = [row for row in rows if row.proposal == proposal and row.rule in rules]
    return max(ours, key=lambda row: row.tokens_per_second, default=None)


def _bottom_line(rows: Sequence[DraftRow]) -> str:
    """Return the fastest rows at equal fidelity: exact beside exact, auto beside auto."""
    pairs = []
    for rule in (EXACT, AUTO):
        model = fastest(rows, DRAFT.name, (rule,))
        best = (fastest(rows, proposal.name, (rule,)) for proposal in PROPOSALS)
        pairs += [(row, model) for row in best if row is not None]
    return table(BEST, pairs)


# --- Plot

#: Okabe and Ito's colours, one per proposal.
COLOURS = dict(zip((one.name for one in PROPOSALS), (*charts.COLOURS, SKY), strict=True))
MARKERS = {EXACT: "o", AUTO: "D", STANDALONE: "s"}
#: Height, in nats, of each proposal's lane at 0, so that exact rows do not cover each other.
LANE = 0.06


def plot_rows(rows: Sequence[DraftRow], path: Path) -> None:
    """Write the plot as a PNG to ``path``."""
    temperatures = sorted({row.temperature for row in rows})
    shape = {"rows": len(temperatures), "sharex": True, "sharey": True}
    with picture(path, (9.0, 0.8 + 4.2 * len(temperatures)), **shape) as (figure, panels):
        for axes, temperature in zip(panels[:, 0], temperatures, strict=True):
            _panel(axes, [row for row in rows if row.temperature == temperature])
            axes.set_title(f"Temperature {temperature:g}; beside a point its N", fontsize=9)
            axes.set_ylabel("0, or KL to the target,\nnats an answer, at least")
        panels[-1, 0].set_xlabel("tokens a second to expect of an 8B on an H200, at most")
        legend_below(figure, panels[0, 0], ncols=4)


def _panel(axes: Axes, rows: Sequence[DraftRow]) -> None:
    plain = 1 / plain_seconds()
    axes.axvline(plain, color=GREY, lw=1, ls=":")
    axes.annotate("AR", (plain, 0.94), xycoords=("data", "axes fraction"), color=GREY)
    drawn = [row for row in rows if row.proposal and row.rule in MARKERS]
    for (proposal, rule), group in groupby(drawn, key=lambda row: (row.proposal, row.rule)):
        here, low = list(group), -LANE * list(COLOURS).index(proposal)
        speeds = [row.tokens_per_second for row in here]
        values = [row.kl_at_least or Interval(0.0, 0.0, 0.0, 0) for row in here]
        heights = [value.mean or low for value in values]
        style = {"color": COLOURS[proposal], "fmt": MARKERS[rule], "ms": 6, "elinewidth": 1}
        axes.errorbar(speeds, heights, ends(values), label=f"{proposal} {rule}", **style)
        for row, at in zip(here, zip(speeds, heights, strict=True), strict=True):
            place = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(f"{row.num_particles}", at, color=COLOURS[proposal], **place)
    axes.axhspan(-LANE * len(COLOURS), 0, color=GREY, alpha=0.06, lw=0)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick >= 0])
    axes.grid(alpha=0.25, lw=0.6)
