"""Patterns that are read on, character by character, against Python's own `re`."""

import contextlib
import re
import sys
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from drawn import patterns
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_smc.guard.pattern import MAX_PLACES, START, Pattern, PatternState, num_places

ATOMS = ("a", "b", "é", " ", r"\n", ".", "[ab]", "[^a]", r"\w", r"\W", r"\s", r"\d", r"[\W\d_]")
BORDERS = ("^", "$", r"\A", r"\Z", r"\b", r"\B")
REPEATS = ("*", "+", "?", "{2}", "{0}", "{,2}", "{1,3}", "{2,}", "*?", "+?")
FLAGS = ("", "(?i)", "(?m)", "(?s)", "(?a)", "(?ms)", "(?im)")

texts = st.text(alphabet="abBéÉ \n7_", max_size=8)


def ends_at(pattern: Pattern, text: str) -> int | None:
    """The length of the shortest beginning of a text that has a match; each is looked at."""
    state: PatternState | None = START
    for length in range(len(text) + 1):
        state = pattern.read(state, text[length - 1 : length] if length else "")
        if state is None or pattern.ends(state):
            return length
    return None


@settings(max_examples=600)
@given(flags=st.sampled_from(FLAGS), source=patterns(ATOMS + BORDERS, REPEATS), text=texts)
def test_a_match_is_found_where_re_finds_it(flags: str, source: str, text: str) -> None:
    """Red for a border, a class or a repetition that means something else than to `re`."""
    theirs = re.compile(flags + source)
    lengths = (n for n in range(len(text) + 1) if theirs.search(text[:n]))
    assert ends_at(Pattern(flags + source), text) == next(lengths, None)


SHELLS = (
    ("(", ")*"), ("(", ")+?"), ("(?:", ")"), ("(", "){1,2}"), ("(?:", "){0}"), ("(?i:", ")?"),
    ("(", "|b)*"), ("(|", ")"), (r"(\b", "){,3}"), ("(a?", "){2,}"), ("a", "b"),
)  # fmt: skip
nests = st.lists(st.sampled_from(SHELLS), max_size=85).map(
    lambda shells: reduce(lambda inner, shell: inner.join(shell), shells, "a")
)


@contextlib.contextmanager
def at_most(most: int) -> Iterator[None]:
    """Fail as soon as the block has made more calls than ``most``: it need not end by itself."""
    num_calls = 0

    def count(frame: object, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")
        if num_calls > most:
            sys.setprofile(None)
            raise AssertionError(f"more than {most} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def check_steps(source: str) -> None:
    """What checking and building cost, in calls; a pattern that is refused is not built."""
    with at_most(100 * (len(source) + 10)):
        try:
            num_places(source)
        except ValueError:
            return
    with at_most(100 * (len(source) + 10) + 3 * MAX_PLACES**2):
        pattern = Pattern(source)
        pattern.read(START, "ab")


@settings(max_examples=60)
@given(nests)
@example("(a?){256}")
@example(r"(a\b" + r"\B\b" * 60 + "){256}")
@example("(" * 20 + "a" + "){16}" * 20)
def test_a_pattern_costs_a_polynomial_of_its_length(source: str) -> None:
    """Red where some part is visited again for each level that it is nested in."""
    check_steps(source)


@pytest.mark.parametrize("depth", [1, 8, 19, 40, 85])
def test_nested_repeats_are_one_place(depth: int) -> None:
    source = "(" * depth + "a" + ")*" * depth
    check_steps(source)
    assert num_places(source) == 1 and ends_at(Pattern(source), "ba") == 0
