"""Define the doctor's findings and print them, one line each."""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

OK, WARNING, FAIL = "ok", "warning", "fail"
_WIDTH = 100
_INDENT = 10


class Finding(NamedTuple):
    """The result of one check."""

    level: str  # OK, WARNING or FAIL
    about: str
    found: str
    do: str = ""  # how to fix it, if needed
    numbers: dict[str, Any] | None = None  # for --json


def ok(about: str, found: str, **numbers: Any) -> Finding:
    return Finding(OK, about, found, numbers=numbers or None)


def warning(about: str, found: str, do: str, **numbers: Any) -> Finding:
    return Finding(WARNING, about, found, do, numbers or None)


def fail(about: str, found: str, do: str, **numbers: Any) -> Finding:
    return Finding(FAIL, about, found, do, numbers or None)


def as_text(finding: Finding) -> str:
    """Return the level and the finding, and the remedy below."""
    text = f"{finding.about}: {finding.found}"
    marked = [("", line) for line in text.splitlines()]
    marked += [("-> ", line) for line in finding.do.splitlines()]
    lines = [
        textwrap.fill(
            line.strip(),
            _WIDTH,
            initial_indent=" " * _INDENT + mark,
            subsequent_indent=" " * (_INDENT + len(mark)),
            break_long_words=False,  # long words are paths, which stay whole
            break_on_hyphens=False,
        )
        for mark, line in marked
    ]
    return f"{finding.level:{_INDENT}}" + "\n".join(lines).lstrip()


def as_dict(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in finding._asdict().items() if value not in ("", None)}
