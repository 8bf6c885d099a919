"""What a check found."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Verdict(str, Enum):
    """One word for a result."""

    PASS = "pass"
    FAIL = "fail"
    MEASURED = "measured"
    """An approximate mode: how far it is from the target, which is no failure."""
    NOT_ENOUGH_DATA = "not enough data"
    NOT_APPLICABLE = "not applicable"


class Result(NamedTuple):
    """One check's finding; numbers are None where the check did not come to have them."""

    check: str
    proves: str
    """What a pass shows, in one sentence."""
    verdict: Verdict
    note: str
    """What was found, and after a failure what to do."""
    statistic: str = ""
    estimate: float | None = None
    expected: float | None = None
    standard_error: float | None = None
    p_value: float | None = None
    alpha: float | None = None
    """The chance that this check fails although all is well."""
    num_answers: int = 0

    @property
    def failed(self) -> bool:
        return self.verdict is Verdict.FAIL
