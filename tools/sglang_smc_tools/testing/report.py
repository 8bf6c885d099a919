"""Define the result of a check, and report results as a text table and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from sglang_smc_tools.commands import table

_WIDTH = 100


class Verdict(str, Enum):
    """The outcome of a check."""

    PASS = "pass"
    FAIL = "fail"
    MEASURED = "measured"  # the distance of an approximate mode from the target
    NOT_ENOUGH_DATA = "not enough data"
    NOT_APPLICABLE = "not applicable"


class Result(NamedTuple):
    """The result of one check; numbers are None if the check did not compute them."""

    check: str
    proves: str  # the property that a pass demonstrates, in one sentence
    verdict: Verdict = Verdict.NOT_APPLICABLE
    note: str = ""  # the finding, and for a failure the remedy
    statistic: str = ""
    estimate: float | None = None
    expected: float | None = None
    standard_error: float | None = None
    p_value: float | None = None
    alpha: float | None = None  # the probability that a correct implementation fails
    num_answers: int = 0

    @property
    def is_rejected(self) -> bool:
        """Return whether the p-value is below the level of the check."""
        return self.p_value is not None and self.p_value < (self.alpha or 0.0)

    @property
    def failed(self) -> bool:
        return self.verdict is Verdict.FAIL


def as_text(results: Sequence[Result]) -> str:
    """Return a table, notes on each check, and a summary."""
    rows = [_row(result) for result in results]
    notes = [
        textwrap.fill(f"{one.check}: {one.proves}. {one.note}", _WIDTH, subsequent_indent="    ")
        for one in results
    ]
    counts = [(verdict, sum(r.verdict is verdict for r in results)) for verdict in Verdict]
    found = ", ".join(f"{count} {verdict.value}" for verdict, count in counts if count)
    alarm = f"Chance that a check fails although all is well: at most {false_alarm(results):.2g}."
    told = table(rows, rows[0].keys(), rule=False)
    return "\n".join([*told, "", *notes, "", f"{found}. {alarm}"])


def as_dict(results: Sequence[Result], **about: Any) -> dict[str, Any]:
    """Return the report with all fields, for `json.dump`."""
    return {
        **about,
        "false_alarm": false_alarm(results),
        "passed": not any(result.failed for result in results),
        "results": [{**result._asdict(), "verdict": result.verdict.value} for result in results],
    }


def false_alarm(results: Sequence[Result]) -> float:
    """Return an upper bound of the probability that some check fails by chance."""
    return sum(result.alpha or 0.0 for result in results if result.p_value is not None)


def _row(result: Result) -> dict[str, str]:
    found, expected, error = map(_number, (result.estimate, result.expected, result.standard_error))
    if error and result.statistic.startswith("chi-square"):
        expected += f" ± {result.standard_error:.3g}"
    elif error:
        found += f" ± {result.standard_error:.2g}"
    verdict = result.verdict.value
    return {
        "check": result.check,
        "verdict": verdict.upper() if result.failed else verdict,
        "statistic": result.statistic,
        "found": found,
        "expected": expected,
        "p": "" if result.p_value is None else f"{result.p_value:.2g}",
        "answers": str(result.num_answers or ""),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
