"""Compare results on one H200 with estimates.

The numbers were estimated before the first run, from the sizes of the models, the memory's
bandwidth and counts of launches (docs/performance.md); they are good to about 25 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpu.cases import ADAPTIVE, AR_DRAFT, EAGLE, EXACT_HEAD, K, N
from speed.grid import AR, BLOCK, EXACT, Cell, System

Results = Mapping[str, Mapping[str, Any]]
ALONE = (AR, AR_DRAFT, EAGLE)  # without particles
ESTIMATE = 1.25


class Goal(NamedTuple):
    """An estimated number."""

    what: str
    stage: str
    expected: float
    form: str
    found: Callable[[Results], float | None]
    is_time: bool = False  # less is better
    slack: float = ESTIMATE  # factor within which a result is as expected


def measured(results: Results, key: str, family: str, batch: int, prompt: int) -> float | None:
    """Return a number of a cell; None if it was not measured."""
    sizes = (None, None) if family in ALONE else (N, K)
    return results.get(Cell(System(family, *sizes), batch, prompt).slug, {}).get(key)


def speed_of(results: Results, family: str, batch: int, prompt: int) -> float | None:
    """Return the decoded tokens per second of a cell."""
    return measured(results, "decode_tokens_per_second", family, batch, prompt)


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def draft_floor(results: Results) -> float | None:
    """Return the ms of K passes of the draft model alone, a lower bound of a round's drafting."""
    alone = measured(results, "round_ms", AR_DRAFT, 1, 256)
    return None if alone is None else K * alone


def _speed(family: str) -> Callable[[Results], float | None]:
    return lambda results: speed_of(results, family, 1, 256)


def _round(what: str, expected: float, family: str, prompt: int = 256) -> Goal:
    def found(results: Results) -> float | None:
        return measured(results, "round_ms", family, 1, prompt)

    return Goal(
        f"{what}, batch 1, prompt {prompt}: ms a round", "speed", expected, ".1f", found, True
    )


def _to_ar(family: str, batch: int) -> Callable[[Results], float | None]:
    return lambda r: ratio(speed_of(r, family, batch, 256), speed_of(r, AR, batch, 256))


GOALS = (
    Goal("8B alone, batch 1, prompt 256: tokens/s", "speed", 215, ".0f", _speed(AR)),
    Goal(f"{K} passes of the 1B alone, ms", "speed", 9.0, ".1f", draft_floor, True),
    Goal("smc, whole blocks, batch 1, prompt 256: tokens/s", "speed", 617, ".0f", _speed(BLOCK)),
    _round("smc with the 1B", 14.6, BLOCK),
    _round("smc with the 1B", 15.1, BLOCK, 4096),
    _round("exact with the 1B", 15.3, EXACT),
    _round("exact with an EAGLE-3 head", 8.9, EXACT_HEAD),
    _round("SGLang's EAGLE-3 with the same head", 7.4, EAGLE),
    Goal("adaptive, batch 32: times AR", "speed", 1.0, ".2f", _to_ar(ADAPTIVE, 32), slack=1.0),
    Goal("adaptive, batch 64: times AR", "speed", 1.0, ".2f", _to_ar(ADAPTIVE, 64), slack=1.0),
    Goal("70B FP8 + 1B, smc, batch 1: times AR", "70b", 5.2, ".2f", _to_ar(BLOCK, 1)),
)


def lines(results: Mapping[str, Results]) -> list[list[str]]:
    """Return a table row for each goal."""
    found = []
    for goal in GOALS:
        value = goal.found(results.get(goal.stage, {}))
        shown = "" if value is None else format(value, goal.form)
        found.append([goal.what, format(goal.expected, goal.form), shown, verdict(goal, value)])
    return found


def verdict(goal: Goal, value: float | None) -> str:
    """Return the outcome of comparing a result with its goal."""
    if value is None:
        return "not measured"
    gain = goal.expected / value if goal.is_time else value / goal.expected
    if gain > goal.slack:
        return "better"
    return "as expected" if gain * goal.slack >= 1 else "worse"
