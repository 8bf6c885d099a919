"""The pattern that finds the answer in a text, in time linear in both: RE2 runs it.

Matching again behind each match is quadratic even there: ``a.*b|a`` reads to the end of a text for
each ``a``. So one expression takes all matches in a row, ``(?:(?s:.*?)(pattern))*``, and its group
is left at the last. An empty match may not go on, so a pattern that can match nothing is refused.

A search takes at most 12 ns a byte and instruction of RE2's program (the worst of 37 patterns over
five texts of 200 kB, most of them made to have the automaton forget its states).
"""

from functools import lru_cache
from itertools import product
from typing import cast

import re2

MAX_PATTERN = 512
"""Characters of a pattern."""

MAX_INSTRUCTIONS = 2048
"""Of RE2's program: ``\\d+`` has 16, ``\\pL+`` 1,211."""

MAX_GROUPS = 10
"""Each costs time in all states that a search is in, and the first alone is of use."""

_MEMORY = 1 << 18
"""Bytes of a program and its automaton's states. With these no pattern takes longer than 20 ms to
compile; with 1 MiB some took 650."""

_ALLOWED = (
    f"a regular expression in RE2's syntax of at most {MAX_PATTERN} characters, {MAX_GROUPS} "
    f"groups and {MAX_INSTRUCTIONS} instructions, which matches one character at least"
)
_REFUSED = {
    "(?=": "a look ahead (?=",
    "(?!": "a look ahead (?!",
    "(?<=": "a look behind (?<=",
    "(?<!": "a look behind (?<!",
    "(?>": "an atomic group (?>",
    "(?(": "a condition (?(",
    "(?P": "a group that is named again (?P=",
    **{f"\\{digit}": f"a group that is named again \\{digit}" for digit in range(1, 10)},
    **{f"{repeat}+": f"a possessive repetition {repeat}+" for repeat in "*+?"},
}
_BORDERS = tuple(product(("", "a", "\n", " "), repeat=2))
"""Characters around a place, of each kind that an assertion tells apart."""


class AnswerPattern:
    """One pattern; ValueError, which continues a sentence, where it is refused."""

    def __init__(self, source: str) -> None:
        if not 0 < len(source) <= MAX_PATTERN:
            raise ValueError(f"is no pattern; allowed: {_ALLOWED}")
        self._one = _compiled(source)
        self._all = _compiled(f"(?:(?s:.*?)({source}))*")
        self.num_instructions: int = self._all.programsize
        problem = self._problem()
        if problem:
            raise ValueError(f"{problem}; allowed: {_ALLOWED}")

    def _problem(self) -> str | None:
        if self._one.groups > MAX_GROUPS:
            return f"has {self._one.groups} groups"
        if self.num_instructions > MAX_INSTRUCTIONS:
            return (
                f"has {self.num_instructions} instructions, since repetitions are written out and "
                "classes of letters are large"
            )
        if any(self._one.fullmatch(a + b, len(a), len(a)) for a, b in _BORDERS):
            return "can match nothing, so that each text ends with an answer of no characters"
        return None

    def last(self, text: bytes) -> bytes | None:
        """Return the last match in a UTF-8 text, or its first group; None without one."""
        found = self._all.match(text)
        start = -1 if found is None else found.start(1)
        # Groups of former matches are left in `found`, so the last is made again.
        match = None if start < 0 else self._one.match(text, start)
        if match is None:
            return None
        return cast("bytes | None", match.group(1 if self._one.groups else 0))


@lru_cache(maxsize=64)
def answer_pattern(source: str) -> AnswerPattern:
    """Return the pattern of a text, which many requests may share; see `AnswerPattern`."""
    return AnswerPattern(source)


def _compiled(source: str) -> re2._Regexp:
    options = re2.Options()
    options.max_mem, options.log_errors = _MEMORY, False
    try:
        return re2.compile(source, options)
    except UnicodeEncodeError:
        raise ValueError(f"has one half of a surrogate pair; allowed: {_ALLOWED}") from None
    except re2.error as error:
        (said,) = error.args
        told = said.decode(errors="replace")
        refused = _REFUSED.get(told.rpartition(": ")[2])
        problem = f"has {refused}, which RE2 has not" if refused else f"does not parse: {told}"
        raise ValueError(f"{problem}; allowed: {_ALLOWED}") from None
