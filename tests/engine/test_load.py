"""Many requests through a small pool: queueing, chunked prefill, retraction, aborts, no leaks.

SGLang's strict memory checks run at every step; a leak or a double free ends the engine.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from crowd import last_chunks
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("schedule")]

SMALL_POOL = {
    "num_particles": 4,
    "num_steps": 3,
    "max_lag": 16,
    "max_total_tokens": 400,
    "max_running_requests": 8,
    "chunked_prefill_size": 24,
}


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    model = {"vocab_size": 64, "scale": 0.3}
    return tiny(seed=1, **model), tiny(seed=2, **model)


def random_request(draw: random.Random) -> tuple[list[int], dict[str, Any]]:
    prompt = [draw.randrange(2, 64) for _ in range(draw.choice([1, 3, 10, 40, 90]))]
    params: dict[str, Any] = {
        "max_new_tokens": draw.choice([1, 2, 5, 17, 40, 80]),
        "temperature": draw.choice([0.0, 0.7, 1.5]),
        "ignore_eos": draw.random() < 0.5,
        "sampling_seed": draw.randrange(1 << 31),
    }
    if draw.random() < 0.2:
        params["stop"] = ["t9 "]
    if draw.random() < 0.2:
        params["top_p"] = 0.8
    return prompt, params


def test_two_hundred_requests_aborts_and_stops_through_a_small_pool(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    running = engine(**smc_arguments(*pair, **SMALL_POOL))
    draw = random.Random(0)
    requests = [random_request(draw) for _ in range(200)]
    aborted = {index for index in range(200) if draw.random() < 0.3}

    answers = last_chunks(
        running,
        [{"input_ids": prompt, "sampling_params": params} for prompt, params in requests],
        arrival=lambda index: 0.01 * index,
        aborted=aborted,
        timeout=600,
    )
    for index, (answer, (_, params)) in enumerate(zip(answers, requests, strict=True)):
        reason = answer["meta_info"]["finish_reason"]["type"]
        assert reason in {"stop", "length"} or (reason == "abort" and index in aborted)
        if reason == "length":
            assert len(answer["output_ids"]) == params["max_new_tokens"]
    # The engine is alive, and idle: SGLang checks an idle pool for leaks before it flushes.
    index = next(i for i in range(200) if i not in aborted and requests[i][1]["max_new_tokens"] > 5)
    prompt, params = requests[index]
    answer = running.generate(input_ids=[prompt], sampling_params=params)[0]
    assert answer["meta_info"]["finish_reason"]["type"] in {"stop", "length"}
    deadline = time.monotonic() + 30
    while not running.flush_cache().success:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_full_pool_queues_and_every_request_gets_its_text(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    """What a request gets does not depend on how crowded the pool was, if it was not retracted."""
    running = engine(**smc_arguments(*pair, **SMALL_POOL, context_length=512))
    draw = random.Random(1)
    prompts = [[draw.randrange(2, 64) for _ in range(8)] for _ in range(24)]
    params = [
        {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": seed} for seed in range(24)
    ]
    crowded = running.generate(input_ids=prompts, sampling_params=params)
    assert all(len(answer["output_ids"]) == 60 for answer in crowded)
    untouched = [i for i in range(24) if crowded[i]["meta_info"]["num_retractions"] == 0]
    assert len(untouched) >= 12  # a full pool queues, it does not thrash
    for i in untouched[:6]:
        alone = running.generate(input_ids=[prompts[i]], sampling_params=params[i])[0]
        assert alone["output_ids"] == crowded[i]["output_ids"]
    assert_it_says_what_memory_there_is(running)


def assert_it_says_what_memory_there_is(running: Any) -> None:
    """In its state, and to a request that would fit without particles."""
    memory = running.get_server_info()["internal_states"][0]["smc"]["memory"]
    arena = memory["modes"]["smc"]["slots"]
    assert (memory["pool_slots"], arena, memory["longest"]) == (400, 80, 319)
    assert memory["beside"]["rows of particles"] == 9 * 4 * 32 * 4
    with pytest.raises(ValueError, match="holds 400 tokens, of which 80 are kept") as error:
        running.generate(input_ids=[[3] * 330], sampling_params={"max_new_tokens": 4})
    assert "exceeds the maximum allowed length (314 tokens)" in str(error.value)
    assert "--speculative-smc-max-lag" in str(error.value)


def test_a_retracted_request_goes_on(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own switch retracts every few steps; nothing is lost and evidence is carried on."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    running = engine(**smc_arguments(*pair, **{**SMALL_POOL, "max_total_tokens": 4000}))
    answers = running.generate(
        input_ids=[[3, 4, 5 + i] for i in range(6)],
        sampling_params={"max_new_tokens": 60, "ignore_eos": True},
    )
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    for answer in answers:
        assert len(answer["output_ids"]) == 60
        assert answer["meta_info"]["spec_smc_rounds_ct"] == answer["meta_info"]["spec_verify_ct"]


def test_who_leaves_right_after_a_retraction_frees_no_slot_of_the_cache(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole text has just been read anew, by both models, and is the radix cache's.

    Particles that never meet emit nothing, so the second chunk is the token of the second prefill.
    """
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "12")
    apart = {"ess_threshold": 0.0, "max_lag": 200, "max_total_tokens": 8000}
    running = engine(**smc_arguments(*pair, **{**SMALL_POOL, **apart}))
    params = {"max_new_tokens": 120, "ignore_eos": True, "temperature": 1.5}
    requests = [{"input_ids": [3, 4, 5 + i], "sampling_params": params} for i in range(8)]
    answers = last_chunks(
        running, requests, arrival=lambda _: 0.0, aborted=range(8), after=2, timeout=120
    )
    assert any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers)
    # A slot with two owners ends the scheduler, by SGLang's checks.
    assert running.generate(**requests[0])["meta_info"]["completion_tokens"] == 120


def test_a_lag_is_bounded(engine: Callable[..., Any], pair: tuple[str, str]) -> None:
    """With resampling off, particles never meet: only the bound makes text flow."""
    bounded = {**SMALL_POOL, "ess_threshold": 0.0, "max_lag": 6, "max_total_tokens": 4000}
    running = engine(**smc_arguments(*pair, **bounded))
    answer = running.generate(
        input_ids=[[3, 4, 5]], sampling_params={"max_new_tokens": 60, "ignore_eos": True}
    )[0]
    assert len(answer["output_ids"]) == 60
    # A round adds at most 4 tokens to a lag below 6: at least every second one collapses.
    assert answer["meta_info"]["spec_smc_narrow_ct"] >= 6
    assert answer["meta_info"]["spec_smc_resample_ct"] == 0


def test_exact_mode_streams_every_round_through_a_small_pool(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    """Its arena is small: forty requests share a pool that holds few SMC populations.

    The lag is bounded, since any request might ask for mode smc, and one of those has to fit.
    """
    pool = {"max_total_tokens": 300, "max_running_requests": 8, "chunked_prefill_size": 24}
    settings = {"mode": "exact", "num_particles": 4, "num_steps": 3, "max_lag": 32}
    running = engine(**smc_arguments(*pair, **settings, **pool))
    params = [
        {"max_new_tokens": 30 + i % 7, "ignore_eos": True, "sampling_seed": i} for i in range(40)
    ]
    answers = running.generate(input_ids=[[3, 4, 5 + i] for i in range(40)], sampling_params=params)
    assert [len(a["output_ids"]) for a in answers] == [p["max_new_tokens"] for p in params]
    for info in (answer["meta_info"] for answer in answers):
        assert info["spec_smc_narrow_ct"] == info["spec_smc_resample_ct"] == 0
        assert info["spec_accept_length"] > 1.0
    calm = [i for i in range(40) if answers[i]["meta_info"]["num_retractions"] == 0]
    alone = running.generate(input_ids=[[3, 4, 5 + calm[0]]], sampling_params=params[calm[0]])
    assert alone[0]["output_ids"] == answers[calm[0]]["output_ids"]
