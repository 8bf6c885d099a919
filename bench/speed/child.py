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
from collections.abc import Callable
from typing import Any

#: More than any answer's tokens: one chunk for the first token and one for the end.
ONE_CHUNK = 1_000_000
#: Writes a reply.
Tell = Callable[[dict[str, Any]], None]


async def stream(engine: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Stream one request; return the times of its first token and end, and its ``meta_info``."""
    params = {**params, "stream_interval": ONE_CHUNK}
    first, end, info = None, 0.0, {}
    generator = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
    async for chunk in generator:
        end = time.perf_counter()
        first = first or end
        info = chunk["meta_info"]
    return {"first": first, "end": end, "info": info}


def measure(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Run all requests at once; return times in seconds since they were sent."""

    async def all_of_them() -> list[dict[str, Any]]:
        pairs = zip(question["prompts"], question["params"], strict=True)
        return await asyncio.gather(*(stream(engine, *pair) for pair in pairs))

    start = time.perf_counter()
    found = engine.loop.run_until_complete(all_of_them())
    return {
        "first": [one["first"] - start for one in found],
        "end": [one["end"] - start for one in found],
        "infos": [one["info"] for one in found],
    }


async def each(engine: Any, question: dict[str, Any], tell: Tell) -> None:
    """Run all requests at once, and tell each answer as soon as it is complete."""

    async def one(place: int, prompt: list[int], params: dict[str, Any]) -> None:
        try:
            found = await engine.async_generate(input_ids=prompt, sampling_params=params)
        except ValueError as error:  # an invalid request; the engine keeps running
            found = {"refused": str(error)}
        tell({"place": place, **found})

    pairs = zip(question["prompts"], question["params"], strict=True)
    await asyncio.gather(*(one(place, *pair) for place, pair in enumerate(pairs)))


def answer(engine: Any, question: dict[str, Any], tell: Tell) -> None:
    """Tell timings of requests, their answers, or the server's state; or profile."""
    if "info" in question:
        tell({"info": engine.get_server_info()["internal_states"]})
    elif "profile" in question:
        tell({"profile": engine.start_profile(**question["profile"])})
    elif "generate" in question:
        try:
            tell({"answers": engine.generate(**question["generate"])})
        except ValueError as error:
            tell({"refused": str(error)})
    else:
        engine.flush_cache()  # a cached prompt would cost nothing, and n-gram matches would find it
        if question["timed"]:
            tell(measure(engine, question))
        else:
            engine.loop.run_until_complete(each(engine, question, tell))


def main() -> None:
    """Start the engine of the first line, report it ready, and reply until the input ends."""
    # Engines print to stdout; the replies keep the original one for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    arguments = json.loads(sys.stdin.readline())
    import sglang

    def tell(content: dict[str, Any]) -> None:
        print(json.dumps(content, default=str), file=answers)

    engine = sglang.Engine(**arguments)
    try:
        tell({"ready": True})
        for line in sys.stdin:
            answer(engine, json.loads(line), tell)
    finally:
        engine.shutdown()


if __name__ == "__main__":  # an engine's child processes import this file too
    main()
