"""Stop patterns: what is refused, and that no pattern takes more than its places a character."""

import re

import pytest
from redos import ENDLESS, WORDS

from sglang_smc.requests import pattern as module
from sglang_smc.requests.pattern import MAX_PLACES, START, Pattern, num_places

WORST = (r"[ab]*a[ab]{250}c", r"([ab]?){120}[ab]{120}c", r"(?:(?:a?){16}b?){12}c")


@pytest.mark.parametrize("source", [*ENDLESS, *WORST])
def test_work_is_places_over_eight_a_character_whatever_the_text(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: `re` would need 2^300 steps, and a set walked bit by bit eight times."""
    steps = 0
    follow = module._Automaton.after

    def counted(automaton: module._Automaton, live: int) -> int:
        nonlocal steps
        steps += len(live.to_bytes(-(-len(automaton.follow) // 8), "little"))
        return follow(automaton, live)

    monkeypatch.setattr(module._Automaton, "after", counted)
    text = WORDS * 30 if source in ENDLESS else "aabab" * 100
    state = Pattern(source).read(START, text)
    assert state is not None and not Pattern(source).ends(state)
    assert 0 < steps <= 2 * len(text) * -(-num_places(source) // 8)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("(a)\\1", "a group that is named again"),
        ("(?=a)b", "a look ahead or behind"),
        ("(?<!a)b", "a look ahead or behind"),
        ("(a)?(?(1)b|c)", "a group that is named again"),
        ("a{257}", "257 characters and classes, with repetitions written out; allowed: 256"),
        ("((a{1,500}){1,500}){1,500}", "125000000 characters"),
        (r"(a\b\b){2000}", "characters and classes"),
        (r"(a\b\B\b\B\b\B\b\B\b\B\b\B\b\B\b\B){255}", "parts (groups, alternatives"),
        ("(?i)[\u0400-\uffff]", "ranges of 64512 characters in classes that ignore case"),
        ("(" * 2000 + ")" * 2000, "nests too deep"),
        ("(a", "is no regular expression: missing )"),
        ("a{99999999999}", "is no regular expression: the repetition number is too large"),
    ],
)
def test_what_cannot_be_read_in_one_go_is_refused_by_name(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Pattern(source)


@pytest.mark.parametrize(
    "source", ["(?:){1000000000}a", r"(?:\b){100}a|b", "a{0}b", "", "(?:a|b*)*"]
)
def test_repetitions_of_nothing_cost_nothing(source: str) -> None:
    assert num_places(source) <= 2
    assert Pattern(source).read(START, "x-ab-") is None  # found, as `re` would


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 10)
    pattern = Pattern(r"\w\b[^a]+c")
    pattern.read(START, "".join(map(chr, range(200, 400))) + "\n" * 5)
    assert max(map(len, (pattern._steps, pattern._masks, pattern._holding))) <= 10


def test_every_place_that_is_allowed_can_be_used() -> None:
    assert Pattern(f"a{{{MAX_PLACES}}}").read(START, "a" * MAX_PLACES + "b") is None
