"""Choose answers from samples or particles; summarize them as rows, tables and a plot."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from intervals import Interval, wilson
from pair.task import held_out
from results import interval_cell, markdown_table, table
from steering.grid import ANSWER_PATTERN, MODELS, POTENTIALS, Cell

ONE, MAJORITY, BEST, WEIGHTED = "one sample", "majority", "best of N", "weighted vote"
SMC_SAMPLE, SMC_ARGMAX, SMC_VOTE = "SMC, sample", "SMC, argmax", "SMC, vote"
METHODS = (ONE, MAJORITY, BEST, WEIGHTED, SMC_SAMPLE, SMC_ARGMAX, SMC_VOTE)
#: Marks of the generated part of the page.
MARKS = "<!-- made by bench/steering -->", "<!-- end -->"


@dataclass(frozen=True)
class Drawn:
    """The result of one request: a plain sample, or the particles of SMC."""

    index: int  # of the problem
    sample: int  # of the problem, from 0 on
    texts: list[str]
    weights: list[float]  # which sum to 1
    tokens: int  # of all texts
    passes: int  # of the model
    values: dict[str, float] = field(default_factory=dict)  # log phi, for plain samples


_ANSWER = re.compile(ANSWER_PATTERN)


def number_of(text: str) -> int | None:
    """Return the number that a text answers; None if it has no final answer."""
    found = _ANSWER.search(text)
    return int(found[1]) if found else None


#: Chooses an answer from weighted texts.
Choice = Callable[[Sequence[str], Sequence[float], random.Random], int | None]


def first(texts: Sequence[str], weights: Sequence[float], rng: random.Random) -> int | None:
    """Return the answer of the first text."""
    return number_of(texts[0])


def voted(texts: Sequence[str], weights: Sequence[float], rng: random.Random) -> int | None:
    """Return the number with the largest total weight (ties: the first); None without any."""
    total: dict[int, float] = {}
    for text, weight in zip(texts, weights, strict=True):
        number = number_of(text)
        if number is not None:
            total[number] = total.get(number, 0.0) + weight
    return max(total, key=lambda number: total[number]) if total else None


def best(texts: Sequence[str], weights: Sequence[float], rng: random.Random) -> int | None:
    """Return the answer of the text with the largest weight (ties: the first)."""
    return number_of(texts[max(range(len(texts)), key=lambda place: weights[place])])


def drawn(texts: Sequence[str], weights: Sequence[float], rng: random.Random) -> int | None:
    """Return the answer of a text drawn by weight."""
    return number_of(rng.choices(texts, weights)[0])


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
    yield _row(cell, "", ONE, 1, every, first)
    for count in counts:
        yield _row(cell, "", MAJORITY, count, every, voted)
        for name in POTENTIALS:
            valued = [replace(one, weights=[math.exp(one.values[name])]) for one in every]
            yield _row(cell, name, BEST, count, valued, best)
            yield _row(cell, name, WEIGHTED, count, valued, voted)


def _steered(cell: Cell, every: Sequence[Drawn]) -> Iterator[Row]:
    """Yield the choices among the particles of each problem."""
    for method, choice in ((SMC_SAMPLE, drawn), (SMC_ARGMAX, best), (SMC_VOTE, voted)):
        yield _row(cell, cell.potential, method, cell.num_particles, every, choice)


def _row(
    cell: Cell, potential: str, method: str, count: int, every: Sequence[Drawn], choice: Choice
) -> Row:
    taken = [list(some)[:count] for _, some in groupby(every, key=lambda one: one.index)]
    right = 0
    for some in taken:
        index = some[0].index
        texts = [text for one in some for text in one.texts]
        weights = [weight for one in some for weight in one.weights]
        right += choice(texts, weights, random.Random(index)) == held_out(index).number
    return Row(
        model=cell.model,
        potential=potential,
        method=method,
        num_particles=count,
        accuracy=wilson(right, len(taken)),
        tokens=sum(one.tokens for some in taken for one in some) / len(taken),
        passes=sum(max(one.passes for one in some) for some in taken) / len(taken),
    )


COLUMNS: dict[str, Callable[[Row], str]] = {
    "": lambda row: row.label,
    "accuracy, %": lambda row: _percent(row),
    "tokens a problem": lambda row: f"{row.tokens:.0f}",
    "model passes a problem": lambda row: f"{row.passes:.1f}",
}


def markdown(rows: Sequence[Row], note: str) -> str:
    """Return a table for each model, and all rows."""
    return f"{note}\n\n{summaries(rows)}\n\n**All**\n\n{table(COLUMNS, rows)}\n"


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the page."""
    left_out = {"judge", BEST, SMC_ARGMAX}
    return [row for row in rows if not {row.model, row.potential, row.method} & left_out]


def summaries(rows: Sequence[Row]) -> str:
    """Return a table for each model."""
    models = dict.fromkeys(row.model for row in rows)
    return "\n\n".join(f"**{TITLES[model]}**\n\n{summary(rows, model)}" for model in models)


TITLES = {
    "target": "The target, drafted for by the draft",
    "target verified": "The target, drafted for by the draft, verified",
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
