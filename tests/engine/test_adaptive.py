"""N and K follow the load of a real server, down to no drafts and back, and nothing leaks.

Costs are given, so that the batch size alone decides. SGLang's strict memory checks run at every
step.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from crowd import last_chunks
from tiny_models import smc_arguments

from sglang_smc.options.policy import COSTS_ENV

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("schedule")]

SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 16, "adaptive": True}
PROMPT = [3, 4, 5]


def costs(num_free: int) -> str:
    """Passes of up to so many tokens cost the same; beyond that each token costs a lot."""

    def points(seconds: float) -> list[tuple[int, float]]:
        return [(1, seconds), (num_free, seconds), (2 * num_free, 8 * seconds)]

    return json.dumps({"draft": points(0.001), "target": points(0.01)})


@pytest.fixture
def start(
    engine: Callable[..., Any], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """An engine whose draft is its target, so that drafts are always worth their while."""

    def make(num_free: int, **settings: Any) -> Any:
        monkeypatch.setenv(COSTS_ENV, costs(num_free))
        model = tiny(seed=1, vocab_size=64, scale=0.3)
        # The environment is no part of the key by which engines are told apart; this is.
        named = {"served_model_name": f"free-{num_free}"}
        return engine(**smc_arguments(model, model, **SETTINGS, **named, **settings))

    return make


def alone(running: Any, **params: Any) -> dict[str, Any]:
    given = {"max_new_tokens": 120, "ignore_eos": True, **params}
    answer = running.generate(input_ids=[PROMPT], sampling_params=given)[0]
    assert len(answer["output_ids"]) == given["max_new_tokens"]
    return answer["meta_info"]


def sizes(info: dict[str, Any]) -> tuple[float, float]:
    return info["spec_smc_particles_mean"], info["spec_smc_steps_mean"]


def test_a_crowd_decodes_plainly_and_who_comes_after_it_speculates(
    start: Callable[..., Any],
) -> None:
    running = start(num_free=16, max_running_requests=32)
    assert sizes(alone(running)) == (4, 3)
    params = [
        {"max_new_tokens": 60 + index, "ignore_eos": True, "sampling_seed": index}
        for index in range(24)
    ]
    crowd = running.generate(
        input_ids=[[*PROMPT, 6 + i] for i in range(24)], sampling_params=params
    )
    assert [len(a["output_ids"]) for a in crowd] == [p["max_new_tokens"] for p in params]
    for info in (answer["meta_info"] for answer in crowd):
        particles, steps = sizes(info)
        assert particles < 2 and steps < 1.5, "most rounds had one particle, or drafted nothing"
        assert info["spec_smc_num_particles"] == 4, "what was asked for"
        assert info["spec_smc_rounds_ct"] == info["spec_verify_ct"]
    alone(running)  # a budget stays for some rounds
    assert sizes(alone(running)) == (4, 3), "and speculation has come back"


def test_requests_of_all_kinds_come_and_go_through_a_small_pool(start: Callable[..., Any]) -> None:
    """Sizes change under them, some are retracted or aborted, and everyone gets its text."""
    pool = {"max_total_tokens": 500, "max_running_requests": 12, "chunked_prefill_size": 24}
    running = start(num_free=4, **pool)
    draw = random.Random(0)
    kinds: list[dict[str, Any]] = [
        {},
        {"num_particles": 3, "num_steps": 1, "resampling_method": "ssp"},
        {"mode": "exact"},
        {"mode": "mixed", "num_particles": 2},
        {"num_particles": 1},
        {"power": 2.0, "num_particles": 2},
        {"return_particles": True},
    ]
    limits = [draw.choice([1, 2, 17, 40, 80]) for _ in range(70)]

    def request(index: int) -> dict[str, Any]:
        params = {"max_new_tokens": limits[index], "ignore_eos": True, "temperature": 1.2}
        params["custom_params"] = {"smc": kinds[index % len(kinds)]}
        if index % 9 == 0:
            params["stop"] = ["t9 "]
        prompt = [draw.randrange(2, 64) for _ in range(draw.choice([1, 3, 10, 40]))]
        return {"input_ids": prompt, "sampling_params": params}

    answers = last_chunks(
        running,
        [request(index) for index in range(len(limits))],
        # Two crowds, and thin traffic between and behind them.
        arrival=lambda index: 0.02 * index + (2.0 if index > 35 else 0.0),
        aborted=range(0, len(limits), 11),
        timeout=500,
    )
    ends = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    for index, (end, answer) in enumerate(zip(ends, answers, strict=True)):
        assert end in {"stop", "length"} or index % 11 == 0
        if end == "length":
            assert len(answer["output_ids"]) == limits[index]
    full = [sizes(a["meta_info"]) for a in answers if "spec_smc_steps_mean" in a["meta_info"]]
    assert min(steps for _, steps in full) < 1 < max(steps for _, steps in full)
    alone(running)
    assert sizes(alone(running))[1] > 0, "speculation comes back"


def test_costs_are_measured_where_none_are_given(
    engine: Callable[..., Any], tiny: Callable[..., str]
) -> None:
    model = tiny(seed=1, vocab_size=64, scale=0.3)
    running = engine(**smc_arguments(model, model, **SETTINGS, served_model_name="measured"))
    assert alone(running, max_new_tokens=40)["spec_smc_rounds_ct"] > 0
