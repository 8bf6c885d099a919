"""Serve one engine in a child process: each request and reply is a line of JSON.

A process apart from the benchmark, because an engine inherits its environment, ends its process
when it fails, and has to run beside another engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import warnings
from typing import Any

#: More than any answer's tokens: one chunk for the first token and one for the end.
ONE_CHUNK = 1_000_000
KEPT = ("completion_tokens", "spec_verify_ct", "num_retractions")
KEPT_PREFIX = "spec_smc_"


async def stream(engine: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Stream one request; return the times of its first token and end, and its ``meta_info``."""
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
    """Run all requests at once; return times in seconds since they were sent."""

    async def all_of_them() -> list[dict[str, Any]]:
        pairs = zip(question["prompts"], question["params"], strict=True)
        return await asyncio.gather(*(stream(engine, *pair) for pair in pairs))

    engine.flush_cache()  # a cached prompt would cost nothing
    start = time.perf_counter()
    found = engine.loop.run_until_complete(all_of_them())
    return {
        "first": [one["first"] - start for one in found],
        "end": [one["end"] - start for one in found],
        "infos": [one["info"] for one in found],
    }


def answer(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Return timings of requests, outputs of `generate`, or the server's state; or profile."""
    if "info" in question:
        return {"info": engine.get_server_info()["internal_states"]}
    if "profile" in question:
        return {"profile": engine.start_profile(**question["profile"])}
    if "generate" not in question:
        return measure(engine, question)
    try:
        return {"answers": engine.generate(**question["generate"])}
    except ValueError as error:  # an invalid request; the engine keeps running
        return {"refused": str(error)}


def main() -> None:
    """Start the engine of the first line, report it ready, and reply until the input ends."""
    # Engines print to stdout; the replies keep the original one for themselves.
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


if __name__ == "__main__":  # an engine's child processes import this file too
    main()
