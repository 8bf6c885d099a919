"""Report results as a text table, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from sglang_smc.tools.testing.result import Result, Verdict

_WIDTH = 100
_HEAD = ("check", "verdict", "statistic", "found", "expected", "p", "answers")


def as_text(results: Sequence[Result]) -> str:
    """Return a table, notes on each check, and a summary."""
    rows = [_HEAD, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*table, "", *map(_sentences, results), "", summary(results)])


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


def summary(results: Sequence[Result]) -> str:
    counts = [(verdict, sum(r.verdict is verdict for r in results)) for verdict in Verdict]
    found = ", ".join(f"{count} {verdict.value}" for verdict, count in counts if count)
    return (
        f"{found}. Chance that a check fails although all is well: at most "
        f"{false_alarm(results):.2g}."
    )


def _row(result: Result) -> tuple[str, ...]:
    found = _number(result.estimate)
    if result.standard_error is not None:
        if result.statistic.startswith("chi-square"):
            return _cells(
                result, found, f"{_number(result.expected)} ± {result.standard_error:.3g}"
            )
        found += f" ± {result.standard_error:.2g}"
    return _cells(result, found, _number(result.expected))


def _cells(result: Result, found: str, expected: str) -> tuple[str, ...]:
    p_value = "" if result.p_value is None else f"{result.p_value:.2g}"
    answers = str(result.num_answers) if result.num_answers else ""
    return (
        result.check,
        result.verdict.value.upper() if result.failed else result.verdict.value,
        result.statistic,
        found,
        expected,
        p_value,
        answers,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _sentences(result: Result) -> str:
    text = f"{result.check}: {result.proves}. {result.note}"
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ")
