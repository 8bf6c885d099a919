"""Compare ways to decode by turns: what each took for the same prompts, in each phase of a load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from intervals import Interval, mean_of, speed_ratio

#: ``ways``: by name what each phase took; ``took``: the seconds of all.
Turn = Mapping[str, Any]
#: The way that the others are compared with.
DEFAULT = "default"
#: Half the width of an interval that is narrow enough, as a logarithm: of a ratio far from 1 a
#: wider one tells as much.
AIM = 0.03
OF_RATIO = 0.25
LEAST_TURNS = 4


def speeds(turns: Sequence[Turn], way: str, phase: int) -> list[float]:
    """Return the tokens a second of a way in each turn."""
    found = [turn["ways"][way][phase] for turn in turns]
    return [one["tokens"] / one["seconds"] for one in found]


def num_phases(turns: Sequence[Turn]) -> int:
    return len(turns[0]["ways"][DEFAULT])


def rivals(turns: Sequence[Turn], phase: int) -> list[str]:
    """Return all ways but the default, the fastest first, in the mean over turns."""
    others = (way for way in turns[0]["ways"] if way != DEFAULT)
    return sorted(others, key=lambda way: -fmean(map(math.log, speeds(turns, way, phase))))


def ratio_to(turns: Sequence[Turn], way: str, phase: int) -> Interval:
    """Return the default's speed over a way's, within turns."""
    pairs = zip(speeds(turns, DEFAULT, phase), speeds(turns, way, phase), strict=True)
    return speed_ratio([math.log(ours / theirs) for ours, theirs in pairs])


def speed_of(turns: Sequence[Turn], way: str, phase: int) -> Interval:
    return mean_of(speeds(turns, way, phase))


def tokens_a_pass(turns: Sequence[Turn], phase: int) -> float:
    """Return the default's tokens a target pass, without prefill and its token."""
    found = [turn["ways"][DEFAULT][phase] for turn in turns]
    decoded = sum(one["tokens"] - len(one["lengths"]) for one in found)
    return decoded / max(1, sum(one["passes"] for one in found))


def is_narrow(turns: Sequence[Turn]) -> bool:
    """Return whether the ratio to the best rival is known well, in every phase."""
    each = range(num_phases(turns))
    found = [ratio_to(turns, rivals(turns, phase)[0], phase) for phase in each]
    widths = [(math.log(one.high / one.mean), abs(math.log(one.mean))) for one in found]
    return all(width <= max(AIM, OF_RATIO * apart) for width, apart in widths)


def is_over(turns: Sequence[Turn], left: float) -> bool:
    """Return whether a cell has its turns: its ratios are known well, or its seconds are over.

    Two turns at least; `LEAST_TURNS`, where there is time, before a narrow interval is believed.
    """
    if len(turns) < 2:
        return False
    if left < fmean(turn["took"] for turn in turns) / 2:  # nor for most of another
        return True
    return len(turns) >= LEAST_TURNS and is_narrow(turns)


def told(turns: Sequence[Turn]) -> str:
    """Return the last phase's ratio so far."""
    phase = num_phases(turns) - 1
    rival = rivals(turns, phase)[0]
    mean, low, high, n = ratio_to(turns, rival, phase)
    return f"{mean:.2f} [{low:.2f}, {min(high, 99):.2f}] times {rival}, {n} turns"
