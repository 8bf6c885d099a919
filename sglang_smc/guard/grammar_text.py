"""Validate grammars before one is compiled, against those that end the server or are truncated.

SGLang compiles grammars in its scheduler's process. An error of xgrammar ends that request alone.
But a NUL character truncates a pattern, and a pattern that starts with NUL, like JSON nested ten
thousands deep, crashes the process. Compilation runs in threads beside the scheduler, but a schema
of 10,000 values keeps all cores busy for seconds.
"""

import json
from typing import Any

from sglang_smc.printable import shown

FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters with a grammar; tool_choice and response_format become one of them."""

MAX_DEPTH = 100
MAX_CHARACTERS = 100_000
"""The longest grammar: compile time grows faster than length, to seconds of several cores here."""

_ANY_JSON = "$$ANY$$"  # SGLang's value for any JSON, in place of a schema


def check_grammars(params: dict[str, Any]) -> None:
    """Raise ValueError for a grammar in ``params`` that must not reach a compiler."""
    for field in FIELDS:
        if text := params.get(field):
            _check(field, text)


def _check(field: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{field}={shown(text)}; allowed: a string.")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{field} has {len(text)} characters; allowed: {MAX_CHARACTERS}. Send a smaller one."
        )
    if field in ("regex", "ebnf") or text == _ANY_JSON:
        _check_characters(field, text)
        return
    try:
        pending = [(json.loads(text), 1)]
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise ValueError(f"{field} is no JSON: {error}. Send JSON, as a string.") from None
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(field)
        if isinstance(value, str):
            _check_characters(field, value)
        elif isinstance(value, (dict, list)):
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            pending += [(one, depth + 1) for one in inner]


def _check_characters(field: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{field} has a NUL character in {shown(text)}. Leave it out.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{field} has one half of a surrogate pair in {shown(text)}. Send the whole character."
        ) from None


def _too_deep(field: str) -> ValueError:
    return ValueError(f"{field} is nested too deeply; allowed: {MAX_DEPTH} levels.")
