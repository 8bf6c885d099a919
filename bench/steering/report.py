"""Summarize answers as rows, the rows as CSV, and these as tables."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pair.task import held_out
from results import Interval, interval_cell, markdown_table, wilson
from steering.choices import best, drawn, number_of, voted
from steering.grid import MODELS, POTENTIALS, Cell
from steering.measure import Drawn

ONE, MAJORITY, BEST, WEIGHTED = "one sample", "majority", "best of N", "weighted vote"
SMC_SAMPLE, SMC_ARGMAX, SMC_VOTE = "SMC, sample", "SMC, argmax", "SMC, vote"
METHODS = (ONE, MAJORITY, BEST, WEIGHTED, SMC_SAMPLE, SMC_ARGMAX, SMC_VOTE)
#: Marks of the generated part of the page.
BEGIN, END = "<!-- made by bench/steering -->", "<!-- end -->"
#: Chooses an answer from the texts of one problem.
Choice = Callable[[Sequence[Drawn]], int | None]


@dataclass(frozen=True)
class Row:
    """One way to answer, over all problems."""

    model: str
    potential: str  # empty without one
    method: str
    num_particles: int  # or samples
    accuracy: Interval
    tokens: float  # per problem, of all samples or particles
    passes: float  # per problem; samples run in parallel, so the longest counts

    @property
    def label(self) -> str:
        """Return the display name."""
        asked = f" by {self.potential}" if self.potential else ""
        return f"{self.model}: {self.method}{asked}, N={self.num_particles}"


def rows_of(answers: Mapping[Cell, Sequence[Drawn]]) -> list[Row]:
    """Return the rows of all complete cells."""
    found: list[Row] = []
    counts = sorted({cell.num_particles for cell in answers if cell.potential})
    for cell, every in answers.items():
        found += _steered(cell, every) if cell.potential else _plain(cell, every, counts)
    return sorted(found, key=_place)


def _place(row: Row) -> tuple[int, int, int, int]:
    names = ["", *POTENTIALS]
    return (
        MODELS.index(row.model),
        names.index(row.potential),
        METHODS.index(row.method),
        row.num_particles,
    )


def _plain(cell: Cell, every: Sequence[Drawn], counts: Sequence[int]) -> Iterator[Row]:
    """Yield the choices among the first N samples of each problem."""
    yield _row(cell, "", ONE, 1, every, lambda some: number_of(some[0].chosen))
    for count in counts:
        yield _row(cell, "", MAJORITY, count, every, lambda some: _vote(some, lambda _: 1.0))
        for name in POTENTIALS:
            yield _row(cell, name, BEST, count, every, lambda some, n=name: _best(some, n))
            yield _row(
                cell,
                name,
                WEIGHTED,
                count,
                every,
                lambda some, n=name: _vote(some, lambda one: math.exp(one.values[n])),
            )


def _vote(some: Sequence[Drawn], weight: Callable[[Drawn], float]) -> int | None:
    return voted([one.chosen for one in some], [weight(one) for one in some])


def _best(some: Sequence[Drawn], name: str) -> int | None:
    return best([one.chosen for one in some], [one.values[name] for one in some])


def _steered(cell: Cell, every: Sequence[Drawn]) -> Iterator[Row]:
    """Yield the choices among the particles of each problem."""
    choices: dict[str, Choice] = {
        SMC_SAMPLE: lambda some: drawn(
            some[0].texts, some[0].weights, random.Random(some[0].index)
        ),
        SMC_ARGMAX: lambda some: best(some[0].texts, some[0].weights),
        SMC_VOTE: lambda some: voted(some[0].texts, some[0].weights),
    }
    for method, choice in choices.items():
        yield _row(cell, cell.potential, method, cell.num_particles, every, choice)


def _row(
    cell: Cell, potential: str, method: str, count: int, every: Sequence[Drawn], choice: Choice
) -> Row:
    taken = [list(some)[:count] for _, some in groupby(every, key=lambda one: one.index)]
    right = sum(choice(some) == held_out(some[0].index).number for some in taken)
    return Row(
        model=cell.model,
        potential=potential,
        method=method,
        num_particles=count,
        accuracy=wilson(right, len(taken)),
        tokens=sum(one.tokens for some in taken for one in some) / len(taken),
        passes=sum(max(one.passes for one in some) for some in taken) / len(taken),
    )


def markdown(rows: Sequence[Row], note: str) -> str:
    """Return a table for each model, and all rows."""
    lines = [
        [
            row.label,
            interval_cell(row.accuracy, ".1f", scale=100),
            f"{row.tokens:.0f}",
            f"{row.passes:.1f}",
        ]
        for row in rows
    ]
    headers = ("", "accuracy, %", "tokens a problem", "model passes a problem")
    return f"{note}\n\n{summaries(rows)}\n\n**All**\n\n{markdown_table(headers, lines)}\n"


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Write the tables between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    made = summaries(shown(rows))
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the page."""
    left_out = {"judge", "target by twos", BEST, SMC_ARGMAX}
    return [row for row in rows if not {row.model, row.potential, row.method} & left_out]


def summaries(rows: Sequence[Row]) -> str:
    """Return a table for each model."""
    models = dict.fromkeys(row.model for row in rows)
    return "\n\n".join(f"**{TITLES[model]}**\n\n{summary(rows, model)}" for model in models)


TITLES = {
    "draft": "The draft as the model",
    "target": "The target, drafted for by the draft",
    "target by twos": "The target, drafted for by the draft, two tokens a round",
    "target itself": "The target, drafted for by itself",
}


def summary(rows: Sequence[Row], model: str) -> str:
    """Return one model's accuracies: a line per method and potential, a column per N."""
    here = [row for row in rows if row.model == model]
    counts = sorted({row.num_particles for row in here} - {1})
    lines = []
    for key in dict.fromkeys((row.potential, row.method) for row in here):
        of_line = {r.num_particles: r for r in here if (r.potential, r.method) == key}
        name = key[1] + (f" by {key[0]}" if key[0] else "")
        if 1 in of_line:
            name += f" ({_percent(of_line[1])})"
        lines.append([name, *(_percent(of_line[n]) if n in of_line else "" for n in counts)])
    return markdown_table(("accuracy, %", *(f"N = {count}" for count in counts)), lines)


def _percent(row: Row) -> str:
    return interval_cell(row.accuracy, ".1f", scale=100)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    settings = origin["settings"]
    return (
        f"The shipped pair, temperature {settings['temperature']:g}, held-out problems 0 to "
        f"{settings['problems'] - 1}; on {origin['hardware']}, {origin['date'][:10]}. In brackets "
        "95 % intervals (Wilson). `steps` is the rule that checks arithmetic, `judge` the trained "
        "reward model; SMC asks them at each line's end. The same N plain samples serve all that "
        "choose among samples, the same N particles all that choose among particles. Tokens are "
        "of all texts there are in the end."
    )
