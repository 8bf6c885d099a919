"""Clients of one server, all in one event loop: they ask, wait, abort or hang up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from soak.traffic import Request

PATIENCE = 180.0  # seconds that any answer may take, queueing included


@dataclass(frozen=True)
class Ending:
    """How one request ended for its client."""

    request: Request
    reason: str  # SGLang's finish reason, "left" without one, or what went wrong
    output_ids: list[int]
    retractions: int = 0
    is_error: bool = False

    @property
    def is_verifiable(self) -> bool:
        """Whether its text follows from its seed: one that is retracted is drawn anew."""
        return bool(self.output_ids) and self.retractions == 0 and not self.is_error


class Clients:
    """Keeps up to ``crowd`` requests with the server, one after another as they come.

    Args:
        url: of the server.
        crowd: the most requests at once; more wait until one has ended.
        ended: is told of each.
    """

    def __init__(self, url: str, crowd: int, ended: Callable[[Ending], None]) -> None:
        self._url, self._crowd, self._ended = url, crowd, ended

    async def run(self, requests: Iterator[Request], seconds: float) -> None:
        """Send requests for so long, then wait for all that are under way."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._crowd)
        timeout = httpx.Timeout(PATIENCE)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=timeout, limits=limits, trust_env=False
        ) as client:
            room, deadline = asyncio.Semaphore(self._crowd), time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < deadline:
                    request = next(requests)
                    await room.acquire()
                    group.create_task(self._serve(client, request, room))
                    await asyncio.sleep(request.pause)

    async def alone(self, requests: list[Request], done: Callable[[], None]) -> list[list[int]]:
        """The texts of the same requests, one after another."""
        texts = []
        async with httpx.AsyncClient(
            base_url=self._url, timeout=PATIENCE, trust_env=False
        ) as client:
            for request in requests:
                answer = await client.post("/generate", json=request.body)
                texts.append(answer.raise_for_status().json()["output_ids"])
                done()
        return texts

    async def _serve(
        self, client: httpx.AsyncClient, request: Request, room: asyncio.Semaphore
    ) -> None:
        try:
            ask = _stream if request.stream else _ask
            ending = await ask(client, request)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            ending = Ending(request, f"{type(error).__name__}: {error}", [], is_error=True)
        finally:
            room.release()
        self._ended(ending)


async def _ask(client: httpx.AsyncClient, request: Request) -> Ending:
    sent = asyncio.create_task(client.post("/generate", json=request.body))
    if request.leaves is not None:
        await asyncio.wait([sent], timeout=request.after)
        if not sent.done() and request.leaves == "disconnect":
            sent.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sent
            return Ending(request, "left", [])
        if not sent.done():
            await _abort(client, request)
    answer = await sent
    if answer.status_code != 200:
        return Ending(request, f"HTTP {answer.status_code}: {answer.text}", [], is_error=True)
    return _ending(request, answer.json())


async def _stream(client: httpx.AsyncClient, request: Request) -> Ending:
    last: dict[str, Any] | None = None
    num_chunks = 0
    async with contextlib.aclosing(_chunks(client, request)) as chunks:
        async for chunk in chunks:
            if "error" in chunk:
                return Ending(request, chunk["error"]["message"], [], is_error=True)
            last, num_chunks = chunk, num_chunks + 1
            if request.leaves is not None and num_chunks == request.at_chunk:
                if request.leaves == "disconnect":
                    ids, info = last["output_ids"], last["meta_info"]
                    return Ending(request, "left", ids, info["num_retractions"])
                await _abort(client, request)
    if last is None:
        return Ending(request, "a stream without a chunk", [], is_error=True)
    return _ending(request, last)


async def _chunks(client: httpx.AsyncClient, request: Request) -> AsyncIterator[dict[str, Any]]:
    body = {**request.body, "stream": True}
    async with client.stream("POST", "/generate", json=body) as lines:
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def _abort(client: httpx.AsyncClient, request: Request) -> None:
    await client.post("/abort_request", json={"rid": request.rid})


def _ending(request: Request, answer: dict[str, Any]) -> Ending:
    info = answer["meta_info"]
    reason = (info["finish_reason"] or {"type": "no finish reason"})["type"]
    allowed = {"stop", "length"} | ({"abort"} if request.leaves == "abort" else set())
    return Ending(
        request,
        reason,
        answer["output_ids"],
        info["num_retractions"],
        is_error=reason not in allowed,
    )
