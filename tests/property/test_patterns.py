"""Patterns that are read on, character by character, against Python's own `re`."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.requests.pattern import START, Pattern, State

ATOMS = ("a", "b", "é", " ", r"\n", ".", "[ab]", "[^a]", r"\w", r"\W", r"\s", r"\d", r"[\W\d_]")
BORDERS = ("^", "$", r"\A", r"\Z", r"\b", r"\B")
REPEATS = ("*", "+", "?", "{2}", "{0}", "{,2}", "{1,3}", "{2,}", "*?", "+?")
FLAGS = ("", "(?i)", "(?m)", "(?s)", "(?a)", "(?ms)", "(?im)")

patterns = st.recursive(
    st.sampled_from(ATOMS + BORDERS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda all: f"(?:{'|'.join(all)})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda both: f"(?:{both[0]}){both[1]}"),
        st.tuples(st.sampled_from("ims"), inner).map(lambda both: f"(?{both[0]}:{both[1]})"),
    ),
    max_leaves=6,
)
texts = st.text(alphabet="abBéÉ \n7_", max_size=8)


def ends_at(pattern: Pattern, text: str) -> int | None:
    """The length of the shortest beginning of a text that has a match; each is looked at."""
    state: State | None = START
    for length in range(len(text) + 1):
        state = pattern.read(state, text[length - 1 : length] if length else "")
        if state is None or pattern.ends(state):
            return length
    return None


@settings(max_examples=1500, deadline=None)
@given(flags=st.sampled_from(FLAGS), source=patterns, text=texts)
def test_a_match_is_found_where_re_finds_it(flags: str, source: str, text: str) -> None:
    """Red for a border, a class or a repetition that means something else than to `re`."""
    theirs = re.compile(flags + source)
    lengths = (n for n in range(len(text) + 1) if theirs.search(text[:n]))
    assert ends_at(Pattern(flags + source), text) == next(lengths, None)
