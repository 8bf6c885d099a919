"""Clients of a server that is having a hard time, and what must be true of it afterwards."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import httpx
from http_server import HANGS, Server

Found = TypeVar("Found")


def request(prompt: list[int], seed: int, *, tokens: int = 20, **params: Any) -> dict[str, Any]:
    """The body of a request to /generate, of a fixed length."""
    asked = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed, **params}
    return {"input_ids": prompt, "sampling_params": asked, "rid": f"fault-{seed:05}-{tokens:03}"}


def text_of(answer: dict[str, Any]) -> list[int]:
    """What was generated; a retracted request draws the rest of its text anew, so it has none."""
    assert answer["meta_info"]["num_retractions"] == 0
    return answer["output_ids"]


def assert_says(answer: httpx.Response, text: list[int]) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["num_retractions"] or answer.json()["output_ids"] == text


class FaultServer(Server):
    """A server that is asked many things at once."""

    def together(self, *asking: Coroutine[Any, Any, Found]) -> list[Found]:
        """Let them all run at once; none may take for ever."""

        async def everything() -> list[Found]:
            return await asyncio.wait_for(asyncio.gather(*asking), timeout=4 * HANGS)

        # Not asyncio.run, which would leave other tests without an event loop.
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(everything())
        finally:
            loop.close()

    def alone(self, bodies: list[dict[str, Any]]) -> list[list[int]]:
        return [text_of(self.post("/generate", **body).json()) for body in bodies]

    async def ask(self, body: dict[str, Any], route: str = "/generate") -> httpx.Response:
        async with httpx.AsyncClient(timeout=HANGS) as client:
            return await client.post(self.url + route, json=body)

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of an answer; leaving the loop early is leaving the server."""
        url = self.url + "/generate"
        async with (
            httpx.AsyncClient(timeout=HANGS) as client,
            client.stream("POST", url, json={**body, "stream": True}) as lines,
        ):
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def assert_nothing_is_lost(self) -> None:
        """It comes to rest, and then all of its pool is free; SGLang's own checks run, too."""
        deadline = time.monotonic() + HANGS
        while self.post("/flush_cache").status_code != 200 or any(self.load()):
            assert time.monotonic() < deadline, (self.load(), self.ending())
            time.sleep(0.1)

    def load(self) -> tuple[int, int, int]:
        """Requests that run and that wait, and KV slots in use."""
        (load,) = self.get("/v1/loads").json()["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]
