"""What one request may do to others: patterns and grammars that take for ever, beside 20 clients.

What is compared are two loads of one run, which differ in those patterns alone.
"""

import asyncio
import time
from typing import Any

import pytest
from fault_client import FaultServer, request
from redos import ENDLESS

pytestmark = pytest.mark.engine

NUM_CLIENTS, TOKENS = 20, 24
HARMLESS = "§+"
# xgrammar reads these in ever more ways with each token: half a second for one, in the end.
AMBIGUOUS = (r"((([t0-9 ]+)+)+)+§", r"((([t0-9 ]){1,50}){1,50}){1,50}§")


async def gaps_of(server: FaultServer, seed: int) -> list[float]:
    """Seconds before each chunk of a client's stream but the first, which waits for admission."""
    last, gaps = 0.0, []
    async for _ in server.stream(request([3 + seed % 20, 4], seed, tokens=TOKENS)):
        now = time.monotonic()
        gaps += [now - last] if last else []
        last = now
    return gaps


def worst_gap(server: FaultServer, first_seed: int, others: list[dict[str, Any]]) -> float:
    """The clients' 99th percentile beside these requests."""

    async def both() -> list[float]:
        clients = (gaps_of(server, first_seed + i) for i in range(NUM_CLIENTS))
        asked = asyncio.gather(*map(server.ask, others))
        found = await asyncio.gather(*clients)
        answers = await asked
        assert {answer.status_code for answer in answers} == {200}
        return sorted(gap for gaps in found for gap in gaps)

    (gaps,) = server.together(both())
    assert len(gaps) > 2 * NUM_CLIENTS
    return gaps[int(0.99 * len(gaps))]


@pytest.mark.parametrize("server", ["overlapped"], indirect=True)
def test_patterns_that_take_for_ever_hold_nobody_up(server: FaultServer) -> None:
    """Red where a search goes back: the first of these would stop the server."""
    found: dict[bool, float] = {}
    for turn, endless in enumerate((False, True, False, True)):
        others = [
            request([5, 6], 1000 + i, tokens=40, stop_regex=pattern if endless else HARMLESS)
            for i, pattern in enumerate(ENDLESS)
        ]
        gap = worst_gap(server, 100 * turn, others)
        found[endless] = min(gap, found.get(endless, gap))  # the turn that was disturbed less
    print("99th percentiles of gaps, harmless and endless:", found)
    assert found[True] < 2 * found[False], found
    server.assert_nothing_is_lost()


@pytest.mark.parametrize("server", ["overlapped"], indirect=True)
@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_a_grammar_that_holds_others_up_is_ended_with_a_sentence(
    server: FaultServer, pattern: str
) -> None:
    """Red where it goes on: its last rounds would take minutes each."""
    good = request([3, 4, 5], 7)
    (expected,) = server.alone([good])
    slow, beside = server.together(
        server.ask(request([3], 8, tokens=200, regex=pattern)), server.ask(good)
    )
    assert beside.json()["output_ids"] == expected
    assert slow.status_code == 400
    assert "can read the same text in too many ways" in slow.text
    server.assert_nothing_is_lost()
