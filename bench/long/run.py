"""Measure a draft behind long prompts: with all of a text, and with windows of it.

    .venv/bin/python bench/long                     # everything, resumable at any point
    .venv/bin/python bench/long --only 'eagle3-*'   # a part of it
    .venv/bin/python bench/long --problems 20       # a quick run, in another --output-dir

A prompt is the end of a chain of problems, the last of which is answered. The shipped head was
trained on single problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from answers import COMMON, Cell, Record, Reply, Study, about, kept_of, prompt_ids
from charts import COLOURS, Point, scatter
from drafts.run import TARGET
from fidelity.run import EXACT, SMC_ENGINE
from intervals import Interval, paired_ratio_of_ratios
from pair.task import held_out
from results import Report, interval_cell, table, tokens_a_pass, tokens_and_passes

TEMPERATURE = 0.7
LENGTHS = (48, 192, 512, 1024, 1750)
DRAFTS = {"eagle3": "EAGLE-3"}
#: Tokens of a window, and first ones beside it; 0: all of a text.
WINDOWS = ((0, 0), (192, 0), (192, 4))
APART = 100  # problems of two prompts
MARKERS = "os^Dvx"


def window_name(window: int, sink: int) -> str:
    """Return a window in words."""
    if not window:
        return "all"
    return f"{window} + first {sink}" if sink else f"{window}"


@dataclass(frozen=True)
class LongCell(Cell):
    """A draft, its window, and the tokens of prompts."""

    draft: str = ""
    window: int = 0
    sink: int = 0
    length: int = 0


def cells() -> list[LongCell]:
    """Return all cells, engine by engine."""
    return [
        LongCell(
            label=f"{draft} w{window} s{sink} l{length}",
            engine=f"{draft} {window} {sink}",
            temperature=TEMPERATURE,
            smc={"mode": EXACT},
            draft=draft,
            window=window,
            sink=sink,
            length=length,
        )
        for draft in DRAFTS
        for window, sink in WINDOWS
        for length in LENGTHS
    ]


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """A line of the table."""

    draft: str
    window: str
    length: int
    tokens_per_pass: Interval
    to_all: Interval | None  # ratio to the same prompts with all of the text
    plugin: str  # fingerprint of the code that answered


def rows_of(
    found: Mapping[LongCell, Sequence[Record]], plugin: Callable[[LongCell], str]
) -> list[PromptRow]:
    """Return a row for each cell; ``plugin`` names the code that measured it."""
    whole = {(cell.draft, cell.length): some for cell, some in found.items() if not cell.window}

    def times(cell: LongCell, some: Sequence[Record]) -> Interval | None:
        there = whole.get((cell.draft, cell.length))
        if there is None or not cell.window:
            return None
        ours = tokens_and_passes([one.info for one in some])
        return paired_ratio_of_ratios(ours, tokens_and_passes([one.info for one in there]))

    return [
        PromptRow(
            draft=DRAFTS[cell.draft],
            window=window_name(cell.window, cell.sink),
            length=cell.length,
            tokens_per_pass=tokens_a_pass([one.info for one in some]),
            to_all=times(cell, some),
            plugin=plugin(cell),
        )
        for cell, some in found.items()
    ]


COLUMNS: dict[str, Callable[[PromptRow], str]] = {
    "draft": lambda row: row.draft,
    "window": lambda row: row.window,
    "prompt": lambda row: f"{row.length:,}",
    "tokens / target pass": lambda row: interval_cell(row.tokens_per_pass, ".2f"),
    "times all of the text": lambda row: interval_cell(row.to_all, ".2f"),
}


def markdown(rows: Sequence[PromptRow], note: str) -> str:
    """Return the table."""
    return f"{note}\n\n{table(COLUMNS, rows)}\n"


def plot(rows: Sequence[PromptRow], path: Path) -> None:
    """Draw tokens a pass by the length of prompts, one panel a draft."""
    names = list(dict.fromkeys(row.window for row in rows))
    styles = dict(zip(names, zip(COLOURS, MARKERS, strict=False), strict=False))
    panels = {
        draft: [
            Point(row.length, row.tokens_per_pass, row.window, "")
            for row in rows
            if row.draft == draft
        ]
        for draft in dict.fromkeys(row.draft for row in rows)
    }
    axes = ("tokens of the prompt", "tokens a target pass")
    scatter(path, panels, styles, axes, None, logarithmic=True)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the table."""
    return (
        "# A head behind long prompts\n\n"
        f"The shipped pair, `exact`, N = K = 8, T = {TEMPERATURE:g}; {about(origin)}"
        "A prompt is the end of a chain of problems, of which the last is answered; the head was "
        "trained on single ones, nearly all below 192 tokens with their answers. The target's "
        "texts change with the prompt, too, so lines are to be compared at one length."
    )


class LongStudy(Study[LongCell, Record]):
    """The study, with an engine for each draft and window."""

    name = "long"
    about = "Tokens per target pass behind long prompts, by the window of the draft's attention."
    problems = 24
    kind = Record
    report = Report("long", PromptRow, markdown, plot)
    note = staticmethod(note)

    def grid(self) -> list[LongCell]:
        return cells()

    def engine(self, name: str) -> dict[str, Any]:
        _, window, sink = name.split()
        own: dict[str, Any] = {
            "context_length": 2048,
            "max_running_requests": 16,
            "speculative_smc_adaptive": "off",
            "speculative_draft_window_size": int(window),
        }
        if int(sink):
            own["speculative_draft_sink_size"] = int(sink)
        return COMMON | SMC_ENGINE | own

    def models(self, name: str) -> tuple[str, str | None]:
        return TARGET, name.split()[0]

    def prompt(self, cell: LongCell, index: int) -> list[int]:
        found = prompt_ids(held_out(index))
        for other in count(index * APART + 1):
            if len(found) >= cell.length:
                return found[-cell.length :]
            found = prompt_ids(held_out(APART * self.problems + other)) + found
        raise AssertionError("problems have no end")

    def stored(self, cell: LongCell, reply: Reply, sample: int) -> Record:
        return Record(reply.index, False, reply.output_ids, kept_of(reply.meta_info))

    def rows(self) -> list[PromptRow]:
        return rows_of(self.complete(), self.plugin)


main = LongStudy.main
