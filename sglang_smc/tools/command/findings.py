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
    do: str = ""  # how to mend it, if needed
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
    lines = [_filled(line, "") for line in text.splitlines()]
    lines += [_filled(line, "-> ") for line in finding.do.splitlines()]
    return f"{finding.level:{_INDENT}}" + "\n".join(lines).lstrip()


def _filled(line: str, mark: str) -> str:
    room = " " * _INDENT
    # Long words are paths, which stay whole.
    return textwrap.fill(
        line.strip(),
        _WIDTH,
        initial_indent=room + mark,
        subsequent_indent=room + " " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_dict(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in finding._asdict().items() if value not in ("", None)}
