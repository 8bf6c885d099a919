"""Define grammars that xgrammar compiles at once for the shipped pair, with validity checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Grammar(NamedTuple):
    """Request parameters of a grammar, and the check of a complete text."""

    params: dict[str, Any]
    is_legal: Callable[[str], bool]


def _regex(pattern: str) -> Grammar:
    return Grammar({"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["stamps", "coins"]}},
    "required": ["count", "unit"],
    "additionalProperties": False,
}


def _obeys_schema(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and found.keys() == {"count", "unit"}
        and type(found["count"]) is int
        and found["unit"] in ("stamps", "coins")
    )


GRAMMARS = (
    _regex(r"#### [0-9]{1,4}"),
    _regex(r"(yes|no|maybe)(, (yes|no|maybe)){2,9}\."),
    Grammar({"json_schema": json.dumps(_SCHEMA)}, _obeys_schema),
)
