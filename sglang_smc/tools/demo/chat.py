"""Send the held-out problems to a server's OpenAI chat route, streaming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from sglang_smc.pair.task import check, held_out, messages

#: The task's longest reference answers have about 130 tokens.
MAX_TOKENS = 160
REQUEST_TIMEOUT = 120.0


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of all requests of a run; problem i runs with seed + i.

    ``smc`` holds the SMC request fields; the server rejects unknown ones and fills in the rest.
    """

    temperature: float
    seed: int = 0
    smc: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """A client's measurements of one request, in seconds since it was sent."""

    index: int
    request_id: str
    text: str
    right: bool
    finish_reason: str | None
    seconds_to_first: float
    seconds: float


def connect(url: str) -> OpenAI:
    """Return a client that fails at the first error, since a retry would spoil the measurement."""
    # Ignore the environment's proxies, which cannot reach this machine's own ports.
    transport = DefaultHttpxClient(trust_env=False, timeout=REQUEST_TIMEOUT)
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport)


def ask(
    client: OpenAI,
    index: int,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Stream the answer to held-out problem ``index``; call ``on_text`` with each piece."""
    item = held_out(index)
    start = time.perf_counter()
    stream: Iterable[Any] = client.chat.completions.create(
        model="default",
        messages=messages(item),  # type: ignore[arg-type]
        temperature=sampling.temperature,
        max_tokens=MAX_TOKENS,
        seed=sampling.seed + index,
        stream=True,
        extra_body=None if sampling.smc is None else {"custom_params": {"smc": sampling.smc}},
    )
    text, first, request_id, finish_reason = "", None, "", None
    for chunk in stream:
        request_id = chunk.id
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            if choice.delta.content:
                first = first or time.perf_counter()
                text += choice.delta.content
                on_text(choice.delta.content)
    end = time.perf_counter()
    return Answer(
        index=index,
        request_id=request_id,
        text=text,
        # An answer cut off by the length limit may end in a right number by chance.
        right=finish_reason == "stop" and check(text, item),
        finish_reason=finish_reason,
        seconds_to_first=(first or end) - start,
        seconds=end - start,
    )


def ask_all(
    client: OpenAI,
    indices: Iterable[int],
    sampling: Sampling,
    *,
    concurrency: int,
    answered: Callable[[Answer], object],
) -> None:
    """Send all problems, ``concurrency`` at a time; call ``answered`` with each complete answer."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(ask, client, index, sampling) for index in indices]
        for future in as_completed(futures):
            answered(future.result())
    finally:
        # Do not wait: after Ctrl-C the server is stopped next, and running requests end with it.
        pool.shutdown(wait=False, cancel_futures=True)
