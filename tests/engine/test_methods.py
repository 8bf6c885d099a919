"""Methods of `sgl.Engine` that docs/support.md names answer as without speculation."""

import re
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from same_answers import assert_same, joined, shown
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
INCREMENTAL = {"incremental_streaming_output": True}
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
PROMPTS = [[40, 7, 33], [40, 7, 33, 9], [5]]
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [3, 9]}
SCORED = {"sampling_params": {"max_new_tokens": 0}, **LOGPROBS}
DRAWN = {"sampling_params": GREEDY, **LOGPROBS}
ITEMS: list[dict[str, Any]] = [
    {"query": "t5", "items": ["t9", "t11 t12"], "label_token_ids": [20, 21]},
    {"query": [5], "items": [[7], [8, 9]], "label_token_ids": [[20, 21], [30, 31]]},
]
SOFTMAX = {"apply_softmax": True, "return_token_logprobs": True}


def called(engine: Any) -> dict[str, Any]:
    """What each method answers, by its name and a number."""

    def wait(coroutine: Any) -> Any:
        return engine.loop.run_until_complete(coroutine)

    found: dict[str, Any] = {}
    for i, body in enumerate((SCORED, DRAWN)):
        found[f"generate {i}"] = engine.generate(input_ids=PROMPTS, **body)
        found[f"async_generate {i}"] = wait(engine.async_generate(input_ids=PROMPTS[0], **body))
        streamed = list(engine.generate(input_ids=PROMPTS[0], stream=True, **body))
        found[f"generate, streamed {i}"] = joined(streamed)
    for i, asked in enumerate(ITEMS):
        found[f"score {i}"] = astuple(engine.score(**asked))
        found[f"async_score {i}"] = astuple(wait(engine.async_score(**asked, **SOFTMAX)))
    session = engine.open_session(capacity_of_str_len=1000)
    last = None
    for i, turn in enumerate(PROMPTS):
        where = {"id": session, "rid": last}
        answer = engine.generate(input_ids=turn, sampling_params=GREEDY, session_params=where)
        found[f"open_session {i}"] = answer
        last = answer["meta_info"]["id"]
    engine.close_session(session)
    found["close_session"] = refused(
        engine.generate, input_ids=PROMPTS[0], session_params={"id": session}
    ).replace(session, "")
    found["encode"] = refused(engine.encode, "t5")
    found["rerank"] = refused(engine.rerank, [["t5", "t6"]])
    # It is refused until the scheduler has come round behind the last request.
    found["flush_cache"] = any(engine.flush_cache().success for _ in range(1000))
    info = engine.get_model_info()
    found["get_model_info"] = {name: info[name] for name in ("model_path", "is_generation")}
    found["get_server_info"] = engine.get_server_info()["served_model_name"]
    return shown(found)


def refused(method: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:
        method(*args, **kwargs)
    return str(error.value)


def assert_an_item_of_a_list_fails_alone(engine: Any) -> None:
    """Its grammar ends before it may; where all fail the call raises, as it does of one."""
    fails = {**GREEDY, "regex": "t5", "min_new_tokens": 20}
    ids = PROMPTS[0]
    failed, whole = engine.generate(input_ids=[ids, ids], sampling_params=[fails, GREEDY])
    assert shown(whole) == shown(engine.generate(input_ids=ids, sampling_params=GREEDY))
    assert "admits no text here" in failed["meta_info"]["finish_reason"]["message"]
    for asked in (ids, [ids, ids]):
        told = refused(engine.generate, input_ids=asked, sampling_params=fails)
        assert "admits no text here" in told


def test_methods_answer_as_without_speculation(
    engine: Callable[..., Any], tiny: Callable[..., str]
) -> None:
    """Red if one fails, lacks a field, or has another value in it."""
    target = tiny(seed=1, vocab_size=64)
    draft = tiny(seed=2, vocab_size=64)
    stock = called(engine(model_path=target, **INCREMENTAL))
    sizes = {"num_particles": 4, "max_lag": 16}
    smc = engine(**smc_arguments(target, draft, **sizes), **INCREMENTAL)
    assert_an_item_of_a_list_fails_alone(smc)
    own = called(smc)
    assert_same(own, stock, "")
    named = set(re.findall(r"`Engine\.(\w+)`", PAGE))
    assert named == {name.split()[0].strip(",") for name in own} - {"encode", "rerank"}
