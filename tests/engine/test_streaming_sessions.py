"""Streaming sessions, which keep a request's row from turn to turn."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("schedule")]

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 9}
TURNS = [[8], [9, 10, 11], [12, 13]]
SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 16, "enable_streaming_session": True}


def turn(engine: Any, session: str, tokens: list[int]) -> Any:
    params = {"id": session, "rid": None}
    return engine.async_generate(input_ids=tokens, sampling_params=GREEDY, session_params=params)


def talk(engine: Any, firsts: list[list[int]]) -> None:
    """Sessions side by side: every turn goes on as if its whole history had been sent at once."""
    ids = [engine.open_session(10_000, streaming=True) for _ in firsts]
    texts: list[list[int]] = [[] for _ in firsts]

    async def together(turns: list[list[int]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*(turn(engine, *one) for one in zip(ids, turns, strict=True)))

    for turns in (firsts, *([tokens] * len(firsts) for tokens in TURNS)):
        answers = asyncio.get_event_loop().run_until_complete(together(turns))
        texts = [text + tokens for text, tokens in zip(texts, turns, strict=True)]
        whole = engine.generate(input_ids=texts, sampling_params=GREEDY)
        for answer, other in zip(answers, whole, strict=True):
            assert answer["output_ids"] == other["output_ids"]
            assert answer["meta_info"]["prompt_tokens"] == other["meta_info"]["prompt_tokens"]
        texts = [text + one["output_ids"] for text, one in zip(texts, answers, strict=True)]
    for session in ids:
        engine.close_session(session)


def test_a_turn_reads_what_the_turns_before_it_wrote(
    engine: Callable[..., Any], tiny: Callable[..., str]
) -> None:
    """A slot of the arena in place of the last token's changes most of these texts."""
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    talk(engine(**smc_arguments(target, draft, **SETTINGS)), [[i, i + 1] for i in range(3, 15)])


def test_and_so_it_does_after_a_retraction(
    engine: Callable[..., Any], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    running = engine(**smc_arguments(target, draft, **SETTINGS, max_total_tokens=4000))
    talk(running, [[i, i + 1] for i in range(3, 9)])
