"""Requests that lose their KV midway, by SGLang's own switch: what is their seed's.

The soak does the same to a pool that overflows.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
from crowd import streams
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("schedule")]

TOKENS = 60
SERVER = {"num_particles": 4, "num_steps": 3, "max_lag": 4, "max_running_requests": 9}
MODES: list[dict[str, Any]] = [
    {},
    {"mode": "exact"},
    {"mode": "mixed", "num_particles": 3},
    {"mode": "auto"},
    {"power": 2.0},
    {"resample_at": "token", "ess_threshold": 1.0},
    {"num_particles": 1, "evidence_threshold": 0},
    {"num_particles": 2, "num_steps": 2},
    {"resampling_method": "ssp"},
]
PENALTY = {"frequency_penalty": 0.3}
REQUESTS = [
    {
        "input_ids": [5 + i, *range(20, 31)],
        "sampling_params": {
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "sampling_seed": 100 + i,
            "custom_params": {"smc": smc},
            **(PENALTY if i % 4 == 3 else {}),
        },
    }
    for i, smc in enumerate(MODES)
]


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    model = {"vocab_size": 64, "scale": 0.3}
    return tiny(seed=1, **model), tiny(seed=2, **model)


def flush(engine: Any) -> None:
    """Empty the cache of an engine that comes to rest; SGLang looks for leaks before it does."""
    deadline = time.monotonic() + 60
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "it does not come to rest"
        time.sleep(0.05)


def alone(engine: Any) -> list[list[int]]:
    """The texts of the requests one by one, the same with an empty cache and behind its prompt."""
    texts = []
    for asked in REQUESTS:
        flush(engine)
        cold, hit = engine.generate(**asked), engine.generate(**asked)
        assert cold["meta_info"]["cached_tokens"] == 0 < hit["meta_info"]["cached_tokens"]
        assert cold["output_ids"] == hit["output_ids"]
        texts.append(cold["output_ids"])
    return texts


def test_a_text_is_its_seeds_up_to_the_retraction(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and cold, behind a cache hit, with prompts in pieces, and in company."""
    whole = engine(**smc_arguments(*pair, **SERVER, chunked_prefill_size=512))
    texts = alone(whole)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # but never the last one
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "12")
    running = engine(**smc_arguments(*pair, **SERVER, chunked_prefill_size=5))
    assert alone(running) == texts
    flush(running)

    stories = streams(running, REQUESTS, timeout=600)
    ends = [chunks[-1] for chunks in stories]
    assert all(len(end["output_ids"]) == TOKENS for end in ends)
    assert all(end["meta_info"]["finish_reason"]["type"] == "length" for end in ends)
    before = [undisturbed(chunks) for chunks in stories]
    assert before == [text[: len(said)] for text, said in zip(texts, before, strict=True)]
    # Some had said something when they lost their KV, and draw the rest of their texts anew.
    retracted = [i for i, end in enumerate(ends) if end["meta_info"]["num_retractions"]]
    said = [len(before[i]) for i in retracted]
    assert max(said, default=0) > 0, said
    assert any(ends[i]["output_ids"] != texts[i] for i in retracted)
    calm = set(range(len(ends))) - set(retracted)
    assert calm and all(ends[i]["output_ids"] == texts[i] for i in calm)
    flush(running)
    assert running.generate(**REQUESTS[0])["output_ids"] == texts[0]


def undisturbed(chunks: list[dict[str, Any]]) -> list[int]:
    """What a stream said before its request was retracted, or all of it."""
    calm = [chunk for chunk in chunks if chunk["meta_info"]["num_retractions"] == 0]
    return calm[-1]["output_ids"] if calm else []
