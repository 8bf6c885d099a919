"""What the plugin is to reach on one H200, and whether the results say that it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpu.cases import ADAPTIVE, K, N
from speed.grid import AR, BLOCK, EXACT, Cell, System

Results = Mapping[str, Mapping[str, Any]]


class Goal(NamedTuple):
    """A number that is to be at least ``least``."""

    what: str
    stage: str
    least: float
    form: str
    found: Callable[[Results], float | None]


def speed_of(results: Results, family: str, batch: int, prompt: int) -> float | None:
    """Decoded tokens a second; None where it was not measured."""
    sizes = (None, None) if family == AR else (N, K)
    part = results.get(Cell(System(family, *sizes), batch, prompt).slug, {})
    return part.get("decode_tokens_per_second")


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _speed(family: str) -> Callable[[Results], float | None]:
    return lambda results: speed_of(results, family, 1, 256)


def _kept(family: str) -> Callable[[Results], float | None]:
    return lambda r: ratio(speed_of(r, family, 1, 4096), speed_of(r, family, 1, 256))


def _to_ar(family: str, batch: int) -> Callable[[Results], float | None]:
    return lambda r: ratio(speed_of(r, family, batch, 256), speed_of(r, AR, batch, 256))


GOALS = (
    Goal("8B + 1B, smc, batch 1, prompt 256: tokens/s", "speed", 650, ".0f", _speed(BLOCK)),
    Goal("8B + 1B, exact, batch 1, prompt 256: tokens/s", "speed", 500, ".0f", _speed(EXACT)),
    Goal("smc: speed at prompt 4096 over that at 256", "speed", 0.88, ".2f", _kept(BLOCK)),
    Goal("exact: speed at prompt 4096 over that at 256", "speed", 0.88, ".2f", _kept(EXACT)),
    Goal("70B FP8 + 1B, smc, batch 1: times AR", "70b", 5.2, ".2f", _to_ar(BLOCK, 1)),
    Goal("adaptive, batch 32: times AR", "speed", 1.0, ".2f", _to_ar(ADAPTIVE, 32)),
    Goal("adaptive, batch 64: times AR", "speed", 1.0, ".2f", _to_ar(ADAPTIVE, 64)),
)


def lines(results: Mapping[str, Results]) -> list[list[str]]:
    """A line of a table for each goal."""
    found = []
    for goal in GOALS:
        value = goal.found(results.get(goal.stage, {}))
        told = "not measured" if value is None else "met" if value >= goal.least else "missed"
        shown = "" if value is None else format(value, goal.form)
        found.append([goal.what, format(goal.least, goal.form), shown, told])
    return found
