"""A process that holds one engine and answers the benchmark's questions, one line of JSON each.

Apart from the benchmark, because an engine takes its environment with it, ends the process that
holds it when it fails, and has to live beside another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import warnings
from typing import Any

#: Beyond any answer: a chunk for the first token and one for the end, none between.
ONE_CHUNK = 1_000_000
KEPT = ("completion_tokens", "spec_verify_ct", "num_retractions")
KEPT_PREFIX = "spec_smc_"


async def stream(engine: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """One request: the times of its first token and of its end, and what the server says of it."""
    params = {**params, "stream_interval": ONE_CHUNK}
    first, end, info = None, 0.0, {}
    generator = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
    async for chunk in generator:
        end = time.perf_counter()
        first = first or end
        info = chunk["meta_info"]
    kept = {k: v for k, v in info.items() if k in KEPT or k.startswith(KEPT_PREFIX)}
    return {"first": first, "end": end, "info": kept}


def measure(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    """All requests at once; times in seconds since they were sent."""

    async def all_of_them() -> list[dict[str, Any]]:
        pairs = zip(question["prompts"], question["params"], strict=True)
        return await asyncio.gather(*(stream(engine, *pair) for pair in pairs))

    engine.flush_cache()  # a prompt that was seen before would cost nothing
    start = time.perf_counter()
    found = engine.loop.run_until_complete(all_of_them())
    return {
        "first": [one["first"] - start for one in found],
        "end": [one["end"] - start for one in found],
        "infos": [one["info"] for one in found],
    }


def answer(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Requests to time, keywords of `generate`, or what the server says of itself."""
    if "info" in question:
        return {"info": engine.get_server_info()["internal_states"]}
    if "generate" not in question:
        return measure(engine, question)
    try:
        return {"answers": engine.generate(**question["generate"])}
    except ValueError as error:  # a request that is refused; the engine lives
        return {"refused": str(error)}


def main() -> None:
    """Start the engine of the first line, say so, and answer until the input ends."""
    # Engines print as they like; the answers keep the real output for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    arguments = json.loads(sys.stdin.readline())
    import sglang

    engine = sglang.Engine(**arguments)
    try:
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            print(json.dumps(answer(engine, json.loads(line)), default=str), file=answers)
    finally:
        engine.shutdown()


if __name__ == "__main__":  # an engine's own processes import this file too
    main()
