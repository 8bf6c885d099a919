"""Run clients of one server in one event loop: they wait, abort or disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from soak.traffic import SoakRequest

PATIENCE = 600.0  # timeout of an answer in seconds, including the queue
# Of an abort before SGLang has split a request into n, or while its grammar compiles.
NEVER_BEGUN = re.compile("HTTP 499|HTTP 400: .*Aborted by AbortReq")
LEFT = ("left", "abort")  # finish reasons of incomplete answers

# --- Answers, each checked by itself


@dataclass(frozen=True)
class Ending:
    """The end of one answer for its client; a request for n answers has n."""

    request: SoakRequest
    index: int  # of n
    reason: str  # SGLang's finish reason, or "left" without one
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these tokens, if requested
    retractions: int = 0
    undisturbed: list[int] = field(default_factory=list)  # received before the first retraction
    problem: str = ""  # its fault, if any

    @property
    def name(self) -> str:
        """Return a unique name for reports."""
        return f"{self.request.rid}[{self.index}]"

    @property
    def seeded(self) -> list[int]:
        """Return the tokens that the seed determines: those before a first retraction, if any."""
        return self.undisturbed if self.retractions else self.output_ids

    @property
    def is_whole(self) -> bool:
        """Return whether all tokens that its seed determines are there."""
        return not self.retractions and self.reason not in LEFT

    @property
    def is_verifiable(self) -> bool:
        """Return whether there is something to compare with the same request alone."""
        return bool(self.seeded) and not self.problem


def failed(request: SoakRequest, problem: str) -> list[Ending]:
    """Return the ending of a request without a readable answer."""
    return [Ending(request, 0, "failed", problem=problem)]


def unheard(request: SoakRequest) -> list[Ending]:
    """Return the endings of a request of which nothing came."""
    return [Ending(request, index, "left") for index in range(request.n)]


def ending(
    request: SoakRequest, index: int, answer: dict[str, Any], *, left: bool = False
) -> Ending:
    """Return the ending of a complete answer or, with ``left``, of a stream's last chunk."""
    info = answer["meta_info"]
    ids = answer["output_ids"]
    finish = info["finish_reason"] or {"type": "left" if left else "no finish reason"}
    return Ending(
        request,
        index,
        finish["type"],
        ids,
        [logprob for logprob, *_ in info.get("output_token_logprobs", [])],
        # An abort in the queue reports no retractions; with tokens it was retracted before.
        info.get("num_retractions", int(bool(ids))),
        problem=_complaint(request, answer, finish["type"]),
    )


def was_queued(answer: dict[str, Any]) -> bool:
    """Return whether it was aborted in the queue; SGLang then sends only a stream's last token."""
    return "num_retractions" not in answer["meta_info"]


def _complaint(request: SoakRequest, answer: dict[str, Any], reason: str) -> str:
    """Return the fault of an answer that needs no second request to find, or ""."""
    ids = answer["output_ids"]
    params = request.params
    allowed = {"stop", "length", "left"} | ({"abort"} if request.leaves == "abort" else set())
    least = params["min_new_tokens"]
    most = params["max_new_tokens"]
    if reason not in allowed:
        return f"ended with {answer['meta_info']['finish_reason']}"
    if len(ids) > most or (reason == "length" and len(ids) != most):
        return f"has {len(ids)} tokens of {most} and ended with {reason}"
    if reason == "stop" and len(ids) < least:
        return f"has {len(ids)} tokens, and at least {least} were asked for"
    if request.grammar and reason == "stop" and not request.grammar.is_legal(answer["text"]):
        return f"has the illegal text {answer['text']!r}"
    return "" if was_queued(answer) else _bad_logprobs(request, answer)


def _bad_logprobs(request: SoakRequest, answer: dict[str, Any]) -> str:
    """Return the fault of log-probabilities: each token has its own, and a row of each kind."""
    ids = answer["output_ids"]
    info = answer["meta_info"]
    options = request.options
    if not options.get("return_logprob"):
        return ""
    of_tokens = [token for _, token, _ in info["output_token_logprobs"]]
    if of_tokens != ids:
        return f"has log-probabilities of {of_tokens} and is {ids}"
    most = options.get("top_logprobs_num", 0)
    listed = options.get("token_ids_logprob", [])
    rows = (("output_top_logprobs", most), ("output_token_ids_logprobs", len(listed)))
    for name, width in rows:
        found = [len(row) for row in info[name]] if width else []
        if width and found != [width] * len(ids):
            return f"has {found} {name} beside {len(ids)} tokens, {width} of each asked for"
    return ""


# --- Clients


class Clients:
    """Keeps up to ``crowd`` requests at the server; calls ``ended`` with the endings of each."""

    def __init__(self, url: str, crowd: int, ended: Callable[[list[Ending]], None]) -> None:
        self._url = url
        self._crowd = crowd
        self._ended = ended
        self._is_gone = False  # the server

    async def run(
        self, requests: Iterable[SoakRequest], seconds: float, sent: Callable[[], object]
    ) -> None:
        """Send requests for at most ``seconds``, call ``sent`` at the end, and await the rest."""
        async with self._client() as client:
            room = asyncio.Semaphore(self._crowd)
            deadline = time.monotonic() + seconds

            async def one(request: SoakRequest) -> None:
                try:
                    endings = await self._tried(client, request)
                finally:
                    room.release()
                self._ended(endings)

            under_way: set[asyncio.Task[None]] = set()
            for request in requests:
                await room.acquire()
                if time.monotonic() >= deadline or self._is_gone:
                    break
                under_way = {task for task in under_way if not task.done() or task.exception()}
                under_way.add(asyncio.create_task(one(request)))
                await asyncio.sleep(request.pause)
            sent()
            await asyncio.gather(*under_way)

    async def alone(self, answers: list[Ending], done: Callable[[], object]) -> list[Ending]:
        """Request the same answers again, one at a time."""
        found = []
        async with self._client() as client:
            for one in answers:
                (again,) = await self._tried(client, one.request.alone(one.index))
                found.append(replace(again, request=one.request, index=one.index))
                done()
        return found

    def _client(self) -> httpx.AsyncClient:
        # One connection per request: the server closes one that has been idle for five seconds, and
        # a request that is sent at that moment is lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options: dict[str, Any] = {"timeout": PATIENCE, "trust_env": False, "limits": limits}
        return httpx.AsyncClient(base_url=self._url, **options)

    async def _tried(self, client: httpx.AsyncClient, request: SoakRequest) -> list[Ending]:
        try:
            return await serve(client, request)
        except httpx.HTTPError as error:
            self._is_gone = self._is_gone or isinstance(error, httpx.ConnectError)
            return failed(request, f"{type(error).__name__}: {error}")


async def serve(client: httpx.AsyncClient, request: SoakRequest) -> list[Ending]:
    """Send a request, leave early if it is set to, and return its endings.

    Raises:
        httpx.HTTPError: the server does not respond.
    """
    if request.leaves == "half":
        return await _break_off(client, request)
    by_time = request.leaves == "unheard" or not request.stream
    aborts = request.leaves == "abort"
    aborting = None
    if aborts and by_time:
        aborting = asyncio.create_task(_abort(client, request, request.after))
    patience = request.after if request.leaves and by_time and not aborts else None
    try:
        return await asyncio.wait_for(_answers(client, request), patience)
    except asyncio.TimeoutError:
        return unheard(request)
    except (LookupError, TypeError, ValueError) as error:
        return failed(request, f"cannot be read: {type(error).__name__}: {error}")
    finally:
        if aborting is not None:
            aborting.cancel()


async def _break_off(client: httpx.AsyncClient, request: SoakRequest) -> list[Ending]:
    """Disconnect in the middle of the request."""
    body = json.dumps(request.body).encode()

    async def half() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        await asyncio.sleep(min(request.after, 1.0))
        raise InterruptedError

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    with contextlib.suppress(InterruptedError):
        await client.post("/generate", content=half(), headers=headers)
    return unheard(request)


async def _answers(client: httpx.AsyncClient, request: SoakRequest) -> list[Ending]:
    """Return the endings of a request, of a stream those at the chunk where its client leaves."""
    last: dict[int, dict[str, Any]] = {}
    undisturbed: dict[int, list[int]] = {}
    num_chunks = 0
    left = False
    async with contextlib.aclosing(_chunks(client, request)) as chunks:
        async for chunk in chunks:
            if "error" in chunk:
                return failed(request, chunk["error"]["message"])
            index = chunk.get("index", 0)
            info = chunk["meta_info"]
            if index in last and (problem := _join(last[index], chunk)):
                return failed(request, problem)
            last[index] = chunk
            num_chunks += 1
            if info.get("num_retractions") == 0:
                undisturbed[index] = chunk["output_ids"]
            if request.leaves == "disconnect" and request.stream:
                if left := num_chunks == request.at_chunk or bool(info["finish_reason"]):
                    break
            elif request.leaves == "abort" and request.stream and num_chunks == request.at_chunk:
                await _abort(client, request)
    missing = [index for index in range(request.n) if index not in last]
    if missing and not left:
        return failed(request, f"no answer of {missing}")
    endings = (ending(request, index, chunk, left=left) for index, chunk in last.items())
    found = [replace(one, undisturbed=undisturbed.get(one.index, [])) for one in endings]
    return [*found, *(Ending(request, index, "left") for index in missing)]


def _join(before: dict[str, Any], chunk: dict[str, Any]) -> str:
    """Return the fault of a chunk that does not extend the one before it, or ""."""
    old = before["output_ids"]
    new = chunk["output_ids"]
    if was_queued(chunk):
        chunk["output_ids"] = old
    elif new[: len(old)] != old:
        return f"a stream said {old} and then {new}"
    return ""


async def _chunks(
    client: httpx.AsyncClient, request: SoakRequest
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a stream, or each answer of a request that does not stream."""
    async with client.stream("POST", "/generate", json=request.body) as lines:
        if lines.status_code != 200:
            said = f"HTTP {lines.status_code}: {(await lines.aread()).decode()}"
            if request.leaves != "abort" or not NEVER_BEGUN.match(said):
                raise ValueError(said)
            info = {"finish_reason": {"type": "abort"}}
            for index in range(request.n):
                yield {"index": index, "output_ids": [], "meta_info": info}
        elif not request.stream:
            found = json.loads(await lines.aread())
            for index, answer in enumerate(found if request.n > 1 else [found]):
                yield {"index": index, **answer}
        else:
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


async def _abort(client: httpx.AsyncClient, request: SoakRequest, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    await client.post("/abort_request", json={"rid": request.rid})
