"""Send JSON to a server, and ask it for as many top log-probabilities as it allows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar

import httpx

from sglang_smc_tools.commands import client_of

TIMEOUT = 1800.0  # seconds for one request, behind 63 others where a server takes one at a time
TOPS = (64, 32, 20, 8, 5, 1)  # top log-probabilities asked for, until a server allows them
Reply = TypeVar("Reply")


class RefusedError(ValueError):
    """A request that the server rejected."""


class Client:
    """A server's client; tests substitute toys that override `post`.

    Attributes:
        top: log-probabilities that are asked for; fewer once these are refused.
        deadline: of `time.monotonic`, after which no answer is read on.
    """

    top = TOPS[0]
    deadline = float("inf")

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.http = client_of(url, api_key, TIMEOUT)

    def with_top(self, ask: Callable[[int], Reply]) -> Reply:
        """Return the reply to as many top log-probabilities as the server allows.

        What is refused with the fewest, too, is refused for another reason, and changes no `top`.
        """
        for top in (self.top, *(fewer for fewer in TOPS if fewer < self.top)):
            try:
                reply = ask(top)
            except RefusedError:
                if top == TOPS[-1]:
                    raise
            else:
                self.top = min(self.top, top)  # others may have lowered it meanwhile
                return reply
        raise AssertionError("the last of TOPS returns or raises")

    def post(self, route: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of a reply.

        Raises:
            RefusedError: for HTTP 400 and 422.
            ValueError: for anything else that is no answer, with what to do.
        """
        with self._reply(route, body) as reply:
            return self._parsed(route, "".join(self._read(reply)))

    def stream(self, route: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed reply; errors are those of `post`."""
        with self._reply(route, {**body, "stream": True}) as reply:
            for line in self._lines(reply):
                data = line.removeprefix("data:").strip()
                if data.startswith("{"):
                    event = self._parsed(route, data)
                    if event.get("error"):
                        raise RefusedError(f"{self.url}{route}: {event['error']!r:.300}")
                    yield event

    def _read(self, reply: httpx.Response) -> Iterator[str]:
        """Yield a reply in pieces, until the deadline; a server may go on for ever."""
        for piece in reply.iter_text():
            if time.monotonic() > self.deadline:
                raise ValueError(f"{self.url}: the time was over within an answer: {piece[:80]!r}.")
            yield piece

    def _lines(self, reply: httpx.Response) -> Iterator[str]:
        rest = ""
        for piece in self._read(reply):
            *lines, rest = (rest + piece).split("\n")
            yield from lines
        yield rest

    def _parsed(self, route: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self.url}{route}: {text[:300]!r}; needed: the JSON.") from error

    @contextlib.contextmanager
    def _reply(self, route: str, body: Mapping[str, Any]) -> Iterator[httpx.Response]:
        where = self.url + route
        try:
            seconds = max(1.0, min(TIMEOUT, self.deadline - time.monotonic()))
            with self.http.stream("POST", route, json=body, timeout=seconds) as reply:
                if reply.status_code in (401, 403):
                    raise ValueError(f"{where}: the server wants a key. Give it with --api-key.")
                if not reply.is_success:
                    kind = RefusedError if reply.status_code in (400, 422) else ValueError
                    told = "".join(self._read(reply))[:500]
                    raise kind(f"{where}: HTTP {reply.status_code}: {told!r}.")
                yield reply
        except httpx.HTTPError as error:
            raise ValueError(
                f"{where}: the server stopped answering ({type(error).__name__}). Its own log says "
                "why."
            ) from error
