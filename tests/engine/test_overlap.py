"""The overlap schedule, where the host hears of each round one round late, changes no answer.

Staggered arrivals, ends in every column, stop texts (whose rounds wait for the host), settings of
all kinds, and aborts; the memory checks of the engine fixture run throughout. The load tests run
under both schedules, too, with retraction.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

from sglang_smc.options.server import CPU_OVERLAP_ENV
from sglang_smc.upstream import resolved

pytestmark = pytest.mark.engine

CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2, "num_steps": 1},
    {"mode": "exact"},
    {"mode": "mixed", "num_particles": 3},
    {"power": 2.0},
    {"resample_at": "token", "ess_threshold": 1.0, "resampling_method": "ssp"},
    {"return_particles": True},
)


def request(index: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": 1 + (index * 7) % 40,
        "sampling_seed": index,
        "temperature": 0.0 if index % 5 == 0 else 0.8,
        "ignore_eos": index % 2 == 0,
        "custom_params": {"smc": CHOICES[index % len(CHOICES)]},
    }
    if index % 4 == 1:
        params["stop"] = ["t9 ", "t17 t"]
    prompt = [3 + (index * 5 + i) % 60 for i in range(1 + index % 9)]
    return {"input_ids": prompt, "sampling_params": params, "rid": f"overlap-{index:03}"}


def serve(engine: Any, indices: list[int], aborted: frozenset[int]) -> dict[int, dict[str, Any]]:
    """Answers of requests that arrive one after another; some are aborted at their first chunk."""

    async def one(index: int) -> dict[str, Any]:
        await asyncio.sleep(0.03 * index)
        chunks = []
        async for chunk in await engine.async_generate(stream=True, **request(index)):
            chunks.append(chunk)
            if index in aborted:
                engine.tokenizer_manager.abort_request(rid=request(index)["rid"])
        return chunks[-1]

    async def everything() -> list[dict[str, Any]]:
        return await asyncio.wait_for(asyncio.gather(*map(one, indices)), timeout=300)

    answers = asyncio.get_event_loop().run_until_complete(everything())
    return dict(zip(indices, answers, strict=True))


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """All that a request is told of itself; arrivals move it between batches, which round."""
    info = answer["meta_info"]
    own = {name: info[name] for name in info if name.startswith("spec_smc_")}
    for name, value in own.items():
        if isinstance(value, float):
            own[name] = pytest.approx(value, rel=1e-3, abs=1e-3)
    if "spec_smc_particles" in own:
        own["spec_smc_particles"] = [one["output_ids"] for one in own["spec_smc_particles"]]
    ends = {name: info.get(name) for name in ("finish_reason", "spec_verify_ct")}
    return {"output_ids": answer["output_ids"], **ends, **own}


def test_results_one_round_late_change_no_answer(
    engine: Callable[..., Any], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny(seed=1, vocab_size=64, scale=0.3), tiny(seed=2, vocab_size=64, scale=0.3)
    arguments = smc_arguments(*pair, num_particles=4, num_steps=3, max_lag=24)
    indices, aborted = list(range(42)), frozenset({8, 16, 24})
    found = {}
    for overlap in (False, True):
        monkeypatch.setenv(CPU_OVERLAP_ENV, str(int(overlap)))
        running = engine(**arguments)
        assert resolved(running.server_args).disable_overlap_schedule is not overlap
        found[overlap] = serve(running, indices, aborted)
    kept = [index for index in indices if index not in aborted]
    for index in kept:
        ours, late = essence(found[False][index]), essence(found[True][index])
        assert late == ours, request(index)
    texts = {tuple(found[True][index]["output_ids"]) for index in kept}
    assert len(texts) > len(kept) // 2
    ends = {found[True][index]["meta_info"]["finish_reason"]["type"] for index in kept}
    assert ends == {"stop", "length"}
