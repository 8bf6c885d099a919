"""A full queue: who is turned away hears what SGLang says without SMC, and others get their texts.

Two requests with a slow potential hold both places to run, and others fill the queue.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_client import FaultServer
from http_server import HANGS, running_server
from routed import ROUTES, parts_of
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PLACES = 2
QUEUED = 6
FULL = "The request queue is full."
DISPLACED = "The request is aborted by a higher priority request."
#: What holds a place to run; its priority is the highest, so that no other takes it.
HELD = {"max_new_tokens": 400, "ignore_eos": True}
SLOW = {"smc": {"potentials": [{"name": "slow", "args": {"seconds": 0.1}}]}}
SHORT: list[dict[str, Any]] = [
    {"max_new_tokens": 8, "temperature": 0.0, "custom_params": {"smc": smc}}
    for smc in ({}, {"mode": "exact"}, {"num_steps": 0})
]


@pytest.fixture(scope="module")
def server(
    tiny: Callable[..., str], schedule: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultServer]:
    folder = tmp_path_factory.mktemp("overload")
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    arguments = smc_arguments(
        *(tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2)),
        num_particles=4,
        max_running_requests=PLACES,
        max_queued_requests=QUEUED,
        enable_priority_scheduling=True,
        potential=["slow=steered:EachRound"],
        chat_template=template,
        context_length=512,
        max_total_tokens=8000,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1] / "support")
        with running_server(folder / "log", schedule, kind=FaultServer, **arguments) as running:
            yield running


def short(index: int) -> dict[str, Any]:
    params = SHORT[index % len(SHORT)]
    return {"input_ids": [3, 4, 5 + index], "sampling_params": params, "priority": index % 2}


def wait_for(server: FaultServer, running: int, waiting: int) -> None:
    deadline = time.monotonic() + HANGS
    while server.load()[:2] != (running, waiting):
        assert time.monotonic() < deadline, (server.load(), server.ending())
        time.sleep(0.05)


@contextmanager
def full(server: FaultServer) -> Iterator[tuple[Executor, list[Future]]]:
    """Yield the requests that wait, and who sends more; all have run at the end of the block."""
    held = {"input_ids": [3], "sampling_params": {**HELD, "custom_params": SLOW}, "priority": 9}
    with ThreadPoolExecutor(4 * QUEUED) as pool:
        for index in range(PLACES):
            pool.submit(server.post, "/generate", **held, rid=f"held-{index}")
            wait_for(server, index + 1, 0)
        waiting = []
        for index in range(QUEUED):
            waiting.append(pool.submit(server.post, "/generate", **short(index)))
            wait_for(server, PLACES, index + 1)
        yield pool, waiting
        assert server.load()[:2] == (PLACES, QUEUED), "who holds the places has ended too soon"
        for index in range(PLACES):
            assert server.post("/abort_request", rid=f"held-{index}").status_code == 200
    server.assert_nothing_is_lost()


def told(server: FaultServer, route: str, body: dict[str, Any]) -> Any:
    """The status and the body; of a stream its parts."""
    reply = server.post(route, **body)
    return reply.status_code, [*parts_of(reply.text)] if body.get("stream") else reply.json()


NATIVE = {"input_ids": [3], "sampling_params": {"max_new_tokens": 4}}
LIST = {**NATIVE, "input_ids": [[3], [4]]}
SAMPLES = {**NATIVE, "sampling_params": {"max_new_tokens": 4, "n": 2}}
PLAIN = {**NATIVE, "sampling_params": SHORT[2]}
STREAM = {"stream": True}
#: What SGLang's own routes answer on a server without speculation.
REFUSED = {"object": "error", "message": FULL, "type": "503", "param": None, "code": 503}
EVENT = {"error": {**REFUSED, "type": "SERVICE_UNAVAILABLE"}}
MESSAGES = {"type": "overloaded_error", "message": FULL}
HIDDEN = {"type": "overloaded_error", "message": "Internal server error"}


def refused(server: FaultServer) -> Iterator[tuple[Any, Any]]:
    """Yield what each route answers, and what it answers without SMC."""
    model = server.get("/v1/models").json()["data"][0]["id"]
    for route, make in ROUTES.items():
        body = make(model, None)
        status, found = told(server, route, body)
        wanted: tuple[int, Any] = (503, REFUSED)
        if route == "/v1/messages":
            wanted = 503, {"type": "error", "error": HIDDEN}
        elif route == "/v1/responses":  # SGLang takes the error for one of its client
            found = found["error"]["message"]
            wanted = (400, f"503: {FULL}")
        yield (route, status, found), (route, *wanted)
    for route in ("/v1/chat/completions", "/v1/completions"):
        body = ROUTES[route](model, None, n=2)
        yield told(server, route, body), (503, REFUSED)
        yield told(server, route, {**body, **STREAM, "n": 1}), (200, [EVENT])
    for body in (LIST, SAMPLES, PLAIN):
        yield told(server, "/generate", body), (503, REFUSED)
        _, parts = told(server, "/generate", {**body, **STREAM})
        ends = [part["meta_info"]["finish_reason"] for part in parts]
        yield ends, [{"type": "abort", "status_code": 503, "message": FULL}] * len(ends)
    _, parts = told(server, "/v1/messages", {**ROUTES["/v1/messages"](model, None), **STREAM})
    yield [part["error"] for part in parts if part["type"] == "error"], [MESSAGES]


def test_who_finds_the_queue_full_is_told_so(server: FaultServer) -> None:
    """On each route, alone, in lists, samples and streams; red if one is HTTP 500."""
    alone = [server.post("/generate", **short(index)).json() for index in range(QUEUED + 1)]
    newest = QUEUED - 2  # of the lower priority
    with full(server) as (pool, waiting):
        for found, wanted in refused(server):
            assert found == wanted
        important = {**short(QUEUED), "priority": 5}
        waiting.append(pool.submit(server.post, "/generate", **important))
        displaced = waiting.pop(newest).result(HANGS)
    assert (displaced.status_code, displaced.json()["message"]) == (503, DISPLACED)
    assert "Traceback" not in server.log.read_text()
    del alone[newest]
    for answer, wanted in zip(waiting, alone, strict=True):
        assert answer.result(HANGS).json()["output_ids"] == wanted["output_ids"]
