"""Test what goes wrong beside healthy requests: they keep their texts, and no slot is lost.

The tests run in the order of this file: after the last two the server cannot write, and is killed.
"""

import contextlib
import itertools
import json
import os
import random
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from bad_requests import bad_requests
from fault_client import FaultServer, assert_says, request, text_of
from fault_models import DRAFT_INF, DRAFT_NAN, RARE, TARGET_INF, TARGET_NAN
from http_server import HANGS
from soak.dawdlers import KINDS, Dawdlers

pytestmark = pytest.mark.engine

TARGET = "The target model's logits"
DRAFT = "The draft model's logits"
HOT = 60.0  # the temperature at which rare tokens are drawn
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2, "num_steps": 1},
    {"mode": "exact"},
    {"mode": "auto", "num_particles": 3},
    {"power": 2.0},
    {"resample_at": "token", "ess_threshold": 1.0, "resampling_method": "stratified"},
)
# Where a broken token stands in a prompt, and whose logits it breaks.
PROMPTS = (
    ([5, TARGET_NAN], TARGET),
    ([TARGET_NAN, 5, 6], TARGET),
    ([3] * 30 + [TARGET_NAN] + [4] * 30, TARGET),  # in the second of three chunks
    ([5, 6, TARGET_INF], TARGET),
    ([DRAFT_NAN, 5], DRAFT),
    ([5, DRAFT_INF], DRAFT),
)
LIMIT = 60
# When a stream is left: at a chunk of which this holds.
MOMENTS: dict[str, Callable[[int, int], bool]] = {
    "at the first token": lambda num, tokens: num == 1,
    "in the middle": lambda num, tokens: num == 3,
    # Nothing is resampled: what comes in one chunk has just collapsed.
    "at the collapse": lambda num, tokens: tokens > 1,
    "near the end": lambda num, tokens: tokens >= LIMIT - 8,
}
NEVER_RESAMPLED = {"smc": {"ess_threshold": 0.0, "evidence_threshold": 0.0}}
# xgrammar reads this in ever more ways with each token: half a second for one, in the end.
AMBIGUOUS = r"((([t0-9 ]+)+)+)+§"
NUM_SLOW = 24
# Each chunk repeats all that was generated, so that no buffer of the kernel holds them all.
EXACTLY = {"max_new_tokens": 100, "ignore_eos": True, "custom_params": {"smc": {"mode": "exact"}}}
UNREAD = {"input_ids": [9, 8], "sampling_params": EXACTLY}
UNREAD |= {"return_logprob": True, "top_logprobs_num": 20}


def healthy(number: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        request(
            [draw.randrange(2, min(RARE)) for _ in range(draw.choice([1, 5, 40]))],
            seed,
            temperature=draw.choice([0.0, 0.7, 1.0]),
            custom_params={"smc": CHOICES[seed % len(CHOICES)]},
        )
        for seed in range(number)
    ]


def test_broken_logits_end_their_request_with_a_sentence_and_no_other(server: FaultServer) -> None:
    """In the first token and later, in every mode, streamed or not, in any company."""
    well = healthy(12)
    expected = server.alone(well)
    sick = [
        (request(prompt, 100 + 10 * i + j, custom_params={"smc": CHOICES[j]}), of)
        for (i, (prompt, of)), j in itertools.product(enumerate(PROMPTS), (0, 2, 4))
    ]
    hot = [
        request([3, 4 + i], 300 + i, tokens=80, temperature=HOT, custom_params={"smc": smc})
        for i, smc in enumerate(CHOICES)
    ]

    async def last_chunk(body: dict[str, Any]) -> dict[str, Any]:
        return [chunk async for chunk in server.chunks(body)][-1]

    in_turn = itertools.zip_longest(well, (body for body, _ in sick), hot)
    mixed = [body for some in in_turn for body in some if body]
    answers = server.together(*map(server.ask, mixed))
    found = dict(zip((body["rid"] for body in mixed), answers, strict=True))
    for body, text in zip(well, expected, strict=True):
        assert_says(found[body["rid"]], text)
    for body, of in [*sick, *((body, (TARGET, DRAFT)) for body in hot)]:
        assert found[body["rid"]].status_code == 500
        assert found[body["rid"]].json()["message"].startswith(of)
    for chunk in server.together(*(last_chunk(body) for body, _ in sick[::4])):
        assert chunk["meta_info"]["finish_reason"]["status_code"] == 500
        assert chunk["meta_info"]["spec_smc_nan_ct"] == 1
        assert chunk["output_ids"] == []
    server.assert_nothing_is_lost()


def test_a_prompt_with_broken_logits_is_not_cached(server: FaultServer) -> None:
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, TARGET_NAN]
    assert server.post("/generate", **request(prompt, 1)).status_code == 500
    healed = server.post("/generate", **request([*prompt[:-1], 2], 2)).json()
    assert healed["meta_info"]["cached_tokens"] == 0
    server.assert_nothing_is_lost()


def test_a_bad_request_is_an_error_of_its_client_alone(server: FaultServer) -> None:
    """Send three hundred malformed bodies: each gets a status of 400 to 499 and a sentence."""
    good = request([3, 4, 5], 7)
    expected = server.alone([good])
    wrong = []
    with httpx.Client(base_url=server.url, timeout=HANGS) as client:
        for bad in bad_requests(300):
            headers = {"content-type": bad.content_type}
            answer = client.post(bad.route, content=bad.body, headers=headers)
            if not 400 <= answer.status_code < 500 or len(answer.text.split()) < 3:
                said = answer.status_code, answer.text[:200]
                wrong.append((bad.name, bad.route, bad.body[:120], *said))
    assert wrong == []
    assert server.alone([good]) == expected
    server.assert_nothing_is_lost()


def test_a_grammar_that_holds_others_up_is_ended_with_a_sentence(server: FaultServer) -> None:
    """Red where it goes on: its last rounds would take minutes each."""
    good = request([3, 4, 5], 7)
    (expected,) = server.alone([good])
    slow, beside = server.together(
        server.ask(request([3], 8, tokens=200, regex=AMBIGUOUS)), server.ask(good)
    )
    assert beside.json()["output_ids"] == expected
    assert slow.status_code == 400
    assert "can read the same text in too many ways" in slow.text
    server.assert_nothing_is_lost()


def test_slow_clients_hold_no_kv_and_nobody_up(server: FaultServer) -> None:
    """Some send or read a byte a second; their answers end, and others get theirs."""
    good = request([3, 4, 5], 7)
    (expected,) = server.alone([good])

    async def beside() -> list[int]:
        async with Dawdlers(server.url, NUM_SLOW, UNREAD).at_work() as slow:
            while not all(slow.moved[kind] for kind in KINDS) or server.load()[0]:
                assert text_of((await server.ask(good)).json()) == expected
            assert not slow.ended
            assert slow.moved["reader"] < NUM_SLOW * 200, "the answers are still to be read"
            return text_of((await server.ask(good)).json())

    assert server.together(beside()) == [expected]
    server.assert_nothing_is_lost()


async def leave(server: FaultServer, body: dict[str, Any], moment: str, way: str) -> None:
    """Abort or drop a stream at a moment."""
    num = 0
    has_left = False
    async with contextlib.aclosing(server.chunks(body)) as chunks:
        async for chunk in chunks:
            num += 1
            tokens = chunk["meta_info"]["completion_tokens"]
            if not has_left and MOMENTS[moment](num, tokens):
                has_left = True
                if way == "disconnect":
                    return
                await server.ask({"rid": body["rid"]}, "/abort_request")
    assert chunk["meta_info"]["finish_reason"]["type"] == "abort" or tokens == LIMIT


@pytest.mark.parametrize("way", ["abort", "disconnect"])
def test_clients_that_leave_take_nothing_along(server: FaultServer, way: str) -> None:
    """In a pool that is full, at four moments of a stream."""
    base = 1000 if way == "abort" else 2000
    staying = [request([4, 3, 2 + i], base + 500 + i, tokens=30) for i in range(4)]
    expected = server.alone(staying)
    leaving = [
        request([5, 6, 2 + i], base + i, tokens=LIMIT, custom_params=NEVER_RESAMPLED)
        for i in range(2 * len(MOMENTS))
    ]
    moments = zip(leaving, itertools.cycle(MOMENTS), strict=False)
    found = server.together(
        *map(server.ask, staying), *(leave(server, *each, way) for each in moments)
    )
    for answer, text in zip(found, expected, strict=False):
        assert_says(answer, text)
    server.assert_nothing_is_lost()


def let_the_log_end_here(server: FaultServer) -> int:
    """Let each process fail to write from now on; return the log's length at most, in bytes."""
    process = psutil.Process(server.process.pid)
    length = server.log.stat().st_size
    for one in [process, *process.children(recursive=True)]:
        _, hard = resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (length, hard))
    return server.log.stat().st_size  # who had no limit yet may have written


def test_a_full_disk_costs_logs_and_no_answer(server: FaultServer) -> None:
    """Red for a line that is printed, or written, without being ready for this."""
    body = request([5, 6, 7], 11, tokens=40)
    (text,) = server.alone([body])
    length = let_the_log_end_here(server)
    bodies = [{**body, "rid": f"full-{i:03}"} for i in range(12)]
    for answer in server.together(*map(server.ask, bodies)):
        assert_says(answer, text)
    lines = server.post("/generate", **body, stream=True).text.split("\n\n")
    assert text_of(json.loads(lines[-3].removeprefix("data: "))) == text
    server.assert_nothing_is_lost()
    assert server.log.stat().st_size <= length, "nothing was kept from being written"
    assert "No space left on device" in server.log.read_text()  # of the first request


def test_a_killed_scheduler_ends_the_server_and_its_clients(server: FaultServer) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    scheduler = max(processes, key=lambda one: one.cpu_times().user)  # it runs the models

    def outcome(stream: bool) -> str:
        params = {"max_new_tokens": 200, "ignore_eos": True}
        body = {"input_ids": [3, 4], "sampling_params": params, "stream": stream}
        try:
            return str(server.post("/generate", **body).status_code)
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(8) as pool:
        scheduler.suspend()  # so that none of them ends before
        clients = [pool.submit(outcome, stream=i % 2 == 0) for i in range(8)]
        os.kill(scheduler.pid, signal.SIGKILL)
        assert server.process.wait(HANGS) != 0
        outcomes = {client.result(timeout=HANGS) for client in clients}
    # A stream that had begun has its status already; all others know that nobody answers.
    assert outcomes <= {"200", "500", "RemoteProtocolError", "ReadError", "ConnectError"}
    assert outcomes != {"200"}
    _, alive = psutil.wait_procs(processes, timeout=HANGS)
    assert not alive, "the server left processes behind"
