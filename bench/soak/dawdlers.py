"""Run clients that hold a connection and hardly use it: slow readers and writers ("slow loris").

They use raw sockets, since an HTTP library would read and write by itself.
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
BREATH = 1.0  # seconds between bytes
LEAST_BUFFER = 2048  # kernel receive buffer of a reader in bytes; Linux doubles it
BODY_BYTES = 1 << 20  # declared length of a slow body


class Dawdlers:
    """Keeps ``number`` slow clients at a server, a third of each kind.

    ``moved`` counts bytes by kind. ``ended`` counts connections that the server has closed; each
    is replaced by another.
    """

    def __init__(self, url: str, number: int, body: dict[str, Any]) -> None:
        self.moved: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._address = urlsplit(url).hostname, urlsplit(url).port
        self._number = number
        self._body = body

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[Dawdlers]:
        """Run the clients for the ``async with`` block; all disconnect at its end."""
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
        """Request a stream and read one byte of it per second."""
        loop = asyncio.get_running_loop()
        body = json.dumps({**self._body, "stream": True})
        await loop.sock_sendall(one, _head(len(body)) + b"\r\n" + body.encode())
        while byte := await loop.sock_recv(one, 1):
            self.moved["reader"] += len(byte)
            await asyncio.sleep(BREATH)

    async def _write(self, one: socket.socket, kind: str) -> None:
        """Send endless headers, or a body, one byte per second."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, _head(BODY_BYTES) + (b"\r\n" if kind == "body" else b"X-A: "))
        while not await _has_closed(one):
            await loop.sock_sendall(one, b"a" if kind == "headers" else b" ")
            self.moved[kind] += 1


async def _has_closed(one: socket.socket) -> bool:
    """Wait a second; return whether the server has sent anything, which ends the connection."""
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(one, 1), BREATH)
    except asyncio.TimeoutError:
        return False
    return True


def _head(length: int) -> bytes:
    """Return the start of a request, which a header or an empty line may follow."""
    lines = ("POST /generate HTTP/1.1", "Host: server", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {length}", ""]).encode()
