"""Clients that hold a connection and hardly use it: slow readers, and slow writers ("slow loris").

They are raw sockets: an HTTP library would read and write for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

KINDS = ("reader", "headers", "body")
BREATH = 1.0  # seconds from one byte to the next
LEAST_BUFFER = 2048  # bytes that the kernel keeps for a reader; Linux doubles it
BODY_BYTES = 1 << 20  # that a slow body says it has


class Dawdlers:
    """Keeps ``number`` of them at a server, a third of each kind.

    ``moved`` counts bytes by kind. ``ended`` counts connections that the server has closed; for
    each comes another.
    """

    def __init__(self, url: str, number: int, body: dict[str, Any]) -> None:
        self.moved: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._address = urlsplit(url).hostname, urlsplit(url).port
        self._number, self._body = number, body

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[Dawdlers]:
        """Until this ends, when all of them hang up."""
        kinds = itertools.islice(itertools.cycle(KINDS), self._number)
        tasks = [asyncio.create_task(self._again_and_again(kind)) for kind in kinds]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _again_and_again(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.closing(socket.socket()) as one, contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LEAST_BUFFER)
                one.setblocking(False)
                await loop.sock_connect(one, self._address)
                await (self._read(one) if kind == "reader" else self._write(one, kind))
            self.ended[kind] += 1
            await asyncio.sleep(BREATH)

    async def _read(self, one: socket.socket) -> None:
        """Ask for a stream and take a byte of it a second."""
        loop, body = asyncio.get_running_loop(), json.dumps({**self._body, "stream": True})
        await loop.sock_sendall(one, _head(len(body)) + b"\r\n" + body.encode())
        while byte := await loop.sock_recv(one, 1):
            self.moved["reader"] += len(byte)
            await asyncio.sleep(BREATH)

    async def _write(self, one: socket.socket, kind: str) -> None:
        """Send headers without end, or a body, a byte a second."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, _head(BODY_BYTES) + (b"\r\n" if kind == "body" else b"X-A: "))
        while not await _has_closed(one):
            await loop.sock_sendall(one, b"a" if kind == "headers" else b" ")
            self.moved[kind] += 1


async def _has_closed(one: socket.socket) -> bool:
    """Wait a breath; whether the server has said anything, which ends the connection."""
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(one, 1), BREATH)
    except asyncio.TimeoutError:
        return False
    return True


def _head(length: int) -> bytes:
    """A request's beginning, up to where another header or an empty line may follow."""
    lines = ("POST /generate HTTP/1.1", "Host: server", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {length}", ""]).encode()
