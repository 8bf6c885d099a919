"""Stop strings and patterns, wherever the borders between tokens and between texts fall."""

from types import SimpleNamespace
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

from sglang_smc.requests.open_token import OpenToken
from sglang_smc.requests.stopping import CONTEXT, StopTexts, first_match
from sglang_smc.requests.text_rule import BatchTexts
from sglang_smc.state.population import Population


class Letters:
    """Token i is the i-th word; a text is all of them in a row."""

    words = ("a", "b", "c", "ST", "OP", "STOP!", " ", "7", b"\xc2", b"\xa7")  # two make a §

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, tokens: list[int]) -> str:
        self.num_decoded += len(tokens)
        words = (self.words[token] for token in tokens)
        whole = b"".join(word if isinstance(word, bytes) else word.encode() for word in words)
        return whole.decode(errors="replace")


def ends_of(
    reqs: list[Any],
    tokens: list,
    population: Population | None = None,
    ends: torch.Tensor | None = None,
) -> list:
    drawn = torch.tensor(tokens)
    known = torch.zeros_like(drawn).bool() if ends is None else ends
    of_round = StopTexts.of(BatchTexts(reqs, population, 8, "cpu"))
    return of_round.ends(known, drawn, population).int().tolist()


A, B, C, ST, OP, STOP, SPACE, SEVEN, HALF, OTHER_HALF = range(10)


def make_req(
    stops: tuple[str, ...] = (),
    regex: str | None = None,
    span: int = 2,
    output_ids: tuple[int, ...] = (),
) -> Any:
    """``span``: tokens that a stop text may take, as SGLang computes it from the tokenizer."""
    params = SimpleNamespace(
        stop_strs=list(stops),
        stop_regex_strs=[regex] if regex else [],
        stop_str_max_len=span if stops else 0,
        stop_regex_max_len=span if regex else 0,
    )
    state = SimpleNamespace(open_token=OpenToken(), kept={})
    req = SimpleNamespace(
        sampling_params=params,
        tokenizer=Letters(),
        output_ids=list(output_ids),
        smc_state=state,
        finished_reason=None,
        finished_len=None,
    )
    req.finished = lambda: req.finished_reason is not None
    StopTexts.begin(req)  # type: ignore[arg-type]
    return req


def test_only_requests_with_stop_texts_are_looked_at() -> None:
    assert not StopTexts.applies(make_req())
    assert StopTexts.applies(make_req(("x",)))
    assert StopTexts.applies(make_req(regex="x"))


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


def population(
    tails: list[list[list[int]]], last_emitted: list[list[int]] | None = None
) -> Population:
    """Populations with given tails; stale tokens behind them would complete a match."""
    return population_of(tails, last_emitted, stale=OP, width=8)


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


@pytest.mark.parametrize(("open_token_at", "expected"), [(1, [[1], [0]]), (None, [[0], [0]])])
def test_a_particle_reads_its_own_first_token_while_it_is_open(
    open_token_at: int | None, expected: list[list[int]]
) -> None:
    """What stands in its place in the request's output is another particle's, or nobody's."""
    req = make_req(("STOP",), output_ids=(A, C))
    req.smc_state.open_token.begin(open_token_at)
    tails = population([[[], []]], [[ST, A]])
    assert ends_of([req], [[[OP], [OP]]], tails) == [expected]


def judged(req: Any, *tokens: int) -> tuple[str | None, int | None]:
    """How a request ends, if it does, once it has put out these tokens."""
    req.output_ids.extend(tokens)
    StopTexts.judge(req)
    reason = req.finished_reason
    return reason and reason.matched, req.finished_len


def test_sglang_has_no_pattern_to_search_for_and_the_request_ends_all_the_same() -> None:
    req = make_req(regex="b+c")
    assert req.sampling_params.stop_regex_strs == [] and StopTexts.applies(req)
    assert req.sampling_params.stop_regex_max_len == 0
    assert judged(req, A, B) == (None, None)
    assert judged(req, B, C, A, B, C) == ("b+c", 4)


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
def test_the_first_end_of_a_text_is_the_one_that_counts(
    reason: Any, length: int | None, expected: Any
) -> None:
    req = make_req(regex="b")
    req.finished_reason, req.finished_len = reason, length
    StopTexts.judge(req)
    req.output_ids.extend([A, A, B, C])
    StopTexts.judge(req)
    assert getattr(req.finished_reason, "matched", None) == expected


def test_a_long_text_is_not_read_again() -> None:
    """Red where work a round grows with the text: here it was decoded 360 times over."""
    req = make_req(regex=r"(a+)+c", output_ids=(A,) * 5000)
    StopTexts.judge(req)
    before = req.tokenizer.num_decoded
    for _ in range(40):
        assert first_match(req, [A, B], [A] * 8 + [B]) is None
    assert req.tokenizer.num_decoded - before < 40 * 12 * 3 * CONTEXT
