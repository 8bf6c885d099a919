"""Clients that hold a connection and send or read a byte a second cost the others nothing."""

import asyncio
import itertools
import statistics
import time

import pytest
from fault_client import FaultServer, request
from soak.dawdlers import KINDS, Dawdlers

pytestmark = pytest.mark.engine

NUM_SLOW = 24
STREAMS = 6
EXACT = {"smc": {"mode": "exact"}}  # every round is a chunk
# Each chunk repeats all that was said, so that no buffer of the kernel holds them all.
UNREAD = {
    "input_ids": [9, 8],
    "sampling_params": {"max_new_tokens": 100, "ignore_eos": True, "custom_params": EXACT},
    "return_logprob": True,
    "top_logprobs_num": 20,
}


async def gaps(server: FaultServer) -> list[float]:
    """Seconds between the chunks of some streams, one after another."""
    found = []
    for seed in range(7000, 7000 + STREAMS):
        times = []
        async for _ in server.stream(request([5, 6], seed, tokens=80, custom_params=EXACT)):
            times.append(time.monotonic())
        found += [after - before for before, after in itertools.pairwise(times)]
    return found


async def idle(server: FaultServer, slow: Dawdlers) -> None:
    """Until slow clients of all kinds are at work, and the answers that nobody reads are done."""
    while not all(slow.moved[kind] for kind in KINDS) or server.load()["running"]:
        await asyncio.sleep(0.1)


def test_slow_clients_cost_the_others_nothing(server: FaultServer) -> None:
    """Nor does an answer hold KV because nobody reads it."""

    async def measure() -> tuple[list[float], list[float]]:
        before = await gaps(server)
        async with Dawdlers(server.server.url, NUM_SLOW, UNREAD).at_work() as slow:
            await idle(server, slow)
            beside = await gaps(server)
            assert not slow.ended
            assert slow.moved["reader"] < NUM_SLOW * 200
        return before + await gaps(server), beside

    ((without, beside),) = server.together(measure())
    ninth = [statistics.quantiles(some, n=10)[-1] for some in (without, beside)]
    assert ninth[1] < 2 * ninth[0], ninth
    assert statistics.fmean(beside) < 2 * statistics.fmean(without)
    server.assert_nothing_is_lost()
