"""Traces of real engines: alone, streamed, several of one prompt, beside others, retracted."""

from collections.abc import Callable
from typing import Any

import pytest
from crowd import streams
from tiny_models import smc_arguments
from trace_replay import read, replay

from sglang_smc.server import refusals

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("schedule")]

TOKENS = 40
SERVER = {"num_particles": 4, "num_steps": 3, "max_lag": 32, "max_running_requests": 9}
PROMPT = [7, 8, 9, 10]
CHOICES: list[dict[str, Any]] = [
    {},
    {"mode": "exact"},
    {"mode": "mixed", "num_particles": 3},
    {"resample_at": "token", "ess_threshold": 1.0, "max_lag": 4},
    {"power": 2.0},
    {"return_particles": True, "num_particles": 2},
]


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    model = {"vocab_size": 64, "scale": 0.3}
    return tiny(seed=1, **model), tiny(seed=2, **model)


def asked(smc: dict[str, Any], seed: int = 5, **more: Any) -> dict[str, Any]:
    own = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "sampling_seed": seed}
    return {"input_ids": PROMPT, "sampling_params": {**own, "custom_params": {"smc": smc}, **more}}


def assert_told(answer: dict[str, Any], smc: dict[str, Any]) -> None:
    """A trace that comes to the answer: its text, its log-evidence, its number of rounds."""
    info = answer["meta_info"]
    trace = read(info)
    found = replay(trace, is_plain="power" not in smc)
    assert found.output_ids == answer["output_ids"]
    assert (trace.prompt_length, trace.mode) == (len(PROMPT), info["spec_smc_mode"])
    assert len(trace.rounds) == info["spec_smc_rounds_ct"]
    assert sum(one.resampled for one in trace.rounds) == info["spec_smc_resample_ct"]
    assert sum(one.ess for one in trace.rounds) == pytest.approx(
        info["spec_smc_ess_mean"] * len(trace.rounds)
    )
    if info.get("spec_smc_log_evidence") is not None:
        last = trace.rounds[-1].log_evidence
        assert last == pytest.approx(info["spec_smc_log_evidence"])
    for particle in info.get("spec_smc_particles") or ():
        assert particle["output_ids"] in found.particles


def test_a_trace_comes_to_its_answer_and_to_no_neighbours(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    """All kinds in one batch, each beside one without: red if that has a trace, or other texts."""
    running = engine(**smc_arguments(*pair, **SERVER))
    silent = [asked(smc) for smc in CHOICES]
    told = [asked({**smc, "trace": True}) for smc in CHOICES]
    batch = [one for both in zip(silent, told, strict=True) for one in both]
    together = {name: [one[name] for one in batch] for name in batch[0]}
    answers = running.generate(**together)
    for smc, plain, traced in zip(CHOICES, answers[::2], answers[1::2], strict=True):
        assert "spec_smc_trace" not in plain["meta_info"]
        assert plain["output_ids"] == traced["output_ids"]
        assert_told(traced, smc)


def test_streams_and_samples_have_their_own(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    running = engine(**smc_arguments(*pair, **SERVER))
    smc = {"trace": True}
    *chunks, last = running.generate(**asked(smc), stream=True)
    assert chunks and not any("spec_smc_trace" in chunk["meta_info"] for chunk in chunks)
    assert_told(last, smc)
    samples = running.generate(**asked(smc, n=3))
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3
    for sample in samples:
        assert_told(sample, smc)


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_short_answers(
    engine: Callable[..., Any], pair: tuple[str, str], max_new_tokens: int
) -> None:
    """What prefill draws is in no round, unless there is one behind it."""
    running = engine(**smc_arguments(*pair, **SERVER))
    answer = running.generate(**asked({"trace": True}, max_new_tokens=max_new_tokens))
    if max_new_tokens > 1:
        assert_told(answer, {})
    else:
        assert read(answer["meta_info"]).rounds == []


def test_too_large_a_trace_is_refused(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SGLang makes of no limit is all that the context leaves."""
    running = engine(**smc_arguments(*pair, **SERVER))
    monkeypatch.setattr(refusals, "MOST_TRACED", 16 * TOKENS)
    assert_told(running.generate(**asked({"trace": True})), {})
    for limit in (TOKENS + 1, None):
        with pytest.raises(ValueError, match=f"allowed: .* <= {16 * TOKENS}"):
            running.generate(**asked({"trace": True}, max_new_tokens=limit))


def test_retracted_ones_begin_anew(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if a round that was under way then is told, or if its tails live on."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "6")
    running = engine(**smc_arguments(*pair, **SERVER, chunked_prefill_size=5))
    requests = [
        asked({**smc, "trace": True}, seed=100 + i) for i, smc in enumerate([*CHOICES, {}, {}])
    ]
    ends = [chunks[-1] for chunks in streams(running, requests, timeout=300)]
    begun = 0
    for end, request in zip(ends, requests, strict=True):
        smc = request["sampling_params"]["custom_params"]["smc"]
        if "power" not in smc:
            assert_told(end, smc)
        rounds = read(end["meta_info"]).rounds
        begun += sum(one.begins is not None for one in rounds[1:])
    assert begun > 0, "nothing was retracted"
