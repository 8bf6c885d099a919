"""Requests that are aborted, and clients that leave, in each state that a request can be in.

They do so beside others, in a pool that is full: who stays gets its text, and nothing is lost.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fault_client import FaultServer, request, text_of

pytestmark = pytest.mark.engine

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


def victim(seed: int) -> dict[str, Any]:
    return request([5, 6, 2 + seed % 50], seed, tokens=LIMIT, custom_params=NEVER_RESAMPLED)


async def leave(server: FaultServer, body: dict[str, Any], moment: str, way: str) -> int:
    """Abort or drop a stream at a moment; the tokens that came by then."""
    tokens, num, has_left = 0, 0, False
    async with contextlib.aclosing(server.stream(body)) as chunks:
        async for chunk in chunks:
            num, tokens = num + 1, chunk["meta_info"]["completion_tokens"]
            if not has_left and MOMENTS[moment](num, tokens):
                has_left = True
                if way == "disconnect":
                    return tokens
                await server.abort(body["rid"])
    reason = chunk["meta_info"]["finish_reason"]["type"]
    assert has_left and (reason == "abort" or tokens == LIMIT)
    return tokens


async def leave_early(server: FaultServer, body: dict[str, Any], delay: float, way: str) -> bool:
    """Be gone so soon after asking; whether nothing had been generated yet."""
    if way == "disconnect":
        with pytest.raises(httpx.ReadTimeout):
            patience = httpx.Timeout(max(delay, 0.001), connect=60)  # once the server has it
            async with httpx.AsyncClient(timeout=patience) as client:
                await client.post(server.server.url + "/generate", json=body)
        return True
    asking = asyncio.create_task(server.ask(body))
    await asyncio.sleep(delay)
    while not asking.done():  # an abort of what has not arrived yet is nothing
        await server.abort(body["rid"])
        await asyncio.sleep(0.02)
    answer = asking.result()
    assert answer.status_code == 200, answer.text
    meta_info = answer.json()["meta_info"]
    assert meta_info["finish_reason"]["type"] == "abort"
    return meta_info["completion_tokens"] == 0


@pytest.mark.parametrize("way", ["abort", "disconnect"])
def test_leaving_in_any_state(server: FaultServer, way: str) -> None:
    base = 1000 if way == "abort" else 2000
    staying = [request([4, 3, 2 + i], base + 500 + i, tokens=30) for i in range(8)]
    expected = server.alone(staying)
    # Alone, so that nothing queues: a prompt of nine chunks is left while it is prefilled.
    long = [
        request([2 + (i + j) % 50 for j in range(200)], base + 300 + i, tokens=50) for i in range(5)
    ]
    prefilling = [
        server.together(leave_early(server, body, 0.01 + 0.03 * i, way))[0]
        for i, body in enumerate(long)
    ]
    assert any(prefilling)
    # Together, more than run at once: the first wait in the queue, the others have begun.
    leaving = [
        leave(server, victim(base + 10 * i + j), moment, way)
        for i, moment in enumerate(MOMENTS)
        for j in range(4)
    ]
    queued = [leave_early(server, victim(base + 200 + i), 0.05 * i, way) for i in range(6)]
    found = server.together(*map(server.ask, staying), *leaving, *queued)
    answers, tokens = found[: len(staying)], found[len(staying) : -len(queued)]
    assert any(found[-len(queued) :])
    for answer, text in zip(answers, expected, strict=True):
        assert answer.status_code == 200
        if answer.json()["meta_info"]["num_retractions"] == 0:
            assert text_of(answer.json()) == text
    assert max(tokens[-4:]) >= LIMIT - 8
    server.assert_nothing_is_lost()


def test_a_full_pool_queues_and_answers_all(server: FaultServer) -> None:
    """Six run at once, and the pool holds but some of them at their longest.

    Whether some are retracted depends on when they come.
    """
    bodies = [
        request(
            [2 + i % 50] * (1 + 7 * (i % 5)),
            3000 + i,
            tokens=150 if i % 2 else 40,
            custom_params={"smc": {"num_particles": 1 + i % 4}},
        )
        for i in range(24)
    ]
    answers = [answer.json() for answer in server.together(*map(server.ask, bodies))]
    for body, answer in zip(bodies, answers, strict=True):
        assert len(answer["output_ids"]) == body["sampling_params"]["max_new_tokens"]
    retracted = [answer["meta_info"]["num_retractions"] > 0 for answer in answers]
    calm = [i for i in range(24) if not retracted[i]][:6]
    assert server.alone([bodies[i] for i in calm]) == [text_of(answers[i]) for i in calm]
    server.assert_nothing_is_lost()
