"""Escape foreign text before it is printed to a terminal or a log, and quote it in brief."""

import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

MOST_SHOWN = 80
"""The most characters of a client's value that an error message quotes."""

MOST_TOLD = 600
"""The most characters of an error message that tells several problems of a request."""

MOST_OF_REASON = 200
"""The most characters of another library's message, which may quote a client's value."""

_MOST_BITS = 256  # of an integer that is quoted by its digits; more may cost minutes, or an error
_LEFT_OUT = "..."


def printable(value: object) -> str:
    """Return a value's text with escapes for characters that affect a terminal or a log line.

    These are the characters that `str.isprintable` rejects: controls and newlines, direction marks,
    zero-width characters, lone surrogates. The text is a single line.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )


def shown(value: object) -> str:
    """Return a client's value as error messages quote it: its `repr`, cut at `MOST_SHOWN`."""
    return brief(_QUOTE.repr(value), MOST_SHOWN)


def brief(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters, the middle of a longer one left out."""
    if len(text) <= most:
        return text
    kept = most - len(_LEFT_OUT)
    return text[: kept - kept // 2] + _LEFT_OUT + text[len(text) - kept // 2 :]


def reason(error: object) -> str:
    """Return another library's message, in escapes, cut at `MOST_OF_REASON`."""
    return brief(printable(error), MOST_OF_REASON)


def in_all(problems: Sequence[str]) -> str:
    """Return a request's problems, a sentence or more each, as far as `MOST_TOLD` reaches.

    The first is told in any case; of those left out, the number.
    """
    told, *others = problems
    for index, problem in enumerate(others):
        if len(told) + len(problem) > MOST_TOLD:
            return f"{told} There are {len(others) - index} more of these."
        told += f" {problem}"
    return told


class _Quote(reprlib.Repr):
    """Quote values of any size and depth at little cost; short ones as `repr` does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MOST_SHOWN
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = MOST_SHOWN // 2

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MOST_BITS else f"<an integer of {bits} bits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Quote a dictionary in its own order."""
        if x and level <= 0:
            return "{" + _LEFT_OUT + "}"
        first = islice(x.items(), self.maxdict)
        inner = [f"{self.repr1(key, level - 1)}: {self.repr1(of, level - 1)}" for key, of in first]
        return "{" + ", ".join(inner + [_LEFT_OUT] * (len(x) > self.maxdict)) + "}"


_QUOTE = _Quote()
