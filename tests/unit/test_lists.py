"""Whose answers a list keeps when one of its items fails, by SGLang's own collection of them."""

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException, Request
from finish_reasons import OWN, PRODUCERS
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_smc.patches.ingress import keep_error
from sglang_smc.server import lists
from sglang_smc.state.failures import ERROR_TYPE, is_own

MANAGER: Any = SimpleNamespace(
    rid_to_state={}, enable_lora=False, _release_lora_once=lambda _: None
)
STATE = SimpleNamespace(obj=SimpleNamespace(rid="a"))


def answer(status: int | None = None, kind: str = ERROR_TYPE) -> dict[str, Any]:
    """An item's answer; with a status it has failed."""
    told = {"type": "abort", "message": "why", "status_code": status, "err_type": kind}
    return {"meta_info": {"finish_reason": {"type": "length"} if status is None else told}}


async def responses(out: dict[str, Any]) -> AsyncGenerator[Any]:
    abort = TokenizerManager._handle_abort_finish_reason
    yield await keep_error(abort, MANAGER, out, STATE, False) or out


async def listed(*outs: dict[str, Any]) -> AsyncGenerator[Any]:
    yield await TokenizerManager._collect_batch_responses(MANAGER, [*map(responses, outs)])


def first(answers: AsyncGenerator[Any]) -> Any:
    async def take() -> Any:
        return await anext(answers)

    return asyncio.run(take())


async def stock(out: dict[str, Any]) -> AsyncGenerator[Any]:
    """As SGLang answers without our hook."""
    abort = TokenizerManager._handle_abort_finish_reason
    yield await abort(MANAGER, out, STATE, False) or out


def outcome(answers: AsyncGenerator[Any]) -> Any:
    """An answer, or the status and the message of an error."""
    try:
        return first(answers)
    except HTTPException as error:
        return error.status_code, error.detail
    except ValueError as error:
        return HTTPStatus.BAD_REQUEST, str(error)


def test_an_item_that_smc_ends_fails_alone() -> None:
    items = answer(400), answer(), answer(500)
    assert first(lists.whole_or_each(listed(*items))) == [*items]
    assert first(lists.whole_or_each(responses(answer()))) == answer()


@pytest.mark.parametrize(
    "answers",
    [
        lambda: lists.whole_or_each(listed(answer(400), answer(500))),
        lambda: lists.whole_or_each(responses(answer(400))),
        lambda: lists.whole_or_each(listed(answer(400, "BadRequestError"), answer())),
        lambda: listed(answer(400), answer()),
    ],
    ids=["all fail", "single", "of SGLang", "on another route"],
)
def test_an_error_of_the_whole(answers: Any) -> None:
    with pytest.raises(ValueError, match="why"):
        first(answers())


def test_an_error_keeps_its_status() -> None:
    with pytest.raises(HTTPException) as raised:
        first(lists.whole_or_each(listed(answer(503), answer(400))))
    assert raised.value.status_code == 503


@pytest.mark.parametrize(
    ("path", "shows"),
    [("/generate", True), ("/v1/completions", False), ("/v1/score", False)],
)
def test_routes_that_show_how_each_item_ends(path: str, shows: bool) -> None:
    assert lists.shows_each(Request({"type": "http", "path": path, "headers": []})) == shows
    assert lists.shows_each(None)


@pytest.mark.parametrize("status", [400, 503])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_an_abort_of_sglang_is_told_as_without_us(producer: str, status: int) -> None:
    """Red if a key is read that some of its producers leave out: HTTP 500 on an overloaded server.

    Alone, and in a list, whose other answers SGLang drops.
    """
    record = dict(PRODUCERS[producer])
    if "status_code" in record:
        record["status_code"] = status
    out = {"meta_info": {"finish_reason": record}}
    told = outcome(stock(out))
    assert outcome(lists.whole_or_each(responses(out))) == told
    wanted = told if "status_code" in record else [answer(), told]
    assert outcome(lists.whole_or_each(listed(answer(), out))) == wanted


def test_what_is_our_own_is_told_by_its_record() -> None:
    assert is_own(OWN)
    assert not any(map(is_own, (*PRODUCERS.values(), {"type": "stop", "matched": 3})))
