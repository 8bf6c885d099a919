"""Votes: what pattern finds an answer, what finding it costs, and how much of it a round does."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import re2
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from populations import population_of
from toy_request import Letters

from sglang_smc.options.answers import AnswerPattern, answer_pattern
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.requests import votes as module
from sglang_smc.requests.open_token import OpenToken
from sglang_smc.requests.text_rule import BatchTexts
from sglang_smc.requests.votes import Votes

ATOMS = ("a", "b", "ab", "[ab]", ".", "(a)", "(a|ab)", "(?:ab|a)", "[^a]+", "a*?", "b{1,2}", "é",
         "$", "^", r"\b", r"\n?", "(?s:.)", "(?m:$)", "(?m:^)", "(?i:A)")  # fmt: skip
patterns = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda all: f"(?:{'|'.join(all)})"),
        st.tuples(inner, st.sampled_from(("", "*", "+", "?", "*?", "{2}"))).map(
            lambda both: f"({both[0]}){both[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(source=patterns, text=st.text(alphabet="aAbcé \n", max_size=10))
def test_the_answer_is_in_the_last_of_all_matches_in_turn(source: str, text: str) -> None:
    """Red for groups of an earlier match, a start within a match, and flags that leak."""
    try:
        found = AnswerPattern(source).last(text.encode())
    except ValueError as error:
        assume(not re.match("can match nothing|has [0-9]+ (groups|instructions)", str(error)))
        raise
    matches = list(re2.compile(source).finditer(text))
    last = matches[-1].group(1 if matches[-1].re.groups else 0) if matches else None
    assert found == (None if last is None else last.encode())


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        (r"#### (-?\d+)", b"12"),
        (r"\d+", b"12"),
        ("x", None),
        (r"(no)|(\d+)$", None),
        (r"\Qno\E", b"no"),
        (r"\C: ", b"o: "),
    ],
)
def test_the_last_match_answers(pattern: str, answer: bytes | None) -> None:
    assert answer_pattern(pattern).last(b"#### 7, no: #### 12") == answer


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", r"a look ahead \(\?="),
        ("a(?!b)", r"a look ahead \(\?!"),
        ("(?<=a)b", r"a look behind \(\?<="),
        ("(?<!a)b", r"a look behind \(\?<!"),
        (r"(a)\1", r"a group that is named again \\1"),
        ("(?P<n>a)(?P=n)", "a group that is named again"),
        ("(?>a)b", "an atomic group"),
        ("a++b", r"a possessive repetition \+\+"),
        ("(?(1)a|b)", "a condition"),
        ("(", r"does not parse: missing \)"),
        (r"\Qa", r"does not parse: missing \)"),
        ("\ud800", "surrogate"),
        ("", "is no pattern"),
        ("a" * 513, "at most 512 characters"),
        ("(a)" * 11, "has 11 groups"),
        (r"\pL{2}", "has [0-9]* instructions, since .* allowed: .* 2048 instructions"),
        (r"(\d{1,500}|)" * 40, "does not parse: pattern too large"),
        ("a*", "can match nothing"),
        (r"(\d*)$", "can match nothing"),
        (r"a|\b", "can match nothing"),
    ],
)
def test_what_cannot_be_linear_is_refused_by_name(pattern: str, message: str) -> None:
    asked = {"selection": "vote", "answer_pattern": pattern}
    with pytest.raises(ValueError, match=message):
        request_config(SMCConfig(), {"smc": asked})


def test_a_text_is_searched_twice_however_many_matches_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Match behind match, ``a.*b|a`` would read this text to its end 5,000 times."""
    searches = []
    match = re2._Regexp._match

    def counted(*given: Any) -> Any:
        for found in match(*given):
            searches.append(found)
            yield found

    monkeypatch.setattr(re2._Regexp, "_match", counted)
    pattern = AnswerPattern("a.*b|a")
    searches.clear()
    assert pattern.last(b"a" * 5000) == b"a"
    assert len(searches) == 2


def request(pattern: str, rid: str) -> Any:
    config = request_config(SMCConfig(), {"smc": {"selection": "vote", "answer_pattern": pattern}})
    return SimpleNamespace(
        rid=rid,
        tokenizer=Letters(27),
        output_ids=[0],
        smc_state=SimpleNamespace(config=config, kept={}, open_token=OpenToken()),
        to_finish=None,
        finished=lambda: False,
    )


def answers(reqs: list[Any], tails: list[list[list[int]]]) -> dict[int, Any]:
    """By group, of the texts "a" and a tail, which have all ended."""
    population = population_of(tails)
    population = population._replace(ended=population.ended | True)
    found = Votes.of(BatchTexts(reqs, population, 27, "cpu")).verdicts()
    return {group: verdict.answers for group, verdict in found.items()}


def test_a_round_reads_so_much_and_later_ones_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """By lengths alone, in the order of the batch: no rank's clock has a word in it.

    Equal answers have one number.
    """
    found = answers([request("b+", "x")], [[[1, 2], [2], [1, 1, 2], [0]]])
    assert found == {0: [0, -1, 1, -1]}
    reqs = [request("b", name) for name in "xyz"]
    tails = [[[1], [2], [1, 1]], [[2], [2], [1]], [[], [], []]]
    expected = {0: [0, -1, 0], 1: [-1, -1, 0], 2: [-1, -1, -1]}
    assert answers([request("b", name) for name in "xyz"], tails) == expected
    a_text = 2 * answer_pattern("b").num_instructions  # of two letters
    monkeypatch.setattr(module, "MOST_STEPS", 2 * a_text)
    rounds = [answers(reqs, tails) for _ in range(4)]
    assert rounds == [{}, {0: [0, -1, 0]}, {0: [0, -1, 0], 1: [-1, -1, 0]}, expected]
    assert not any(req.to_finish for req in reqs)


def test_a_text_that_no_round_may_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    reqs = [request("b", "long"), request("b", "short")]
    monkeypatch.setattr(module, "MOST_STEPS", 5 * answer_pattern("b").num_instructions)
    assert answers(reqs, [[[1] * 5], [[1]]]) == {}
    assert "has 6 bytes and the answer_pattern" in reqs[0].to_finish.message
    assert reqs[0].to_finish.status_code == 400 and reqs[1].to_finish is None
    assert answers(reqs, [[[1] * 5], [[1]]]) == {1: [0]}
