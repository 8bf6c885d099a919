"""Who is told that its logits mean nothing, and that nobody else is touched by it."""

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edit_cases import Echo
from hostile import HOSTILE
from populations import outcome_of
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from toy_request import begun

from sglang_smc.round.result import SMCBatchResult
from sglang_smc.rules import registry
from sglang_smc.rules.processors import Loaded, Processors
from sglang_smc.rules.registry import TextRules
from sglang_smc.smc import steps
from sglang_smc.smc.deciding import Drafts
from sglang_smc.state import failures
from sglang_smc.state.failures import Failure
from sglang_smc.state.metrics import Monitor

NAN = float("nan")
INF = float("inf")


def request(output_ids: tuple[int, ...] = (), **fields: Any) -> Any:
    req = begun({}, output_ids)
    vars(req).update({"return_logprob": True, **fields})
    return req


def test_an_ended_request_has_status_plain_text_and_no_kv(caplog: pytest.LogCaptureFixture) -> None:
    req = request(rid=f"a{HOSTILE}")
    failures.end_request(req, f"The potential says {HOSTILE}.", HTTPStatus.BAD_REQUEST)
    shown = r"\x1b]52;c;AA==\x07\n"
    message = f"The potential says {req.to_finish.message.split('says ')[1]}"
    told = {"type": "abort", "message": message, "status_code": 400, "err_type": "SMCError"}
    assert req.to_finish.to_json() == told
    assert all(text.isprintable() and shown in text for text in (caplog.messages[0], message))
    assert req.skip_radix_cache_insert


@pytest.mark.parametrize(("to_finish", "done"), [("abort", False), (None, True)])
def test_who_ends_anyway_ends_as_it_would(to_finish: str | None, done: bool) -> None:
    req = request(to_finish=to_finish, finished=lambda: done)
    failures.end_request(req, "late", HTTPStatus.BAD_REQUEST)
    assert req.to_finish == to_finish


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"min_new_tokens": 3, "stop_token_ids": {0, 1, 2}}, 400),  # and the model's, 3
        ({"min_new_tokens": 3, "stop_token_ids": {0, 1}}, 500),
        ({"min_new_tokens": 0, "stop_token_ids": {0, 1, 2}}, 500),
    ],
)
def test_requests_that_forbid_all_tokens_are_told_so(changes: dict[str, Any], status: int) -> None:
    """And no model is to blame."""
    req = request(vocab_size=4, tokenizer=None, eos_token_ids={3})
    vars(req.sampling_params).update(changes)
    assert failures.end_failed(req, Failure.TARGET_LOGITS) is (status == 500)
    assert req.to_finish.status_code == status
    assert ("forbids all tokens: each would end" in req.to_finish.message) is (status == 400)


def test_a_mark_stands_for_the_first_token_and_goes_with_it() -> None:
    tokens = failures.mark_first(torch.tensor([7, 0, 9]), torch.tensor([0, 2, 0]))
    assert tokens.tolist() == [7, -2, 9]
    marked = request((5, -2))
    assert failures.take_mark(marked) == Failure.DRAFT_LOGITS
    assert marked.output_ids == [5]
    assert not marked.return_logprob
    for whole in (request((5, 0)), request()):
        before = list(whole.output_ids)
        assert failures.take_mark(whole) == 0
        assert whole.output_ids == before


@pytest.mark.parametrize("broken", [[NAN, 0.0], [INF, 0.0], [-INF, -INF]])
def test_first_tokens(broken: list[float]) -> None:
    good = [0.5, -INF]
    target = torch.tensor([good, broken, good, broken]).log_softmax(1)
    draft = torch.tensor([good, good, broken, broken])
    assert failures.failure_of_first(target, draft).tolist() == [0, 1, 2, 1]


def test_only_laws_that_a_text_asks_for_matter() -> None:
    """Two particles, two columns: the first ends with its first token, the second goes on."""
    up_to_end = torch.tensor([[[True, False], [True, True]]])
    ends = torch.tensor([[[True, False], [False, False]]])
    live = torch.tensor([[True, True]])

    def code(target: tuple[int, int] | None, draft: tuple[int, int] | None) -> int:
        log_p = torch.zeros(1, 2, 3)
        log_q = torch.zeros(1, 2, 2)
        for scores, place in ((log_p, target), (log_q, draft)):
            if place is not None:
                scores[0, place[0], place[1]] = NAN
        drafts = Drafts(up_to_end.long(), log_q, ends, up_to_end, None)
        return int(steps.failure_of_round(log_p, drafts, live))

    asked = {(0, 0), (1, 0), (1, 1), (1, 2)}
    every = [(n, column) for n in (0, 1) for column in (0, 1, 2)]
    assert {place for place in every if code(place, None) == Failure.TARGET_LOGITS} == asked
    drafted = {place for place in every if place[1] < 2 and code(None, place)}
    assert drafted == {(0, 0), (1, 0), (1, 1)}
    assert code((1, 1), (1, 1)) == Failure.TARGET_LOGITS
    lost = torch.full((1, 2, 3), NAN)
    closed = up_to_end & False
    drafts = Drafts(up_to_end.long(), lost[:, :, :2], ends, closed, None)
    assert int(steps.failure_of_round(lost, drafts, live & False)) == 0


def test_the_books_end_a_request_by_its_code_and_no_other() -> None:
    reqs = [request(), request(), request(is_retracted=True)]  # the last one's results mean nothing
    outcome = outcome_of(3, failure=torch.tensor([0, 2, 1]))
    result = SMCBatchResult.of(outcome, monitor=Monitor(100), budgets=[])
    result.resolve(SimpleNamespace(reqs=reqs), lambda: [[], [], []])  # type: ignore[arg-type]
    assert [req.to_finish is not None for req in reqs] == [False, True, False]
    assert "draft model's logits" in reqs[1].to_finish.message


NOTHING = torch.empty(2, 1, 0, dtype=torch.int64)  # drafted by two requests of a particle each


class Gives(CustomLogitProcessor):
    """Replaces all logits behind so many tokens of output."""

    def __init__(self, value: float, num_tokens: int = 0) -> None:
        self.value = value
        self.num_tokens = num_tokens

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            if len(params["__req__"].output_ids) >= self.num_tokens:
                row.fill_(self.value)
        return logits


@pytest.mark.parametrize(
    ("value", "given", "status"),
    [
        (NAN, 0.0, 400),
        (-INF, 0.0, 400),
        (INF, 0.0, 400),
        (-INF, NAN, 500),  # the model's own
        (3.0, 0.0, 500),  # it leaves all tokens
    ],
)
def test_a_processor_that_leaves_no_token_is_to_blame_and_no_model(
    value: float, given: float, status: int
) -> None:
    """Red if a client is told of broken weights, or of its own processor where weights are."""
    req, other = (begun({}, [1], custom_params={}) for _ in range(2))
    for one, own in ((req, Gives(value)), (other, Echo())):
        one.custom_logit_processor = "there"
        one.smc_state.kept[Processors] = Loaded(own)
    TextRules.begin([req, other], 4, "cpu").apply(torch.full((2, 1, 1, 4), given), NOTHING, 0)
    assert registry.end_failed(req, 0) is False and req.to_finish is None  # no token was missed
    for one, of in ((req, status), (other, 500)):
        assert registry.end_failed(one, Failure.TARGET_LOGITS) is (of == 500)
        assert one.to_finish.status_code == of
        named = "processor Gives leaves no token to draw" in one.to_finish.message
        assert named is (of == 400)


def test_a_processor_answers_for_the_last_round_alone() -> None:
    req = begun({}, [1], custom_params={}, custom_logit_processor="there")
    req.smc_state.kept[Processors] = Loaded(Gives(NAN))
    TextRules.begin([req], 4, "cpu").apply(torch.zeros(1, 1, 1, 4), NOTHING, 0)
    req.smc_state.kept[Processors].processor = Echo()
    TextRules.begin([req], 4, "cpu").apply(torch.zeros(1, 1, 1, 4), NOTHING, 0)
    assert registry.end_failed(req, Failure.TARGET_LOGITS)


def test_a_processor_that_fails_ends_its_own_request_alone() -> None:
    broken, other = (begun({}, [1], custom_params={}) for _ in range(2))
    for req, own in ((broken, DisallowedTokensLogitsProcessor()), (other, Echo())):
        req.custom_logit_processor = "there"
        req.smc_state.kept[Processors] = Loaded(own)
    logits = torch.zeros(2, 1, 1, 4)
    found, _ = TextRules.begin([broken, other], 4, "cpu").apply(logits, NOTHING, 0)
    assert "custom logit processor raised" in broken.to_finish.message
    assert broken.to_finish.status_code == 400 and other.to_finish is None
    assert found[:, 0, 0].tolist() == [[0.0] * 4, [1.5, 0.0, 0.0, 0.0]]
