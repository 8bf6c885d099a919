"""Run clients of one server in one event loop: they wait, abort or disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import httpx
from soak.answers import Ending, ending, failed, was_queued
from soak.traffic import Request

PATIENCE = 600.0  # timeout of an answer in seconds, including the queue
NEVER_BEGUN = 499  # HTTP status of an abort before SGLang has split a request into n


class Clients:
    """Keeps up to ``crowd`` requests at the server.

    Args:
        url: of the server.
        crowd: the most requests at once; more wait until one has ended.
        ended: called with the endings of each request.
    """

    def __init__(self, url: str, crowd: int, ended: Callable[[list[Ending]], None]) -> None:
        self._url, self._crowd, self._ended = url, crowd, ended
        self._is_gone = False  # the server

    async def run(
        self, requests: Iterable[Request], seconds: float, sent: Callable[[], object]
    ) -> None:
        """Send requests for at most ``seconds``, call ``sent`` at the end, and await the rest."""
        # One connection per request: the server closes one that has been idle for five seconds, and
        # a request that is sent at that moment is lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with self._client(limits=limits) as client:
            room, deadline = asyncio.Semaphore(self._crowd), time.monotonic() + seconds
            under_way: set[asyncio.Task[None]] = set()
            for request in requests:
                await room.acquire()
                if time.monotonic() >= deadline or self._is_gone:
                    break
                under_way = {task for task in under_way if not task.done() or task.exception()}
                under_way.add(asyncio.create_task(self._serve(client, request, room)))
                await asyncio.sleep(request.pause)
            sent()
            await asyncio.gather(*under_way)

    async def alone(self, answers: list[Ending], done: Callable[[], object]) -> list[Ending]:
        """Request the same answers again, one at a time."""
        found = []
        async with self._client() as client:
            for answer in answers:
                found.append(await self._again(client, answer))
                done()
        return found

    async def _again(self, client: httpx.AsyncClient, answer: Ending) -> Ending:
        request, index = answer.request, answer.index
        try:
            came = await client.post("/generate", json=request.alone(index))
            return ending(request, index, came.raise_for_status().json())
        except httpx.HTTPError as error:
            return Ending(request, index, "failed", problem=f"{type(error).__name__}: {error}")

    def _client(self, **more: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=PATIENCE, trust_env=False, **more)

    async def _serve(
        self, client: httpx.AsyncClient, request: Request, room: asyncio.Semaphore
    ) -> None:
        try:
            endings = await serve(client, request)
        except httpx.HTTPError as error:
            self._is_gone = self._is_gone or isinstance(error, httpx.ConnectError)
            endings = failed(request, f"{type(error).__name__}: {error}")
        finally:
            room.release()
        self._ended(endings)


async def serve(client: httpx.AsyncClient, request: Request) -> list[Ending]:
    """Send a request, leave early if it is set to, and return its endings.

    Raises:
        httpx.HTTPError: the server does not respond.
    """
    try:
        return await _manner(request)(client, request)
    except (LookupError, TypeError, ValueError) as error:
        return failed(request, f"cannot be read: {type(error).__name__}: {error}")


def _manner(request: Request) -> Callable[..., Awaitable[list[Ending]]]:
    """Return the function that sends a request in the configured way."""
    if request.leaves == "half":
        return _break_off
    return _stream if request.stream and request.leaves != "unheard" else _ask


class _BrokenOffError(Exception):
    """A client disconnected in the middle of its request."""


async def _break_off(client: httpx.AsyncClient, request: Request) -> list[Ending]:
    body = json.dumps(request.body).encode()

    async def half() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        await asyncio.sleep(min(request.after, 1.0))
        raise _BrokenOffError

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    with contextlib.suppress(_BrokenOffError):
        await client.post("/generate", content=half(), headers=headers)
    return _unheard(request)


def _unheard(request: Request) -> list[Ending]:
    return [Ending(request, index, "left") for index in range(request.n)]


async def _ask(client: httpx.AsyncClient, request: Request) -> list[Ending]:
    sent = asyncio.create_task(client.post("/generate", json=request.body))
    if request.leaves is not None:
        await asyncio.wait([sent], timeout=request.after)
        if not sent.done() and request.leaves != "abort":
            sent.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sent
            return _unheard(request)
        if not sent.done():
            await _abort(client, request)
    answer = await sent
    if request.stream:  # set to disconnect, but the complete stream came first
        return _unheard(request)
    if answer.status_code == NEVER_BEGUN and request.leaves == "abort":
        return [Ending(request, index, "abort") for index in range(request.n)]
    if answer.status_code != 200:
        return failed(request, f"HTTP {answer.status_code}: {answer.text}")
    found = answer.json()
    answers = found if request.n > 1 else [found]
    if len(answers) != request.n:
        return failed(request, f"{len(answers)} answers of {request.n}")
    return [ending(request, index, answer) for index, answer in enumerate(answers)]


async def _stream(client: httpx.AsyncClient, request: Request) -> list[Ending]:
    last: dict[int, dict[str, Any]] = {}
    undisturbed: dict[int, list[int]] = {}
    num_chunks, left = 0, False
    async with contextlib.aclosing(_chunks(client, request)) as chunks:
        async for chunk in chunks:
            if "error" in chunk:
                return failed(request, chunk["error"]["message"])
            index = chunk.get("index", 0)
            if index in last and (problem := _join(last[index], chunk)):
                return failed(request, problem)
            last[index], num_chunks = chunk, num_chunks + 1
            if chunk["meta_info"].get("num_retractions") == 0:
                undisturbed[index] = chunk["output_ids"]
            is_late = request.leaves == "disconnect" and chunk["meta_info"]["finish_reason"]
            if request.leaves is not None and (num_chunks == request.at_chunk or is_late):
                left = request.leaves == "disconnect"
                if left:
                    break
                await _abort(client, request)
    missing = [index for index in range(request.n) if index not in last]
    if missing and not left:
        return failed(request, f"a stream without a chunk of {missing}")
    unseen = [Ending(request, index, "left") for index in missing]
    found = [
        replace(ending(request, index, chunk, left=left), undisturbed=undisturbed.get(index, []))
        for index, chunk in last.items()
    ]
    return [*found, *unseen]


def _join(before: dict[str, Any], chunk: dict[str, Any]) -> str:
    """Return the fault of a chunk that does not extend the one before it, or ""."""
    old, new = before["output_ids"], chunk["output_ids"]
    if was_queued(chunk):
        chunk["output_ids"] = old
    elif new[: len(old)] != old:
        return f"a stream said {old} and then {new}"
    return ""


async def _chunks(
    client: httpx.AsyncClient, request: Request
) -> AsyncGenerator[dict[str, Any], None]:
    async with client.stream("POST", "/generate", json=request.body) as lines:
        if lines.status_code != 200:  # before the first chunk, when no client has left yet
            raise ValueError(f"HTTP {lines.status_code}: {(await lines.aread()).decode()}")
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def _abort(client: httpx.AsyncClient, request: Request) -> None:
    await client.post("/abort_request", json={"rid": request.rid})
