r"""Match regular expressions in one pass over a text, character by character, without backtracking.

`re` tries one path through a pattern after the other, and ``(a+)+b`` has 2^n of them. Here a set of
positions ("places") in the pattern, as the bits of an integer, tracks all paths at once (Glushkov,
"The abstract theory of automata", 1961): a character costs at most places / 8 steps, for any
pattern and text. The state is carried on, from token to token and from round to round into every
particle, so that a text is not read again. No regex engine for Python can pause in the middle of a
text; RE2, which is linear too, would search the whole text for each token of each particle, and
took 6 s for 100 kB and ``([ab]?){500}[ab]{500}c``.

`re` itself parses a pattern, and decides which characters a place takes and where ``^``, ``$`` and
``\b`` hold, so that a pattern has the same meaning as there. Constructs that need backtracking are
rejected: backreferences, lookahead and lookbehind, atomic groups.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, reduce
from itertools import pairwise, repeat
from operator import or_
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    from re import _parser as sre
else:
    import sre_parse as sre

MAX_PLACES = 256
"""Places of a pattern: its characters and classes, with repetitions written out."""

MAX_PARTS = 4096
"""Parts of a pattern, repetitions written out: places, groups, alternatives and assertions."""

MAX_FOLDED = 32768
"""Characters in the ranges of a pattern's case-insensitive classes: `re` folds them one by one, in
0.25 us each, when it compiles such a class."""

_KEPT = 4096  # entries of each of a pattern's caches: steps, characters and borders
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.ASCII
_CLASSES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
_BORDERS = {
    sre.AT_BEGINNING: "^",
    sre.AT_BEGINNING_STRING: r"\A",
    sre.AT_BOUNDARY: r"\b",
    sre.AT_NON_BOUNDARY: r"\B",
    sre.AT_END: "$",
    sre.AT_END_STRING: r"\Z",
}
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)


class PatternState(NamedTuple):
    """The state of a pattern after a text."""

    live: int = 0  # places that took the last character
    last: str = ""  # the last character
    # `live`, and whether a match ended before the last character, if no text follows: `$` holds
    # before a newline that is the last character.
    live_at_end: int = 0
    ended_before: bool = False


START = PatternState()


class _Part(NamedTuple):
    """A part of a pattern at a border between two characters."""

    can_be_empty: bool
    first: int  # places that may take the character after the border
    last: int  # places with which the part may end before the border


class _Automaton(NamedTuple):
    """The Glushkov automaton of a pattern, at borders where the same assertions hold."""

    whole: _Part
    follow: list[int]  # by place: the places that may come next
    known: dict[tuple[int, int], int]  # follow of eight places at once, by their byte and its place

    def after(self, live: int) -> int:
        """Return the places that may take the next character; a match may also start with it."""
        reached = self.whole.first
        for place, byte in enumerate(live.to_bytes(-(-len(self.follow) // 8), "little")):
            if byte:
                key = place, byte
                if key not in self.known:
                    places = _bits(byte << 8 * place)
                    self.known[key] = reduce(or_, (self.follow[at] for at in places))
                reached |= self.known[key]
        return reached

    def accepts(self, live: int) -> bool:
        """Return whether a match ends at the border."""
        return self.whole.can_be_empty or bool(live & self.whole.last)


class Pattern:
    """A regular expression.

    Raises ValueError for one that needs backtracking, or is too large.
    """

    def __init__(self, source: str) -> None:
        self._tree, borders = _checked(source)
        self._borders = sorted(borders)
        builder = _Builder(frozenset())
        builder.build(self._tree)
        self._classes = [(re.compile(*taken), mask) for taken, mask in builder.taken.items()]
        self._step = lru_cache(_KEPT)(self._stepped)
        self._taking = lru_cache(_KEPT)(self._places_taking)
        self._at = lru_cache(_KEPT)(self._automaton_at)
        self._automaton = lru_cache(None)(self._build)

    def read(self, state: PatternState, text: str) -> PatternState | None:
        """Advance over a text; None where a match has ended before its last character."""
        for character in text:
            following = self._step(state, character)
            if following is None:
                return None
            state = following
        return state

    def _stepped(self, state: PatternState, character: str) -> PatternState | None:
        here = self._at(state.last, character, "x")
        taking = self._taking(character)
        if here.accepts(state.live):
            return None
        live = here.after(state.live) & taking
        at_end = self._at(state.last, character, "") if character == "\n" else here
        live_at_end = live if at_end is here else at_end.after(state.live) & taking
        return PatternState(live, character, live_at_end, at_end.accepts(state.live))

    def ends(self, state: PatternState) -> bool:
        """Return whether a match ends at the present end of the text."""
        here = self._at(state.last, "", "")
        return state.ended_before or here.accepts(state.live) or here.accepts(state.live_at_end)

    def _places_taking(self, character: str) -> int:
        return sum(mask for taken, mask in self._classes if taken.match(character))

    def _automaton_at(self, before: str, behind: str, further: str) -> _Automaton:
        """Return the automaton of a border, by the characters around it; "" at the text's end."""
        text = before + behind + further
        place = len(before)
        holding = (
            re.compile(_BORDERS[code], flags).match(text, place) is not None
            for code, flags in self._borders
        )
        return self._automaton(tuple(holding))

    def _build(self, holding: tuple[bool, ...]) -> _Automaton:
        found = zip(self._borders, holding, strict=True)
        builder = _Builder(frozenset(border for border, holds in found if holds))
        return _Automaton(builder.build(self._tree), builder.follow, {})


@lru_cache(maxsize=256)
def pattern_of(source: str) -> Pattern:
    """Return a pattern, shared by the requests with this source; see `Pattern`."""
    return Pattern(source)


def num_places(source: str) -> int:
    """Return the number of places of a pattern.

    Raises ValueError for what `re` does not parse, what needs backtracking, and too many places.
    """
    return _checked(source)[0].size


class _Node(NamedTuple):
    """A part of a pattern, with its flags resolved and its places counted."""

    code: Any  # of `re`'s parser; SUBPATTERN for parts in a row, IN for a place
    value: Any  # nodes; a place's class or an assertion, with its flags; arguments of a repetition
    size: int  # places, with repetitions expanded
    num_parts: int = 1  # nodes, likewise


class _Reader:
    """A pass over a pattern's tree as `re` parses it, each part once."""

    def __init__(self) -> None:
        self.borders: set[tuple[Any, int]] = set()  # assertions, with their flags
        self.num_folded = 0  # characters in case-insensitive ranges

    def row(self, parsed: Iterable[Any], flags: int) -> _Node:
        """Return the node of a concatenation; two or four frames of Python's stack a level."""
        nodes: list[_Node] = []
        for code, value in parsed:
            nodes.append(self._node(code, value, flags))
        if len(nodes) == 1:
            return nodes[0]
        return _joined(sre.SUBPATTERN, nodes)

    def _node(self, code: Any, value: Any, flags: int) -> _Node:
        if code == sre.AT:
            self.borders.add((value, flags))
            return _Node(code, (value, flags), 0)
        if code == sre.SUBPATTERN:
            return self.row(value[3], _scoped(flags, value[1], value[2]))
        if code == sre.BRANCH:
            return _joined(code, list(map(self.row, value[1], repeat(flags))))
        if code in _REPEATS:
            return self._repeat(value[0], value[1], self.row(value[2], flags))
        if code == sre.IN and flags & re.IGNORECASE:
            self.num_folded += sum(_num_folded(*item) for item in value)
        return _Node(sre.IN, (_source(code, value), flags), 1)

    def _repeat(self, least: int, most: Any, inner: _Node) -> _Node:
        loops = most == sre.MAXREPEAT
        copies = max(least, 1) if loops else int(most)
        if not inner.size:  # repeating what takes no character changes nothing
            least = min(least, 1)
            copies = min(copies, 1)
        size = copies * inner.size
        num_parts = 1 + copies * inner.num_parts
        return _Node(sre.MAX_REPEAT, (least, copies, loops, inner), size, num_parts)


def _joined(code: Any, nodes: list[_Node]) -> _Node:
    size = sum(node.size for node in nodes)
    num_parts = sum(node.num_parts for node in nodes)
    return _Node(code, nodes, size, 1 + num_parts)


def _checked(source: str) -> tuple[_Node, set[tuple[Any, int]]]:
    """Return a pattern's tree and its assertions.

    Raises ValueError for a pattern that is rejected.
    """
    reader = _Reader()
    try:
        parsed: Any = sre.parse(source)
        tree = reader.row(parsed, parsed.state.flags & _FLAGS)
    except (re.error, OverflowError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    except RecursionError:
        raise ValueError("nests too deep; allowed: fewer groups within groups") from None
    limits = (
        (tree.size, MAX_PLACES, "characters and classes"),
        (tree.num_parts, MAX_PARTS, "parts (groups, alternatives, assertions and characters)"),
    )
    for found, allowed, what in limits:
        if found > allowed:
            raise ValueError(
                f"has {found} {what}, with repetitions written out; allowed: {allowed}. Repeat "
                "less often, or without a bound (*, +)"
            )
    if reader.num_folded > MAX_FOLDED:
        raise ValueError(
            f"has ranges of {reader.num_folded} characters in classes that ignore case; allowed: "
            f"{MAX_FOLDED}. Narrow them, or leave (?i) out"
        )
    return tree, reader.borders


class _Builder:
    """Numbers the places of a pattern, and records which may follow each."""

    def __init__(self, holding: frozenset[tuple[Any, int]]) -> None:
        self._holding = holding  # the assertions that hold, with their flags
        self.follow: list[int] = []
        self.taken: dict[tuple[str, int], int] = {}  # places by the character class and its flags

    def build(self, node: _Node) -> _Part:
        """Return the part of a node; each call assigns new places."""
        if node.code == sre.AT:
            return _Part(node.value in self._holding, 0, 0)
        if node.code == sre.SUBPATTERN:
            return self._row(map(self.build, node.value))
        if node.code == sre.BRANCH:
            empty, first, last = zip(*map(self.build, node.value), strict=True)
            return _Part(any(empty), reduce(or_, first), reduce(or_, last))
        if node.code == sre.MAX_REPEAT:
            return self._repeat(*node.value)
        mask = 1 << len(self.follow)
        self.follow.append(0)
        self.taken[node.value] = self.taken.get(node.value, 0) | mask
        return _Part(False, mask, mask)

    def _row(self, parts: Iterable[_Part]) -> _Part:
        whole = _Part(True, 0, 0)
        for part in parts:
            whole = self._then(whole, part)
        return whole

    def _repeat(self, least: int, copies: int, loops: bool, inner: _Node) -> _Part:
        parts = list(map(self.build, repeat(inner, copies)))
        whole = self._row(parts[:least])
        if not loops:
            return self._then(whole, self._at_most(parts[least:]))
        self._link(parts[-1].last, parts[-1].first)
        return whole if least else parts[-1]._replace(can_be_empty=True)

    def _at_most(self, parts: list[_Part]) -> _Part:
        """Return a concatenation of which trailing parts are optional."""
        for part, following in pairwise(parts):
            self._link(part.last, following.first)
        last = reduce(or_, (part.last for part in parts), 0)
        return _Part(True, parts[0].first if parts else 0, last)

    def _then(self, part: _Part, following: _Part) -> _Part:
        self._link(part.last, following.first)
        return _Part(
            part.can_be_empty and following.can_be_empty,
            part.first | (following.first if part.can_be_empty else 0),
            following.last | (part.last if following.can_be_empty else 0),
        )

    def _link(self, places: int, following: int) -> None:
        for place in _bits(places if following else 0):
            self.follow[place] |= following


def _source(code: Any, value: Any) -> str:
    """Return the source of one character's node."""
    if code == sre.LITERAL:
        return _escaped(value)
    if code == sre.NOT_LITERAL:
        return f"[^{_escaped(value)}]"
    if code == sre.ANY:
        return "."
    if code == sre.IN:
        return f"[{''.join(_item(*item) for item in value)}]"
    raise ValueError(
        f"has {_REFUSED.get(str(code), str(code))}, for which a text must be read again; allowed: "
        "characters, classes, groups, |, repetitions, ^, $, \\A, \\Z, \\b and \\B"
    )


_REFUSED = {
    "ASSERT": "a look ahead or behind",
    "ASSERT_NOT": "a look ahead or behind",
    "GROUPREF": "a group that is named again",
    "GROUPREF_EXISTS": "a group that is named again",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def _item(code: Any, value: Any) -> str:
    if code == sre.NEGATE:
        return "^"
    if code == sre.CATEGORY:
        return _CLASSES[value]
    if code == sre.RANGE:
        return "-".join(map(_escaped, value))
    return _escaped(value)


def _escaped(code_point: int) -> str:
    return f"\\U{code_point:08x}"


def _num_folded(code: Any, value: Any) -> int:
    """Return how many characters of a range `re` folds: those of the Basic Multilingual Plane."""
    return max(min(value[1], 0xFFFF) + 1 - value[0], 0) if code == sre.RANGE else 0


def _scoped(flags: int, added: int, dropped: int) -> int:
    if added & (re.ASCII | re.UNICODE):
        flags &= ~re.ASCII
    return (flags | added & _FLAGS) & ~dropped


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
