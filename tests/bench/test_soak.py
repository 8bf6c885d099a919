"""The soak: what its clients ask, how they leave, what they make of it, and the verdict."""

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from soak import clients, traffic
from soak import run as soak
from soak.clients import Ending, ending, failed
from soak.verdict import GROWTH_BYTES, GROWTH_FDS, GROWTH_THREADS, Held, SoakVerdict, judge

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

TRAFFIC = list(itertools.islice(traffic.requests(0, 0.4, 0.02), 2000))
SERVER = SMCConfig(
    num_particles=traffic.NUM_PARTICLES, num_steps=traffic.NUM_STEPS, max_lag=traffic.MAX_LAG
)
PARAMS = {"max_new_tokens": 3, "min_new_tokens": 2, "sampling_seed": 70}
TOLD = {"return_logprob": True, "top_logprobs_num": 2}


def request(**fields: Any) -> traffic.SoakRequest:
    return replace(traffic.SoakRequest("soak-000007", [4, 5], PARAMS), **fields)


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


def test_traffic_has_everything_and_the_server_takes_it() -> None:
    asked = {json.dumps(r.params["custom_params"]["smc"]) for r in TRAFFIC}
    assert asked == {json.dumps(choice) for choice in traffic.SMC}
    used = {name for r in TRAFFIC for name in (*r.params, *r.options)}
    assert used >= {
        *("top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "logit_bias", "stop", "stop_regex", "stop_token_ids"),
        *("regex", "json_schema", "return_logprob", "top_logprobs_num", "token_ids_logprob"),
    }
    assert len({(r.n, r.stream, r.leaves) for r in TRAFFIC}) == 2 * 2 * (len(traffic.WAYS) + 1)
    assert {r.options["priority"] for r in TRAFFIC} == {0, traffic.URGENT}
    leaving = sum(r.leaves is not None for r in TRAFFIC) / len(TRAFFIC)
    assert leaving == pytest.approx(0.4, abs=0.04)
    for r in TRAFFIC:
        request_config(SERVER, r.params["custom_params"], constrained=r.grammar is not None)
        assert all(0 <= token < traffic.VOCAB for token in r.prompt)
        assert r.params["min_new_tokens"] <= r.params["max_new_tokens"]


def test_an_answer_alone_has_its_own_seed() -> None:
    both = request(n=2, stream=True, options={"priority": 5})
    assert (both.body["sampling_params"], both.body["stream"]) == ({**PARAMS, "n": 2}, True)
    alone = both.alone(1).body
    assert alone["sampling_params"] == {**PARAMS, "sampling_seed": 71, "n": 1}
    assert not alone["stream"] and alone["priority"] == 5


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
        ({"grammar": traffic.GRAMMARS[0]}, answer([1, 2]), ""),
        ({"grammar": traffic.GRAMMARS[1]}, answer([1, 2]), "illegal text '#### 77'"),
        ({"grammar": traffic.GRAMMARS[1]}, answer([1, 2, 3], "length"), ""),
        ({"options": TOLD}, answer([1, 2], **told([1, 2])), ""),
        ({"options": TOLD}, answer([1, 2], **told([1, 3])), "has log-probabilities of [1, 3]"),
        ({"options": TOLD}, answer([1, 2], **told([1, 2], 1)), "has [1, 1] output_top_logprobs"),
    ],
)
def test_faults_of_an_answer(fields: dict[str, Any], came: dict[str, Any], says: str) -> None:
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


Reply = Callable[[httpx.Request], httpx.Response]


def asked(one: traffic.SoakRequest, reply: Reply) -> tuple[list[Ending], list[str]]:
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


def json_of(content: Any, status: int = 200) -> Reply:
    return lambda _: httpx.Response(status, json=content)


def stream_of(*chunks: dict[str, Any]) -> Reply:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return lambda _: httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


@pytest.mark.parametrize(
    ("one", "reply", "says"),
    [
        (request(), json_of("no", 500), 'HTTP 500: "no"'),
        (request(), json_of({"text": ""}), "cannot be read: KeyError"),
        (request(n=2), json_of([answer([1, 2])]), "no answer of [1]"),
        (request(), json_of({}, 499), "HTTP 499"),
        (request(leaves="abort"), json_of("no", 400), 'HTTP 400: "no"'),
        (request(stream=True), stream_of(), "no answer of [0]"),
        (request(stream=True, n=2), stream_of(answer([1, 2])), "no answer of [1]"),
        (request(stream=True), stream_of({"error": {"message": "dead"}}), "dead"),
        (
            request(stream=True),
            stream_of(answer([1, 2], None), answer([1, 3, 4], "length")),
            "a stream said [1, 2] and then [1, 3, 4]",
        ),
    ],
)
def test_a_lost_answer(one: traffic.SoakRequest, reply: Reply, says: str) -> None:
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
    never = replace(aborted, n=2, stream=False)
    compiling = {"error": {"message": "Aborted by AbortReq."}}
    for reply in (json_of({}, 499), json_of(compiling, 400)):
        assert [e.reason for e in asked(never, reply)[0]] == ["abort", "abort"]


def test_leaving_before_anything_has_come() -> None:
    """Also a stream; half of a request never becomes one."""
    chunks = [answer([1], None), answer([1, 2, 3], "length")]
    unheard = request(stream=True, leaves="unheard", after=0.0, n=2)
    found, routes = asked(unheard, stream_of(*chunks))
    assert [(e.reason, e.output_ids, e.problem) for e in found] == [("left", [], "")] * 2
    assert set(routes) <= {"/generate"}
    (found,), routes = asked(request(leaves="half"), stream_of(*chunks))
    assert (found.reason, found.problem, routes) == ("left", "", [])


def test_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server whose flushes succeed, and of one that is gone."""
    assert soak.at_rest("http://127.0.0.1:9") == ["the server is gone: ConnectError"]
    load = {"num_used_tokens": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}
    told = {
        "post": lambda: httpx.Response(200),
        "get": lambda: httpx.Response(200, json=loads, request=httpx.Request("GET", "http://x")),
    }
    loads = {"loads": [load]}
    clock = SimpleNamespace(monotonic=itertools.count(0, 40).__next__, sleep=lambda _: None)
    monkeypatch.setattr(soak, "time", clock)
    for name, answer in told.items():
        monkeypatch.setattr(soak.httpx, name, lambda *_, answer=answer, **__: answer())
    assert soak.at_rest("http://server") == []
    load["num_used_tokens"] = 3
    (lost,) = soak.at_rest("http://server")
    assert "num_used_tokens is 3" in lost


MIB = 1 << 20


def numbered(number: int) -> traffic.SoakRequest:
    return traffic.SoakRequest(f"soak-{number:06}", [4, 5], {"sampling_seed": 10 * number})


def ended(number: int, ids: list[int], reason: str = "stop", **fields: Any) -> Ending:
    return Ending(numbered(number), 0, reason, ids, **fields)


# A server that did all it must: one answer was retracted, one client left, all are asked again.
# What was drawn behind the retraction is another text, with other log-probabilities.
ENDINGS = [
    ended(0, [7, 8], logprobs=[-0.5, -2.0]),
    ended(1, [7, 8, 9], retractions=1, undisturbed=[7, 8], logprobs=[-0.5, -2.0, -1.0]),
    ended(2, [6], "left"),
]
ALONE = [
    ended(0, [7, 8], logprobs=[-0.5, -2.0]),
    ended(1, [7, 8, 3, 2], logprobs=[-0.5, -2.0, -3.0, -0.1]),
    ended(2, [6, 5, 4]),
]
FULL = [0.5, 0.95, 0.97, 0.93]
WARM = Held(900 * MIB, 40, 12)


def verdict(**changes: Any) -> SoakVerdict:
    rests = [{"scheduler 7": WARM}, {"scheduler 7": WARM}]
    given = {"endings": ENDINGS, "alone": ALONE, "usage": FULL, "rests": rests, "lost": []}
    return judge(**{**given, **changes})


def later(memory: int = 0, fds: int = 0, threads: int = 0) -> list[dict[str, Held]]:
    """Rests of a process that held so much more at the second."""
    more = Held(WARM.memory + memory, WARM.fds + fds, WARM.threads + threads)
    return [{"scheduler 7": WARM}, {"scheduler 7": more}]


def test_a_clean_soak() -> None:
    found = verdict()
    assert found.problems == []
    assert (found.requests, found.tokens) == (3, 6)
    assert (found.left, found.retracted) == (1, 1)
    assert (found.verified, found.verified_retracted) == (3, 1)
    assert found.full_share == 0.75
    assert found.growth == {"scheduler 7": Held(0, 0, 0)}
    assert str(found).endswith("All is well.")
    little = later(GROWTH_BYTES, GROWTH_FDS, GROWTH_THREADS)  # the allocator's
    assert verdict(rests=little).problems == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"alone": [ended(0, [7, 9])]}, "got [7, 8] in company and [7, 9] alone"),
        ({"alone": [ended(0, [7, 8, 9])]}, "got [7, 8] in company and [7, 8, 9] alone"),
        ({"alone": [ended(0, [7, 8], logprobs=[-0.5, -2.1])]}, "0.1 off those alone"),
        ({"alone": [ended(1, [7, 9, 9])]}, "000001[0] got [7, 8] in company and [7, 9, 9] alone"),
        ({"alone": [ended(0, [], problem="HTTP 500")]}, "soak-000000[0] alone HTTP 500"),
        ({"endings": [*ENDINGS, *failed(numbered(9), "ReadTimeout: ")]}, "000009[0] ReadTimeout"),
        ({"lost": ["num_used_tokens is 3"]}, "num_used_tokens is 3"),
        ({"rests": later(memory=29 * MIB)}, "scheduler 7 grew since the warm-up: +29.0 MiB"),
        ({"rests": later(fds=GROWTH_FDS + 1)}, "+0.0 MiB, +5 files, +0 threads"),
        ({"rests": later(threads=GROWTH_THREADS + 1)}, "+0 files, +5 threads"),
        ({"rests": [{"scheduler 7": WARM}, {}]}, "scheduler 7 is gone"),
        ({"usage": [0.84] * 9 + [0.86]}, "85% or above 10% of the time"),
        ({"usage": []}, "0% of the time"),
        ({"endings": ENDINGS[:1], "alone": ALONE[:1]}, "no request was retracted"),
        ({"alone": []}, "no answer was verified"),
        ({"endings": [], "alone": []}, "nothing was asked"),
    ],
)
def test_what_turns_it_red(changes: dict[str, Any], says: str) -> None:
    found = verdict(**changes)
    assert any(says in problem for problem in found.problems), found.problems
    assert str(found).endswith("FAILED")
    assert "PROBLEM" in str(found)
