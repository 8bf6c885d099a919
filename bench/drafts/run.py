"""Measure drafts: tokens per target pass, distance from the target, and expected speed.

    make drafts                                        # everything, resumable at any point
    .venv/bin/python bench/drafts --list               # lists the cells
    .venv/bin/python bench/drafts --only 'eagle-3-*'   # a part of it
    .venv/bin/python bench/drafts --problems 20        # a quick run, in another --output-dir

As `bench/fidelity`, with an engine for each proposal; its requests choose N, mode and
temperature. Expected tokens per second are the planner's, of an 8B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from answers import COMMON, about
from charts import COLOURS, Point, scatter
from fidelity.run import (
    AR_TARGET,
    AUTO,
    EXACT,
    SMC_ENGINE,
    FidelityCell,
    FidelityRow,
    Quality,
    make_rows,
)
from fidelity.scoring import ScoredAnswer, ScoredStudy
from intervals import Interval
from results import Report, by_temperature, interval_cell, number_cell, table, tokens_a_pass
from study import PAIR, digest

from sglang_smc.options.server import LAG
from sglang_smc_tools.plan import shapes
from sglang_smc_tools.plan.devices import named
from sglang_smc_tools.plan.roofline import Scenario, ar_step

# --- Cells: each proposal with few and many particles, exact and auto, by temperature

PARTICLES = (1, 4, 8)
NUM_STEPS = 8
TARGET = "target"
STANDALONE = "STANDALONE"


class Proposal(NamedTuple):
    """A kind of draft."""

    name: str
    folder: str | None  # of its checkpoint, beside the target; None without one
    kind: Literal["model", "eagle3", "mtp", "dflash", "ngram"]
    planned: str  # the planner's name of such a draft for an 8B
    settings: Mapping[str, Any] = MappingProxyType({})  # further engine settings


DRAFT = Proposal("draft model", "draft", "model", "llama-3.2-1b")
PROPOSALS = (
    DRAFT,
    Proposal("tuned draft", "tuned", "model", "llama-3.2-1b"),
    Proposal("EAGLE-3", "eagle3", "eagle3", "eagle3-8b"),
    Proposal("MTP layer", "mtp", "mtp", "mtp"),
    Proposal("DFlash", "dflash", "dflash", "dflash-8b"),
    Proposal("DSpark", "dspark", "dflash", "dspark-8b"),
    Proposal(
        *("n-gram", None, "ngram", "ngram"),
        {
            "speculative_smc_ngram_matches": True,
            "speculative_smc_mode": EXACT,
            "speculative_smc_adaptive": "off",
        },
    ),
)
_BY_NAME = {one.name: one for one in PROPOSALS}
#: SGLang's own chain of K tokens: a tree with one branch; its root is the last token.
CHAIN: dict[str, Any] = {
    "speculative_algorithm": STANDALONE,
    "speculative_num_steps": NUM_STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_STEPS + 1,
}


def proposal_of(engine: str) -> Proposal | None:
    """Return the proposal of an engine; None for the target alone."""
    return _BY_NAME.get(engine.removeprefix(f"{STANDALONE} "))


def settings(engine: str) -> dict[str, Any]:
    """Return the keywords of an engine except the models."""
    proposal = proposal_of(engine)
    if engine.startswith(STANDALONE):
        return COMMON | CHAIN
    return COMMON | ({} if proposal is None else SMC_ENGINE | dict(proposal.settings))


def rule_of(cell: FidelityCell) -> str:
    """Return a cell's acceptance rule: a mode of SMC, STANDALONE, or AR for the target alone."""
    if cell.smc is not None:
        return cell.smc["mode"]
    return cell.family or STANDALONE


def cells(temperatures: Iterable[float]) -> list[FidelityCell]:
    """Return all cells, engine by engine."""
    every = list(temperatures)
    found = [FidelityCell(AR_TARGET, TARGET, t, family=AR_TARGET) for t in every]
    for name in _BY_NAME:
        found += [
            _smc(name, mode, n, t) for t in every for mode in (EXACT, AUTO) for n in PARTICLES
        ]
    models = [one.name for one in PROPOSALS if one.kind == "model"]
    return found + [
        FidelityCell(f"{name} {STANDALONE}", f"{STANDALONE} {name}", t)
        for name in models
        for t in every
    ]


def _smc(proposal: str, mode: str, num_particles: int, temperature: float) -> FidelityCell:
    asked = {"mode": mode, "num_particles": num_particles, "num_steps": NUM_STEPS}
    return FidelityCell(f"{proposal} {mode} N={num_particles}", proposal, temperature, asked)


# --- Rows, with the speed to expect by the planner

EXPECTED = "llama-3.1-8b"
DEVICE = "h200"
BATCH = 1
CONTEXT = 2000
#: Mean tokens of each particle's own tail, as in the planner.
TAIL = LAG // 2


@lru_cache
def round_seconds(planned: str, num_particles: int) -> float:
    """Return a lower bound of the time of a round of K steps of an 8B.

    Args:
        planned: the draft, one of `sglang_smc_tools.plan.shapes.DRAFTS`, or its own layer, mtp.
    """
    target = replace(shapes.from_config(EXPECTED), mtp_layers=1)
    draft = shapes.draft_for(target, planned)
    device = named(DEVICE, shapes.lowest_precision(target, draft))
    scenario = Scenario(target, draft, device, CONTEXT, TAIL)
    return scenario.smc(BATCH, num_particles, NUM_STEPS).seconds


@lru_cache
def plain_seconds() -> float:
    """Return a lower bound of the time per token of an 8B without speculation."""
    return ar_step(shapes.from_config(EXPECTED), BATCH, CONTEXT + TAIL).seconds(named(DEVICE))


@dataclass(frozen=True, kw_only=True)
class DraftRow(Quality):
    """A line of the table; None where a number does not apply."""

    label: str  # without the temperature
    proposal: str  # empty for the target alone
    rule: str
    num_particles: int
    temperature: float
    tokens_per_pass: Interval
    round_ms: float  # for an 8B, by the planner
    tokens_per_second: float  # by these round times
    to_draft_model: float | None  # of the same rule, N and temperature
    plugin: str  # fingerprint of the code that answered


def rows_of(
    answers: Mapping[FidelityCell, Sequence[ScoredAnswer]], plugin: Callable[[FidelityCell], str]
) -> list[DraftRow]:
    """Return a row for each complete cell; ``plugin`` names the code that measured it."""
    pairs = zip(answers.items(), make_rows(answers), strict=True)
    found = [_row(cell, row, some, plugin(cell)) for (cell, some), row in pairs]
    return sorted(_compared(found), key=_place)


def _row(
    cell: FidelityCell, row: FidelityRow, found: Sequence[ScoredAnswer], plugin: str
) -> DraftRow:
    proposal = proposal_of(cell.engine)
    num_particles = row.num_particles or 1
    seconds = round_seconds(proposal.planned, num_particles) if proposal else plain_seconds()
    yielded = tokens_a_pass([one.info for one in found])
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
        **{field.name: getattr(row, field.name) for field in fields(Quality)},
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
    return row.temperature, names.index(row.proposal), row.rule not in (EXACT, AUTO)


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
    for title, here in by_temperature(rows).items():
        parts.append(f"**{title}: the most tokens / s**\n\n{_bottom_line(here)}")
        parts.append(f"**{title}: all**\n\n{table(COLUMNS, here)}")
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


_MARKERS = {EXACT: "o", AUTO: "D", STANDALONE: "s"}
STYLES = {
    f"{proposal.name} {rule}": (colour, marker)
    for proposal, colour in zip(PROPOSALS, COLOURS, strict=False)
    for rule, marker in _MARKERS.items()
}


def plot_rows(rows: Sequence[DraftRow], path: Path) -> None:
    """Write KL against expected speed as a PNG to ``path``, with the N of each point."""
    panels = {
        f"{title}; beside a point its N": list(map(_point, here))
        for title, here in by_temperature(rows).items()
    }
    speed = "tokens a second to expect of an 8B on an H200, at most"
    names = speed, "0, or KL to the target, nats an answer, at least"
    scatter(path, panels, STYLES, names, plain=1 / plain_seconds())


def _point(row: DraftRow) -> Point:
    height = row.kl_at_least or Interval(0, 0, 0, 0)
    series = f"{row.proposal} {row.rule}"
    return Point(row.tokens_per_second, height, series, f"{row.num_particles}")


# --- The study


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    return (
        f"The shipped pair and its heads, K = 8; {about(origin)}"
        "Milliseconds are the planner's bound for a round "
        f"of {EXPECTED} on an {DEVICE.upper()}, batch {BATCH}, {CONTEXT:,} tokens of context, "
        "with a draft of the same kind; tokens / s to expect are tokens / target pass over these, "
        "a bound, too, and no measurement on a GPU. KL and tilt are looked for in the direction of "
        "the shipped draft, whatever drafted; the server's own tilt is to the draft at work. "
        "STANDALONE is SGLang's chain, measured."
    )


class DraftStudy(ScoredStudy[FidelityCell]):
    """The study, with an engine for each proposal.

    The selected cells are measured with the current code. For the others existing answers are
    shown, and each row of the report names the code (`plugin`) that measured it: a proposal is
    added without measuring all the others again.
    """

    name = "drafts"
    about = (
        "Tokens per target pass, distance from the target's law, and tokens a second to expect, "
        "of all that drafts."
    )
    report = Report("drafts", DraftRow, markdown, plot_rows)
    note = staticmethod(note)

    def grid(self) -> list[FidelityCell]:
        return cells(self.options.temperatures)

    def engine(self, name: str) -> dict[str, Any]:
        return settings(name)

    def models(self, name: str) -> tuple[str, str | None]:
        proposal = proposal_of(name)
        return TARGET, proposal and proposal.folder

    def identity(self, cell: FidelityCell) -> dict[str, Any]:
        _, folder = self.models(cell.engine)
        draft = None if folder is None else digest((PAIR / folder).glob("*"))
        return super().identity(cell) | {"plugin": self.plugin(cell), "draft": draft}

    def rows(self) -> list[DraftRow]:
        return rows_of(self.complete(), self.plugin)


main = DraftStudy.main
