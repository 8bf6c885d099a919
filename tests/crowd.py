"""Many clients of one engine, who come one after another, stream, and in part leave early."""

import asyncio
from collections.abc import Callable, Container, Sequence
from typing import Any


def last_chunks(
    engine: Any,
    requests: Sequence[dict[str, Any]],
    *,
    arrival: Callable[[int], float],
    aborted: Container[int],
    after: int = 1,
    timeout: float,
) -> list[dict[str, Any]]:
    """The end of each request's stream; arguments are those of `streams`."""
    found = streams(
        engine, requests, arrival=arrival, aborted=aborted, after=after, timeout=timeout
    )
    return [chunks[-1] for chunks in found]


def streams(
    engine: Any,
    requests: Sequence[dict[str, Any]],
    *,
    arrival: Callable[[int], float] = lambda _: 0.0,
    aborted: Container[int] = (),
    after: int = 1,
    timeout: float,
) -> list[list[dict[str, Any]]]:
    """Each request's stream, chunk by chunk; a chunk has all that was said by then.

    Args:
        engine: an `sgl.Engine`.
        requests: keywords of `async_generate`.
        arrival: seconds after the start at which the i-th request comes.
        aborted: indices of those that are aborted, once they have ``after`` tokens.
        timeout: seconds for all of them.
    """

    async def one(index: int, given: dict[str, Any]) -> list[dict[str, Any]]:
        rid, chunks = f"crowd-{index:03}", []  # SGLang aborts by prefix
        await asyncio.sleep(arrival(index))
        async for chunk in await engine.async_generate(**given, stream=True, rid=rid):
            # SGLang goes on writing into the list that it hands out.
            chunks.append({**chunk, "output_ids": list(chunk["output_ids"])})
            if index in aborted and chunk["meta_info"]["completion_tokens"] >= after:
                engine.tokenizer_manager.abort_request(rid=rid)
        return chunks

    async def everyone() -> list[list[dict[str, Any]]]:
        asking = (one(index, given) for index, given in enumerate(requests))
        return await asyncio.wait_for(asyncio.gather(*asking), timeout=timeout)

    return asyncio.get_event_loop().run_until_complete(everyone())
