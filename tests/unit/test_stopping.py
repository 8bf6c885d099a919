"""Stop strings and patterns: wherever borders fall, and at what cost."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from populations import population_of
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
)
from toy_request import begun

from sglang_smc.guard import pattern
from sglang_smc.guard.pattern import MAX_PLACES, START, Pattern, num_places
from sglang_smc.rules.base import BatchTexts
from sglang_smc.rules.stopping import CONTEXT, StopTexts, first_match


class Words:
    """Token i is the i-th word; a text is all of them in a row."""

    words = ("a", "b", "c", "ST", "OP", "STOP!", " ", "7", b"\xc2", b"\xa7")  # two make a §

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        self.num_decoded += len(tokens)
        words = (self.words[token] for token in tokens)
        whole = b"".join(word if isinstance(word, bytes) else word.encode() for word in words)
        return whole.decode(errors="replace")


def ends_of(reqs: list[Any], tokens: list, population: Any = None, ends: Any = None) -> list:
    drawn = torch.tensor(tokens)
    known = torch.zeros_like(drawn).bool() if ends is None else ends
    of_round = StopTexts(BatchTexts(reqs, population, 8, "cpu"))
    return of_round.ends(known, drawn, population).int().tolist()


A, B, C, ST, OP, STOP, SPACE, SEVEN, HALF, OTHER_HALF = range(10)


def make_req(
    stops: tuple[str, ...] = (),
    regex: str | None = None,
    span: int = 2,
    output_ids: tuple[int, ...] = (),
) -> Any:
    """``span``: tokens that a stop text may take, as SGLang computes it from the tokenizer."""
    req = begun(
        {},
        output_ids,
        stop_strs=list(stops),
        stop_regex_strs=[regex] if regex else [],
        stop_str_max_len=span if stops else 0,
        stop_regex_max_len=span if regex else 0,
    )
    req.tokenizer = Words()
    req.finished_reason = None
    req.finished_len = None
    req.finished = lambda: req.finished_reason is not None
    StopTexts.begin(req)
    return req


STRING = {"stops": ("STOP",), "span": 1}
DIGITS = {"regex": r"a\d+ b", "span": 6}
PARAGRAPH = {"regex": "a§b"}


@pytest.mark.parametrize(
    ("asked", "emitted", "tail", "new", "expected"),
    [
        (STRING, [A], [B], [A, STOP, C], 1),  # inside one token
        (STRING, [A], [B], [A, ST, OP, C], 2),  # across two new tokens: it ends with the second
        (STRING, [A], [B, ST], [OP, A], 0),  # begins in the tail
        (STRING, [A, ST], [], [OP, A], 0),  # begins in the emitted text
        (STRING, [ST], [OP], [A, A], None),  # between text and tail: matched long ago, not now
        (STRING, [A], [ST], [A, OP], None),  # not in a row
        (STRING, [A], [], [ST, ST, OP], 2),
        (STRING, [A], [B], [OP, ST], None),  # the wrong way round
        (STRING, [], [], [STOP], 0),
        (STRING, [A], [], [STOP, STOP], 0),  # the first counts
        (STRING, [A], [B], [], None),
        ({"stops": ("abcabc",), "span": 6}, [B, A, B], [C, A], [B, C, A], 1),
        ({"stops": ("cc", "ab")}, [], [], [C, A, B, C, C], 2),  # the first of several
        (DIGITS, [C, A], [SEVEN], [SEVEN, SPACE, B, C], 2),
        (DIGITS, [C, A], [SPACE], [SEVEN, SPACE, B], None),
        ({"stops": ("STOP",), "regex": r"\d"}, [], [], [A, SEVEN, STOP], 1),
        ({"stops": ("STOP",), "regex": r"\d"}, [], [], [STOP, SEVEN], 0),
        (PARAGRAPH, [A, HALF], [OTHER_HALF], [B], 0),  # half a character and its other half
        (PARAGRAPH, [A, HALF], [], [OTHER_HALF, B], 1),
        (PARAGRAPH, [A, HALF], [], [B], None),
    ],
)
def test_a_stop_text_ends_at_the_token_that_completes_it(
    asked: dict, emitted: list[int], tail: list[int], new: list[int], expected: int | None
) -> None:
    req = make_req(**{"stops": (), **asked}, output_ids=tuple(emitted))
    assert first_match(req, tail, new) == expected


# Stale tokens behind the tails would complete a match.
population = partial(population_of, stale=OP, width=8)


def test_each_particle_is_marked_by_its_own_lineage_and_each_request_by_its_own_texts() -> None:
    reqs = [make_req(("STOP",)), make_req(), make_req(("ab",))]
    tails = population([[[ST], [A]], [[ST], [A]], [[ST], [A]]])
    ends = torch.zeros(3, 2, 2, dtype=torch.bool)
    ends[0, 1, 1] = True  # an end that is already known stays
    found = ends_of(reqs, [[[OP, A], [OP, B]]] * 3, tails, ends)
    assert found == [[[1, 0], [0, 1]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]
    again = ends_of(reqs, [[[B, A], [B, B]]] * 3, tails, ends)
    assert again[2] == [[0, 0], [1, 0]]
    assert ends.sum() == 1, "the argument is left as it was"
    behind = ends_of([make_req(("STOPa",))], [[[A], [A]]], population([[[ST], [ST, OP]]]))
    assert behind == [[[0], [1]]], "tokens behind the end of a tail are not read"
    first = ends_of([make_req(("STOP",), output_ids=(A, ST))], [[[OP], [A]]])
    assert first == [[[1], [0]]], "right behind the emitted text stand those that prefill drew"


def test_a_particle_reads_its_own_first_token_while_it_is_open() -> None:
    """What stands in its place in the request's output is another particle's, or nobody's."""
    for open_token_at, expected in ((1, [[1], [0]]), (None, [[0], [0]])):
        req = make_req(("STOP",), output_ids=(A, C))
        req.smc_state.open_token.begin(open_token_at)
        tails = population([[[], []]], [[ST, A]])
        assert ends_of([req], [[[OP], [OP]]], tails) == [expected]


def end_of(req: Any, *tokens: int) -> tuple[str | None, int | None]:
    """How a request ends, if it does, once it has put out these tokens."""
    req.output_ids.extend(tokens)
    StopTexts.end_at_match(req)
    reason = req.finished_reason
    return getattr(reason, "matched", None), req.finished_len


def test_sglang_has_no_pattern_to_search_for_and_the_request_ends_all_the_same() -> None:
    req = make_req(regex="b+c")
    assert req.sampling_params.stop_regex_strs == [] and StopTexts.applies(req)
    assert StopTexts.applies(make_req(("x",))) and not StopTexts.applies(make_req())
    assert req.sampling_params.stop_regex_max_len == 0
    assert end_of(req, A, B) == (None, None)
    assert end_of(req, B, C, A, B, C) == ("b+c", 4)


@pytest.mark.parametrize(
    ("reason", "length", "expected"),
    [
        (FINISH_LENGTH(3), 3, "b"),  # as SGLang: a text that has come to its end is not cut short
        (FINISH_MATCHED_TOKEN(A), 3, "b"),
        (FINISH_MATCHED_STR("ab"), 3, "ab"),  # as SGLang: strings before patterns
        (FINISH_MATCHED_TOKEN(A), 2, A),  # that was before
        (FINISH_MATCHED_STR("cc"), 4, "b"),
        (FINISH_ABORT("gone"), None, None),
    ],
)
def test_the_first_end_of_a_text_counts(reason: Any, length: int | None, expected: Any) -> None:
    req = make_req(regex="b")
    req.finished_reason = reason
    req.finished_len = length
    end_of(req)
    end_of(req, A, A, B, C)
    assert getattr(req.finished_reason, "matched", None) == expected


def test_a_long_text_is_not_read_again() -> None:
    """Red where work a round grows with the text: here it was decoded 360 times over."""
    req = make_req(regex=r"(a+)+c", output_ids=(A,) * 5000)
    StopTexts.end_at_match(req)
    before = req.tokenizer.num_decoded
    for _ in range(40):
        assert first_match(req, [A, B], [A] * 8 + [B]) is None
    assert req.tokenizer.num_decoded - before < 40 * 12 * 3 * CONTEXT


# Shapes of the OWASP page on regular expression denial of service, and of Davis and others, "The
# impact of regular expression denial of service in practice" (2018), each before a character that
# never comes: `re` would take 2^n steps, or n^25, for n words.
WORDS = "t3 t40 t12 t7 t33 t5 t61 t18 t2 t55 "
ENDLESS = (
    *(r"([a-zA-Z0-9 .=+#\n]+)+§", r"(\w+\s?)*§", r"(\S+ *)+§", r"(?:t?\d*\s*)*§", r"(\w|\w\w| )+§"),
    *(r"(.*\d){25}§", r"^(([a-z0-9 ])+.)+[A-Z]([a-z])+§", r"(?:.*.* .*)*§", r"(x*\w*\s?)*§"),
    r"((t\d+ )+)+§",
)
WORST = (r"[ab]*a[ab]{250}c", r"([ab]?){120}[ab]{120}c", r"(?:(?:a?){16}b?){12}c")


@pytest.mark.parametrize("source", [*ENDLESS, *WORST])
def test_work_is_places_over_eight_a_character(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: `re` would need 2^300 steps, and a set walked bit by bit eight times."""
    steps = 0
    follow = pattern._Automaton.after

    def counted(automaton: pattern._Automaton, live: int) -> int:
        nonlocal steps
        steps += len(live.to_bytes(-(-len(automaton.follow) // 8), "little"))
        return follow(automaton, live)

    monkeypatch.setattr(pattern._Automaton, "after", counted)
    text = WORDS * 30 if source in ENDLESS else "aabab" * 100
    state = Pattern(source).read(START, text)
    assert state is not None and not Pattern(source).ends(state)
    assert 0 < steps <= 2 * len(text) * -(-num_places(source) // 8)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("(a)\\1", "a group that is named again"),
        *((source, "a look ahead or behind") for source in ("(?=a)b", "(?<!a)b")),
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
    """And every place that is allowed can be used."""
    assert num_places(source) <= 2
    assert Pattern(source).read(START, "x-ab-") is None  # found, as `re` would
    assert Pattern(f"a{{{MAX_PLACES}}}").read(START, "a" * MAX_PLACES + "b") is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "_KEPT", 10)
    one = Pattern(r"\w\b[^a]+c")
    one.read(START, "".join(map(chr, range(200, 400))) + "\n" * 5)
    assert max(kept.cache_info().currsize for kept in (one._step, one._taking, one._at)) == 10
