"""Find the answer in a text by a regular expression, in time linear in both, with RE2.

Matching again behind each match is quadratic even with RE2: ``a.*b|a`` reads to the end of a text
for each ``a``. So one expression matches all occurrences, ``(?:(?s:.*?)(pattern))*``, and its group
holds the last. An empty match would stop the repetition, so a pattern that matches the empty string
is rejected.

A search takes at most 12 ns per byte and instruction of RE2's program (the worst of 37 patterns
over five texts of 200 kB, most of them built to overflow the automaton's state cache).
"""

from functools import lru_cache
from itertools import product
from typing import cast

import re2

MAX_PATTERN = 512
"""Maximum number of characters of a pattern."""

MAX_INSTRUCTIONS = 2048
"""Maximum number of instructions of RE2's program: ``\\d+`` has 16, ``\\pL+`` 1,211."""

MAX_GROUPS = 10
"""Maximum number of groups: each costs time in all states of a search, and only the first is
used."""

_MEMORY = 1 << 18
"""Bytes for a program and its automaton's states. With these no pattern takes longer than 20 ms to
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
"""Characters around a position, of each kind that an assertion distinguishes."""


class AnswerPattern:
    """Validated pattern that finds the answer in a text.

    Raises ValueError for a pattern that is not allowed; its message continues a sentence.
    """

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
        # Groups of earlier repetitions remain in `found`, so the last match is repeated alone.
        match = None if start < 0 else self._one.match(text, start)
        if match is None:
            return None
        return cast("bytes | None", match.group(1 if self._one.groups else 0))


@lru_cache(maxsize=64)
def answer_pattern(source: str) -> AnswerPattern:
    """Return the cached pattern of a source, which many requests may share; see `AnswerPattern`."""
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
