"""Compute the rows of powers: choices among texts, intervals, and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from gpu import expected
from gsm8k.run import Graded
from intervals import Interval, paired_difference, paired_ratio_of_ratios, ratio, wilson
from matplotlib.axes import Axes
from power.cells import CODER, GREEDY, MCMC, VERIFIED, WEIGHED, PowerCell
from results import interval_cell, number_cell, table
from speed import grid

matplotlib.use("Agg")

# --- Answers, and choices among them


@dataclass(frozen=True)
class PowerAnswer(Graded):
    """An answer: its likelihood and cost, and what its particles answer."""

    log_p: float = 0.0  # nats, at temperature 1, EOS included
    cpu_seconds: float = 0.0  # of the engine, an equal share of those of all that ran beside it
    numbers: list[float | None] = field(default_factory=list)  # of its particles, or its own
    weights: list[float] = field(default_factory=list)  # of these

    @property
    def passes(self) -> int:
        """Return the target's passes after the prompt."""
        return self.info.get("spec_verify_ct") or max(self.info["completion_tokens"] - 1, 1)


class PowerOutcome(NamedTuple):
    """The result of one way to answer a problem."""

    index: int  # of the problem
    right: bool
    log_p: float | None  # None where no text is chosen
    tokens: int  # of the text that is chosen, or of a sample, without the first
    passes: int  # samples run in parallel, so the longest counts
    cpu_seconds: float


class Way(NamedTuple):
    """One way to answer: a setting, or a choice among its texts."""

    label: str
    series: str
    cell: PowerCell
    outcomes: list[PowerOutcome]


#: Returns the number that a problem asks for, by the cell's pair and the problem.
Truth = Callable[[PowerCell, int], float]
PLAIN = "plain"
POWER = "power, verified"
DRAFTED = "power, weighed drafts"
VOTE = "vote over particles"
OF_SAMPLES = "of 8 plain samples"
RIVAL = f"power, {MCMC}"
#: Of series, in the order of rows.
ORDER = (PLAIN, POWER, DRAFTED, VOTE, OF_SAMPLES, RIVAL)
SERIES = {VERIFIED: POWER, WEIGHED: DRAFTED, MCMC: RIVAL, "": PLAIN}


def voted(numbers: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the number with the largest total weight; the first of equal ones."""
    total: dict[float, float] = {}
    for number, weight in zip(numbers, weights, strict=True):
        if number is not None:
            total[number] = total.get(number, 0.0) + weight
    return max(total, key=total.__getitem__, default=None)


def ways(cell: PowerCell, answers: Sequence[PowerAnswer], truth: Truth) -> Iterator[Way]:
    """Yield the ways that a cell's answers give."""
    if cell.samples > 1:
        grouped = groupby(sorted(answers, key=_place), key=lambda one: one.index)
        every = [found for _, some in grouped if len(found := list(some)) == cell.samples]
        best = [_outcome(max(some, key=lambda one: one.log_p), some) for some in every]
        yield Way(f"{cell.label}, best log p", OF_SAMPLES, cell, best)
        yield Way(
            f"{cell.label}, majority",
            OF_SAMPLES,
            cell,
            [_vote(some, cell, truth) for some in every],
        )
        return
    own = [_outcome(one, [one]) for one in answers]
    yield Way(cell.label, SERIES[cell.proposal], cell, own)
    if cell.proposal == VERIFIED:
        yield Way(f"{cell.label}, vote", VOTE, cell, [_vote([one], cell, truth) for one in answers])


def _place(one: PowerAnswer) -> tuple[int, int]:
    return one.index, one.sample


def _outcome(chosen: PowerAnswer, some: Sequence[PowerAnswer]) -> PowerOutcome:
    return PowerOutcome(
        index=chosen.index,
        right=chosen.right,
        log_p=chosen.log_p,
        tokens=chosen.info["completion_tokens"] - 1,
        passes=max(one.passes for one in some),
        cpu_seconds=sum(one.cpu_seconds for one in some),
    )


def _vote(some: Sequence[PowerAnswer], cell: PowerCell, truth: Truth) -> PowerOutcome:
    numbers = [number for one in some for number in one.numbers]
    weights = [weight for one in some for weight in one.weights]
    found = voted(numbers, weights)
    right = found == truth(cell, some[0].index)
    return _outcome(some[0], some)._replace(right=right, log_p=None)


# --- Rows


@dataclass(frozen=True, kw_only=True)
class PowerRow:
    """A line of the table; None where a number does not apply."""

    pair: str
    label: str
    series: str
    accuracy: Interval
    to_greedy: Interval | None  # on the same problems, as are all that compare
    log_p: Interval | None  # nats an answer, at temperature 1
    log_p_to_greedy: Interval | None
    log_z_variance: float | None  # nats squared, over seeds, mean of a few problems
    tokens_per_pass: Interval
    passes: float  # of the target, an answer
    cpu_seconds: float  # an answer, of ten problems at once
    cpu_to_greedy: float | None
    cpu_alone: float | None  # an answer, of one problem at a time
    cpu_alone_to_greedy: Interval | None
    ancestors: float | None  # distinct ones of the particles at the end
    h200_seconds: float | None  # an answer, to expect of one request, 8B + 1B
    plugin: str  # fingerprint of the code that answered


def rows_of(
    found: Mapping[PowerCell, Sequence[PowerAnswer]],
    truth: Truth,
    plugin: Callable[[PowerCell], str],
) -> list[PowerRow]:
    """Return a row for each way of each cell that has two answers, but for those alone.

    Rows of a pair are in the order of `ORDER`.
    """
    own = {cell: some for cell, some in found.items() if not cell.is_again}
    every = [way for cell, some in own.items() for way in ways(cell, some, truth)]
    alone = [way for way in every if way.cell.at_once == 1]
    again = {(cell.pair, cell.label): some for cell, some in found.items() if cell.is_again}
    ordered = sorted(every, key=lambda way: (way.cell.pair, ORDER.index(way.series)))
    return [
        _row(way, (every, alone), found[way.cell], again, plugin(way.cell))
        for way in ordered
        if way not in alone and len(way.outcomes) > 1
    ]


def _row(
    way: Way,
    every: tuple[Sequence[Way], Sequence[Way]],
    answers: Sequence[PowerAnswer],
    again: Mapping[tuple[str, str], Sequence[PowerAnswer]],
    plugin: str,
) -> PowerRow:
    cell = way.cell
    outcomes = way.outcomes
    at_once, alone = every
    greedy = _like(at_once, cell, GREEDY)
    here = _like(alone, cell, f"{way.label} alone")
    ratio_at_once = _cpu_ratio(outcomes, greedy)  # ten share a figure, so that it has no interval
    greedy_alone = _like(alone, cell, f"{GREEDY} alone")
    tokens = np.array([one.tokens for one in outcomes], dtype=float)
    passes = np.array([one.passes for one in outcomes], dtype=float)
    log_ps = [one.log_p for one in outcomes if one.log_p is not None]
    return PowerRow(
        pair=cell.pair,
        label=way.label,
        series=way.series,
        accuracy=wilson(sum(one.right for one in outcomes), len(outcomes)),
        to_greedy=_difference(outcomes, greedy),
        log_p=ratio(np.array(log_ps)) if log_ps else None,
        log_p_to_greedy=_log_p_difference(outcomes, greedy),
        log_z_variance=log_z_variance(
            [*answers, *again.get((cell.pair, f"{cell.label} again"), ())]
        ),
        tokens_per_pass=ratio(tokens if cell.samples == 1 else passes, passes),
        passes=float(passes.mean()),
        cpu_seconds=fmean(one.cpu_seconds for one in outcomes),
        cpu_to_greedy=ratio_at_once and ratio_at_once.mean,
        cpu_alone=fmean(one.cpu_seconds for one in here) if here else None,
        cpu_alone_to_greedy=_cpu_ratio(here, greedy_alone),
        ancestors=_mean_of(answers, "spec_smc_distinct_ancestors"),
        h200_seconds=h200_seconds(cell, float(passes.mean())),
        plugin=plugin,
    )


def _like(ways: Sequence[Way], cell: PowerCell, label: str) -> list[PowerOutcome]:
    """Return the outcomes of the way with a label of the same pair."""
    found = (way.outcomes for way in ways if (way.cell.pair, way.label) == (cell.pair, label))
    return next(found, [])


def _paired(
    ours: Sequence[PowerOutcome], theirs: Sequence[PowerOutcome]
) -> tuple[list[PowerOutcome], list[PowerOutcome]]:
    """Return the outcomes of problems that both have, by problem; empty where they are the same."""
    if ours == theirs:
        return [], []
    one, other = ({each.index: each for each in some} for some in (ours, theirs))
    common = sorted(one.keys() & other.keys())
    return [one[index] for index in common], [other[index] for index in common]


def _difference(ours: Sequence[PowerOutcome], theirs: Sequence[PowerOutcome]) -> Interval | None:
    pairs = _paired(ours, theirs)
    one, other = ({each.index: each.right for each in some} for some in pairs)
    return paired_difference(one, other)


def _log_p_difference(
    ours: Sequence[PowerOutcome], theirs: Sequence[PowerOutcome]
) -> Interval | None:
    each = [
        one.log_p - other.log_p
        for one, other in zip(*_paired(ours, theirs), strict=True)
        if one.log_p is not None and other.log_p is not None
    ]
    return ratio(np.array(each)) if len(each) > 1 else None


def _cpu_ratio(ours: Sequence[PowerOutcome], theirs: Sequence[PowerOutcome]) -> Interval | None:
    one, other = (np.array([x.cpu_seconds for x in some]) for some in _paired(ours, theirs))
    if len(one) < 2:
        return None
    ones = np.ones(len(one))
    return paired_ratio_of_ratios((one, ones), (other, ones))


def _mean_of(answers: Sequence[PowerAnswer], key: str) -> float | None:
    values = [one.info[key] for one in answers if key in one.info]
    return fmean(values) if values else None


def log_z_variance(answers: Sequence[PowerAnswer]) -> float | None:
    """Return the variance of log Z over seeds, the mean over problems with several seeds."""
    each: dict[int, list[float]] = {}
    for one in answers:
        if (value := one.info.get("spec_smc_log_evidence")) is not None:
            each.setdefault(one.index, []).append(value)
    found = [variance(values) for values in each.values() if len(values) > 1]
    return fmean(found) if found else None


# --- Seconds to expect


@lru_cache
def _measured() -> expected.Results:
    return expected.published()


def h200_seconds(cell: PowerCell, passes: float) -> float | None:
    """Return the seconds of so many passes on an H200, of a request alone, 8B with a 1B draft."""
    if cell.pair != CODER:
        return None
    if cell.smc:
        shape = expected.ours(grid.BLOCK, cell.num_particles, cell.smc["num_steps"])
        batch = 1
    else:
        shape = expected.SHAPES["AR"]
        batch = cell.samples
    return passes * expected.milliseconds(_measured(), shape, batch)[0] / 1000


# --- Tables and chart

COLUMNS: dict[str, Callable[[PowerRow], str]] = {
    "": lambda row: row.label,
    "problems": lambda row: f"{row.accuracy.n}",
    "right, %": lambda row: interval_cell(row.accuracy, ".0f", scale=100),
    "points from T = 0": lambda row: interval_cell(row.to_greedy, "+.0f", scale=100),
    "log p, nats": lambda row: interval_cell(row.log_p, ".1f"),
    "from T = 0": lambda row: interval_cell(row.log_p_to_greedy, "+.1f"),
    "variance of log Z": lambda row: number_cell(row.log_z_variance, ".2g"),
    "ancestors": lambda row: number_cell(row.ancestors, ".1f"),
    "tokens / target pass": lambda row: interval_cell(row.tokens_per_pass, ".2f"),
    "passes": lambda row: f"{row.passes:.1f}",
    "CPU s": lambda row: f"{row.cpu_seconds:.1f}",
    "times T = 0": lambda row: number_cell(row.cpu_to_greedy, ".1f"),
    "CPU s, alone": lambda row: number_cell(row.cpu_alone, ".1f"),
    "times T = 0, alone": lambda row: interval_cell(row.cpu_alone_to_greedy, ".2f"),
    "s on an H200, to expect": lambda row: number_cell(row.h200_seconds, ".2f"),
}
#: Of the page, without intervals.
SHORT: dict[str, Callable[[PowerRow], str]] = {
    "": COLUMNS[""],
    "right, %": lambda row: f"{100 * row.accuracy.mean:.0f}",
    "points from T = 0": COLUMNS["points from T = 0"],
    "log p from T = 0, nats": COLUMNS["from T = 0"],
    "passes": COLUMNS["passes"],
    "CPU s, times T = 0": COLUMNS["times T = 0"],
    "s on an H200": COLUMNS["s on an H200, to expect"],
}


def markdown(rows: Sequence[PowerRow], note: str) -> str:
    """Return a table for each pair."""
    parts = [note]
    for pair in dict.fromkeys(row.pair for row in rows):
        here = [row for row in rows if row.pair == pair]
        parts.append(f"**{pair}**\n\n{table(COLUMNS, here)}")
    return "\n\n".join(parts) + "\n"


ABOUT = """\
Qwen2.5-Coder 1.5B, drafted for by 0.5B, on the first 100 problems of GSM8K, K = 8 (`make power`;
[all rows, and what they are](../bench/results/power/power.md)). In brackets 95 % intervals, on the
same problems. CPU seconds are of ten problems at once; seconds on an H200 are expected, for one."""


def summary(rows: Sequence[PowerRow]) -> str:
    """Return what the page says of the larger pair."""
    return f"{ABOUT}\n\n{table(SHORT, [row for row in most_problems(rows) if row.pair == CODER])}"


def most_problems(rows: Sequence[PowerRow]) -> list[PowerRow]:
    """Return the rows of as many problems as any row of their pair has."""
    most = {row.pair: 0 for row in rows}
    for row in rows:
        most[row.pair] = max(most[row.pair], row.accuracy.n)
    return [row for row in rows if row.accuracy.n == most[row.pair]]


def chart(rows: Sequence[PowerRow], path: Path) -> None:
    """Write points of accuracy from greedy decoding as a PNG to ``path``, a panel for each pair."""
    shown = [row for row in most_problems(rows) if row.to_greedy is not None]
    pairs = list(dict.fromkeys(row.pair for row in shown))
    size = (7.0, 0.9 + 0.3 * len(shown))
    figure, all_axes = plt.subplots(
        len(pairs), 1, layout="constrained", squeeze=False, dpi=110, sharex=True, figsize=size
    )
    for axes, pair in zip(all_axes.flat, pairs, strict=True):
        here = [row for row in shown if row.pair == pair][::-1]
        for place, row in enumerate(here):
            _draw(axes, place, row)
        labels = [f"{row.label} ({row.passes:.0f} passes)" for row in here]
        axes.set_yticks(range(len(here)), labels)
        axes.axvline(0, color="black", lw=1)
        axes.set_title(pair, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel("points more right than greedy decoding, with 95 % intervals")
    figure.savefig(path)
    plt.close(figure)


def _draw(axes: Axes, place: int, row: PowerRow) -> None:
    assert row.to_greedy is not None
    found = _percent(row.to_greedy)
    color = "tab:green" if row.label.startswith("p^") else "0.45"
    axes.plot([found.low, found.high], [place, place], color=color)
    axes.plot(found.mean, place, "o", color=color)


def _percent(of: Interval) -> Interval:
    return Interval(100 * of.mean, 100 * of.low, 100 * of.high, of.n)
