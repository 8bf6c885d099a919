"""Define the result of a check."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Verdict(str, Enum):
    """The outcome of a check."""

    PASS = "pass"
    FAIL = "fail"
    MEASURED = "measured"
    """The distance of an approximate mode from the target; not a failure."""
    NOT_ENOUGH_DATA = "not enough data"
    NOT_APPLICABLE = "not applicable"


class Result(NamedTuple):
    """The result of one check; numbers are None if the check did not compute them."""

    check: str
    proves: str
    """The property that a pass demonstrates, in one sentence."""
    verdict: Verdict
    note: str
    """The finding, and for a failure the remedy."""
    statistic: str = ""
    estimate: float | None = None
    expected: float | None = None
    standard_error: float | None = None
    p_value: float | None = None
    alpha: float | None = None
    """The probability that this check fails on a correct implementation."""
    num_answers: int = 0

    @property
    def failed(self) -> bool:
        return self.verdict is Verdict.FAIL
