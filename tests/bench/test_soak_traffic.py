"""The soak's clients: what they ask for, how they leave, and what they make of what they get."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import soak.clients as clients
from soak import legs
from soak.answers import Ending, ending
from soak.clients import Clients
from soak.grammars import GRAMMARS
from soak.traffic import (
    MAX_LAG,
    NUM_PARTICLES,
    NUM_STEPS,
    SMC,
    URGENT,
    VOCAB,
    WAYS,
    Request,
    requests,
)

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

TRAFFIC = list(itertools.islice(requests(0, 0.4, 0.02), 2000))
SERVER = SMCConfig(num_particles=NUM_PARTICLES, num_steps=NUM_STEPS, max_lag=MAX_LAG)
PARAMS = {"max_new_tokens": 3, "min_new_tokens": 2, "sampling_seed": 70}
TOLD = {"return_logprob": True, "top_logprobs_num": 2}


def request(**fields: Any) -> Request:
    return replace(Request("soak-000007", [4, 5], PARAMS), **fields)


def answer(ids: list[int], reason: str | None = "stop", **info: Any) -> dict[str, Any]:
    finish = None if reason is None else {"type": reason}
    return {
        "text": "#### 77",
        "output_ids": ids,
        "meta_info": {"finish_reason": finish, "num_retractions": 0, **info},
    }


def told(ids: list[int], width: int = 2) -> dict[str, Any]:
    """Log-probabilities of these tokens, as SGLang gives them."""
    return {
        "output_token_logprobs": [[-1.5, token, None] for token in ids],
        "output_top_logprobs": [[[-1.0, 9, None]] * width for _ in ids],
    }


def queued(ids: list[int]) -> dict[str, Any]:
    """What SGLang sends of a request that is aborted in the queue."""
    return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": {"type": "abort"}}}


def test_traffic_has_everything() -> None:
    assert {json.dumps(r.params["custom_params"]["smc"]) for r in TRAFFIC} == {
        json.dumps(choice) for choice in SMC
    }
    used = {name for r in TRAFFIC for name in (*r.params, *r.options)}
    assert used >= {
        *("top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "logit_bias", "stop", "stop_regex", "stop_token_ids"),
        *("regex", "json_schema", "return_logprob", "top_logprobs_num", "token_ids_logprob"),
    }
    assert len({(r.n, r.stream, r.leaves) for r in TRAFFIC}) == 2 * 2 * (len(WAYS) + 1)
    assert {r.options["priority"] for r in TRAFFIC} == {0, URGENT}
    leaving = sum(r.leaves is not None for r in TRAFFIC) / len(TRAFFIC)
    assert leaving == pytest.approx(0.4, abs=0.04)


def test_the_server_takes_all_of_it() -> None:
    for r in TRAFFIC:
        request_config(SERVER, r.params["custom_params"], constrained=r.grammar is not None)
        assert all(0 <= token < VOCAB for token in r.prompt)
        assert r.params["min_new_tokens"] <= r.params["max_new_tokens"]


def test_an_answer_alone_has_its_own_seed() -> None:
    both = request(n=2, stream=True, options={"priority": 5})
    assert both.body["sampling_params"] == {**PARAMS, "n": 2}
    assert both.body["stream"] is True
    alone = both.alone(1)
    assert alone["sampling_params"] == {**PARAMS, "sampling_seed": 71}
    assert "stream" not in alone
    assert alone["priority"] == 5


@pytest.mark.parametrize(
    ("fields", "came", "says"),
    [
        ({}, answer([1, 2, 3], "length"), ""),
        ({}, answer([1, 2]), ""),
        ({}, answer([1, 2], "length"), "has 2 tokens of 3 and ended with length"),
        ({}, answer([1]), "at least 2 were asked for"),
        ({}, answer([1, 2], "abort"), "ended with {'type': 'abort'}"),
        ({"leaves": "abort"}, answer([1], "abort"), ""),
        ({"leaves": "disconnect"}, answer([1], "abort"), "ended with"),
        ({}, answer([1, 2], None), "ended with None"),
        ({"grammar": GRAMMARS[0]}, answer([1, 2]), ""),
        ({"grammar": GRAMMARS[1]}, answer([1, 2]), "illegal text '#### 77'"),
        ({"grammar": GRAMMARS[1]}, answer([1, 2, 3], "length"), ""),
        ({"options": TOLD}, answer([1, 2], **told([1, 2])), ""),
        ({"options": TOLD}, answer([1, 2], **told([1, 3])), "has log-probabilities of [1, 3]"),
        ({"options": TOLD}, answer([1, 2], **told([1, 2], 1)), "has [1, 1] output_top_logprobs"),
    ],
)
def test_what_is_wrong_with_an_answer(
    fields: dict[str, Any], came: dict[str, Any], says: str
) -> None:
    found = ending(request(**fields), 0, came)
    assert says in found.problem
    assert bool(found.problem) == bool(says)
    assert found.is_verifiable == (not says)


def test_a_retracted_text_is_drawn_anew() -> None:
    """So that what came before is all that its seed gives, and a stream alone tells it."""
    assert not ending(request(), 0, answer([1, 2], num_retractions=1)).is_verifiable
    said = [answer([1], None), answer([1, 2], None, num_retractions=1), answer([1, 2, 3], "length")]
    said[-1]["meta_info"]["num_retractions"] = 1
    (found,), _ = asked(request(stream=True), stream_of(*said))
    assert (found.output_ids, found.seeded) == ([1, 2, 3], [1])
    assert found.is_verifiable and not found.is_whole
    # SGLang does not say so of one that is aborted while it waits to go on.
    waited = ending(request(leaves="abort"), 0, queued([1]))
    assert (waited.retractions, waited.is_verifiable, waited.problem) == (1, False, "")
    assert ending(request(leaves="abort"), 0, queued([])).retractions == 0


def asked(
    one: Request, reply: Callable[[httpx.Request], httpx.Response]
) -> tuple[list[Ending], list[str]]:
    """What a client makes of a server's replies, and the routes that it used."""
    routes: list[str] = []

    def handle(got: httpx.Request) -> httpx.Response:
        routes.append(got.url.path)
        return httpx.Response(200) if got.url.path == "/abort_request" else reply(got)

    async def run() -> list[Ending]:
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await clients.serve(client, one)

    return asyncio.run(run()), routes


def json_of(content: Any, status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, json=content)


def stream_of(*chunks: dict[str, Any]) -> Callable[[httpx.Request], httpx.Response]:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return lambda _: httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


@pytest.mark.parametrize(
    ("one", "reply", "says"),
    [
        (request(), json_of("no", 500), 'HTTP 500: "no"'),
        (request(), json_of({"text": ""}), "cannot be read: KeyError"),
        (request(n=2), json_of([answer([1, 2])]), "1 answers of 2"),
        (request(), json_of({}, 499), "HTTP 499"),
        (request(stream=True), stream_of(), "without a chunk of [0]"),
        (request(stream=True, n=2), stream_of(answer([1, 2])), "without a chunk of [1]"),
        (request(stream=True), stream_of({"error": {"message": "dead"}}), "dead"),
        (
            request(stream=True),
            stream_of(answer([1, 2], None), answer([1, 3, 4], "length")),
            "a stream said [1, 2] and then [1, 3, 4]",
        ),
    ],
)
def test_a_lost_answer(one: Request, reply: Callable[..., httpx.Response], says: str) -> None:
    found, _ = asked(one, reply)
    assert any(says in e.problem for e in found), found


def test_leaving_a_stream() -> None:
    chunks = [answer([1], None), answer([1, 2], None), answer([1, 2, 3], "length")]
    left = request(stream=True, leaves="disconnect", at_chunk=2)
    (found,), routes = asked(left, stream_of(*chunks))
    assert (found.reason, found.output_ids, found.problem) == ("left", [1, 2], "")
    assert routes == ["/generate"]
    aborted = replace(left, leaves="abort")
    (found,), routes = asked(aborted, stream_of(*chunks[:2], answer([1, 2], "abort")))
    assert (found.reason, found.output_ids, found.problem) == ("abort", [1, 2], "")
    assert routes == ["/generate", "/abort_request"]
    # Aborted in the queue, behind a retraction: SGLang sends the last token alone.
    (found,), _ = asked(aborted, stream_of(*chunks[:2], queued([2])))
    assert (found.reason, found.output_ids, found.retractions) == ("abort", [1, 2], 1)
    # The client is gone before the stream's end, although its chunk never came.
    late = replace(left, at_chunk=9)
    (found,), _ = asked(late, stream_of(*chunks))
    assert (found.reason, found.output_ids) == ("length", [1, 2, 3])
    never = replace(aborted, n=2)
    assert [e.reason for e in asked(replace(never, stream=False), json_of({}, 499))[0]] == [
        "abort",
        "abort",
    ]


def test_leaving_before_anything_has_come() -> None:
    """Also a stream; half of a request never becomes one."""
    chunks = [answer([1], None), answer([1, 2, 3], "length")]
    unheard = request(stream=True, leaves="unheard", after=0.0, n=2)
    found, routes = asked(unheard, stream_of(*chunks))
    assert [(e.reason, e.output_ids, e.problem) for e in found] == [("left", [], "")] * 2
    assert set(routes) <= {"/generate"}
    (found,), routes = asked(request(leaves="half"), stream_of(*chunks))
    assert (found.reason, found.problem, routes) == ("left", "", [])


def test_a_server_that_is_gone_gets_no_more_requests() -> None:
    """Nobody listens there; else this would go on for its hundred seconds."""
    found: list[Ending] = []
    crowd = Clients("http://127.0.0.1:9", 4, found.extend)
    asyncio.run(crowd.run(requests(0, 0.0, 0.001), 100.0, lambda: None))
    assert found and all("ConnectError" in e.problem for e in found)
    again = asyncio.run(crowd.alone([Ending(request(), 1, "stop", [1])], lambda: None))
    assert [(e.name, e.problem[:12]) for e in again] == [("soak-000007[1]", "ConnectError")]


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A server whose flushes succeed, and whose load is what the test says."""
    load = {"num_used_tokens": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}
    flushed = httpx.Response(200)
    monkeypatch.setattr(legs, "REST", 0.05)
    monkeypatch.setattr(legs.httpx, "post", lambda *_, **__: flushed)
    monkeypatch.setattr(
        legs.httpx, "get", lambda *_, **__: httpx.Response(200, json={"loads": [load]})
    )
    yield load


def test_rest(resting: dict[str, Any]) -> None:
    assert legs.at_rest("http://server") == []
    resting["num_used_tokens"] = 3
    (lost,) = legs.at_rest("http://server")
    assert "num_used_tokens is 3" in lost


def test_a_dead_server_is_no_rest() -> None:
    assert legs.at_rest("http://127.0.0.1:9") == ["the server is gone: ConnectError"]
