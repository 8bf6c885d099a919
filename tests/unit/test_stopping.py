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


def mark_stop_texts(
    ends: torch.Tensor, reqs: list[Any], tokens: torch.Tensor, population: Population | None = None
) -> torch.Tensor:
    return StopTexts.of(BatchTexts(reqs, population, 8, "cpu")).ends(ends, tokens, population)


A, B, C, ST, OP, STOP, SPACE, SEVEN, HALF, OTHER_HALF = range(10)


def make_req(
    *stops: str, regex: str | None = None, span: int = 2, output_ids: tuple[int, ...] = ()
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
    assert StopTexts.applies(make_req("x"))
    assert StopTexts.applies(make_req(regex="x"))


@pytest.mark.parametrize(
    ("emitted", "tail", "new", "expected"),
    [
        ([A], [B], [A, STOP, C], 1),  # inside one token
        ([A], [B], [A, ST, OP, C], 2),  # across two new tokens: it ends with the second
        ([A], [B, ST], [OP, A], 0),  # begins in the tail
        ([A, ST], [], [OP, A], 0),  # begins in the emitted text
        ([ST], [OP], [A, A], None),  # between emitted text and tail: matched long ago, not now
        ([A], [ST], [A, OP], None),  # not in a row
        ([A], [], [ST, ST, OP], 2),
        ([A], [B], [OP, ST], None),  # the wrong way round
        ([], [], [STOP], 0),
        ([A], [], [STOP, STOP], 0),  # the first counts
        ([A], [B], [], None),
    ],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(
    emitted: list[int], tail: list[int], new: list[int], expected: int | None
) -> None:
    req = make_req("STOP", span=1, output_ids=tuple(emitted))
    assert first_match(req, tail, new) == expected


def test_a_match_reaches_back_over_tail_and_emitted_text() -> None:
    req = make_req("abcabc", span=6, output_ids=(B, A, B))
    assert first_match(req, [C, A], [B, C, A]) == 1


def test_the_first_of_several_stop_strings_ends_the_text() -> None:
    assert first_match(make_req("cc", "ab", span=2), [], [C, A, B, C, C]) == 2


def test_a_stop_pattern_matches_across_the_border_of_the_tail() -> None:
    req = make_req(regex=r"a\d+ b", span=6, output_ids=(C, A))
    assert first_match(req, [SEVEN], [SEVEN, SPACE, B, C]) == 2
    assert first_match(req, [SPACE], [SEVEN, SPACE, B]) is None


def test_strings_and_patterns_together() -> None:
    req = make_req("STOP", regex=r"\d", span=2)
    assert first_match(req, [], [A, SEVEN, STOP]) == 1
    assert first_match(req, [], [STOP, SEVEN]) == 0


def population(
    tails: list[list[list[int]]], last_emitted: list[list[int]] | None = None
) -> Population:
    """Populations with given tails; stale tokens behind them would complete a match."""
    return population_of(tails, last_emitted, stale=OP, width=8)


def test_each_particle_is_marked_by_its_own_lineage_and_each_request_by_its_own_texts() -> None:
    reqs = [make_req("STOP"), make_req(), make_req("ab")]
    tails = population([[[ST], [A]], [[ST], [A]], [[ST], [A]]])
    tokens = torch.tensor([[[OP, A], [OP, B]]] * 3)
    ends = torch.zeros(3, 2, 2, dtype=torch.bool)
    ends[0, 1, 1] = True  # an end that is already known stays
    found = mark_stop_texts(ends, reqs, tokens, tails)
    assert found.int().tolist() == [
        [[1, 0], [0, 1]],
        [[0, 0], [0, 0]],
        [[0, 0], [0, 0]],
    ]
    again = mark_stop_texts(ends, reqs, torch.tensor([[[B, A], [B, B]]] * 3), tails)
    assert again[2].int().tolist() == [[0, 0], [1, 0]]
    assert ends.sum() == 1, "the argument is left as it was"


def test_tokens_behind_the_end_of_a_tail_are_not_read() -> None:
    found = mark_stop_texts(
        torch.zeros(1, 2, 1, dtype=torch.bool),
        [make_req("STOPa")],
        torch.tensor([[[A], [A]]]),
        population([[[ST], [ST, OP]]]),
    )
    assert found.tolist() == [[[False], [True]]]


def test_first_tokens_that_prefill_drew_stand_right_behind_the_emitted_text() -> None:
    tokens = torch.tensor([[[OP], [A]]])
    nothing = torch.zeros(1, 2, 1, dtype=torch.bool)
    found = mark_stop_texts(nothing, [make_req("STOP", output_ids=(A, ST))], tokens)
    assert found.tolist() == [[[True], [False]]]


@pytest.mark.parametrize(
    ("open_token_at", "expected"), [(1, [True, False]), (None, [False, False])]
)
def test_a_particle_reads_its_own_first_token_while_it_is_open(
    open_token_at: int | None, expected: list[bool]
) -> None:
    """What stands in its place in the request's output is another particle's, or nobody's."""
    req = make_req("STOP", output_ids=(A, C))
    req.smc_state.open_token.begin(open_token_at)
    tails = population([[[], []]], [[ST, A]])
    nothing = torch.zeros(1, 2, 1, dtype=torch.bool)
    found = mark_stop_texts(nothing, [req], torch.tensor([[[OP], [OP]]]), tails)
    assert found[0, :, 0].tolist() == expected


def test_half_a_character_is_read_with_its_other_half() -> None:
    req = make_req(regex="a§b", output_ids=(A, HALF))
    assert first_match(req, [OTHER_HALF], [B]) == 0
    assert first_match(req, [], [OTHER_HALF, B]) == 1
    assert first_match(req, [], [B]) is None


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
    ],
)
def test_the_first_end_of_a_text_is_the_one_that_counts(
    reason: Any, length: int, expected: Any
) -> None:
    req = make_req(regex="b")
    req.finished_reason, req.finished_len = reason, length
    StopTexts.judge(req)
    req.output_ids.extend([A, A, B, C])
    StopTexts.judge(req)
    assert getattr(req.finished_reason, "matched", None) == expected


def test_an_abort_stays_one() -> None:
    req = make_req(regex="b")
    req.finished_reason = FINISH_ABORT("gone")
    req.output_ids.append(B)
    StopTexts.judge(req)
    assert isinstance(req.finished_reason, FINISH_ABORT)


def test_a_long_text_is_not_read_again() -> None:
    """Red where work a round grows with the text: here it was decoded 360 times over."""
    req = make_req(regex=r"(a+)+c", output_ids=(A,) * 5000)
    StopTexts.judge(req)
    before = req.tokenizer.num_decoded
    for _ in range(40):
        assert first_match(req, [A, B], [A] * 8 + [B]) is None
    assert req.tokenizer.num_decoded - before < 40 * 12 * 3 * CONTEXT
