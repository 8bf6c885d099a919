"""Sessions and priorities are SGLang's own, and particles do not disturb them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
FIRST, SECOND, THIRD = [5, 9, 33, 20], [41, 8], [12]


@pytest.fixture
def running(engine: Callable[..., Any], tiny: Callable[..., str], schedule: str) -> Any:
    """Room for two requests at a time, the more important first."""
    pair = [tiny(seed=seed, vocab_size=64, scale=0.3) for seed in (1, 2)]
    settings = {"num_particles": 4, "num_steps": 3, "max_lag": 12}
    limits = {"max_running_requests": 2, "enable_priority_scheduling": True}
    return engine(**smc_arguments(*pair, **settings, **limits))


def turn(engine: Any, session: str, tokens: list[int], **params: Any) -> dict[str, Any]:
    return engine.generate(
        input_ids=tokens, sampling_params=GREEDY, session_params={"id": session, **params}
    )


def plain(engine: Any, tokens: list[int]) -> list[int]:
    return engine.generate(input_ids=tokens, sampling_params=GREEDY)["output_ids"]


def test_turns_of_a_session_stand_behind_each_other(running: Any) -> None:
    """The text so far need not be sent again, and its KV is not computed again."""
    session, text, last = running.open_session(1000), [], None
    for tokens in (FIRST, SECOND, THIRD):
        answer = turn(running, session, tokens, rid=last)
        cached = answer["meta_info"]["cached_tokens"]
        assert cached == 0 if last is None else cached >= len(text) - 2
        text += tokens
        assert answer["output_ids"] == plain(running, text)
        assert answer["meta_info"]["prompt_tokens"] == len(text)
        text += answer["output_ids"]
        last = answer["meta_info"]["id"]
    running.close_session(session)


def test_a_session_branches_and_is_rewritten(running: Any) -> None:
    session = running.open_session(1000)
    first = turn(running, session, FIRST)
    root, answered = first["meta_info"]["id"], [*FIRST, *first["output_ids"]]
    for tokens in (SECOND, THIRD):  # two turns behind one
        found = turn(running, session, tokens, rid=root)
        assert found["output_ids"] == plain(running, [*answered, *tokens])
    cut = turn(running, session, THIRD, rid=root, offset=6)
    assert cut["output_ids"] == plain(running, [*answered[:6], *THIRD])
    unsaid = turn(running, session, SECOND, rid=root, drop_previous_output=True)
    assert unsaid["output_ids"] == plain(running, [*FIRST, *SECOND])
    last = unsaid["meta_info"]["id"]
    again = turn(running, session, THIRD, rid=root, replace=True)
    assert again["output_ids"] == plain(running, [*answered, *THIRD])
    with pytest.raises(ValueError, match="Invalid request session id"):
        turn(running, session, THIRD, rid=last)  # what followed the turn is gone
    with pytest.raises(ValueError, match="replace=True without a rid"):
        turn(running, session, SECOND, replace=True)
    running.close_session(session)


def test_a_session_that_nobody_opened_is_an_error(running: Any) -> None:
    with pytest.raises(ValueError, match="session id nobody does not exist"):
        turn(running, "nobody", FIRST)
    assert plain(running, FIRST)


def asking(priority: int, size: int, token: int) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": size, "ignore_eos": True}
    given = {"input_ids": [token, 7], "sampling_params": params}
    return {**given, "priority": priority, "return_logprob": True}


def serve(engine: Any, early: list[dict], late: list[dict]) -> list[tuple[int, dict[str, Any]]]:
    """Answers in the order in which they came; the late are sent when all the early run."""
    order: list[tuple[int, dict[str, Any]]] = []

    async def everything() -> None:
        started = [asyncio.Event() for _ in early]

        async def first(index: int, given: dict[str, Any]) -> None:
            chunks = []
            async for chunk in await engine.async_generate(**given, stream=True):
                chunks.append(chunk)
                started[index].set()
            order.append((index, chunks[-1]))

        async def then(index: int, given: dict[str, Any]) -> None:
            for event in started:
                await event.wait()
            order.append((index, await engine.async_generate(**given)))

        each = [first(index, given) for index, given in enumerate(early)]
        each += [then(index, given) for index, given in enumerate(late, start=len(early))]
        await asyncio.wait_for(asyncio.gather(*each), timeout=300)

    asyncio.get_event_loop().run_until_complete(everything())
    return order


def test_the_more_important_go_first_and_take_the_place_of_others(running: Any) -> None:
    """Those that they displace lose their particles, and nothing of their text."""
    low = [asking(0, 120, token) for token in (20, 21)]
    high = [asking(20, 8, token) for token in (30, 31)]  # SGLang's threshold is 10
    order = serve(running, low, high)
    assert [index >= len(low) for index, _ in order] == [True, True, False, False]
    answers = dict(order)
    assert sum(answers[i]["meta_info"]["num_retractions"] for i in (0, 1)) >= 1
    for index, given in enumerate(low):
        calm, found = running.generate(**given), answers[index]
        assert calm["meta_info"]["num_retractions"] == 0
        assert calm["output_ids"] == found["output_ids"]
        of_calm, of_found = (
            [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
            for answer in (calm, found)
        )
        assert of_found == pytest.approx(of_calm, abs=2e-4)


def test_who_waits_is_served_by_priority(running: Any) -> None:
    busy = [asking(9, 150, token) for token in (20, 21)]
    waiting = [asking(priority, 4, 30 + priority) for priority in (1, 3, 2, 4)]
    order = [index for index, _ in serve(running, busy, waiting) if index >= len(busy)]
    assert set(order[:2]) == {3, 5}, "two at a time"
