"""The soak's slow clients: a byte now and then, and the connection is held."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from soak import dawdlers
from soak.dawdlers import KINDS, Dawdlers

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY = {"input_ids": [5, 6]}


def run(handle: Handler, done: Callable[[Dawdlers], bool]) -> Dawdlers:
    """Three dawdlers, one of each kind, at a server, until they have done so much."""

    async def main() -> Dawdlers:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        slow = Dawdlers(f"http://127.0.0.1:{port}", len(KINDS), BODY)
        async with server, slow.at_work():
            while not done(slow):
                await asyncio.sleep(0.01)
        return slow

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dawdlers, "BREATH", 0.01)


def test_each_kind_goes_on_for_ever() -> None:
    heads: list[bytes] = []

    # As a server does: it answers once all of the request has come.
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readline()
        while (line := await reader.readline()) not in (b"", b"\r\n"):
            head += line
        heads.append(head)
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_000)

    found = run(handle, lambda slow: min((slow.moved[kind] for kind in KINDS), default=0) > 20)
    assert not found.ended
    assert max(found.moved.values()) < 2000  # nobody reads or writes at once what he could
    # Those who drip their headers hang up in the middle of one.
    assert len(heads) == len(KINDS)
    assert all(b"POST /generate HTTP/1.1\r\n" in head for head in heads)
    assert sum(b"X-A: aaa" in head for head in heads) == 1


def test_who_is_sent_away_comes_again() -> None:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    found = run(handle, lambda slow: all(slow.ended[kind] > 1 for kind in KINDS))
    assert sum(found.moved.values()) < 50
