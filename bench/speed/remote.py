"""Start an engine as a server of its own, and send it requests."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
from study import BenchError

from sglang_smc_tools.commands import client_of, told_by
from sglang_smc_tools.demo import serving
from sglang_smc_tools.demo.serving import Launch, ServerError, streamed

#: The last line of a Python traceback.
ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)): ?(.*)$", re.MULTILINE)
LONGEST_REASON = 300
#: More than any answer's tokens: one chunk for the first token and one for the end.
ONE_CHUNK = 1_000_000
#: Before each measurement: a cached prompt would cost nothing, and n-gram matches would find it.
FLUSH = "/flush_cache?timeout=30"
MOST_AT_ONCE = 128  # requests; more wait for the first to complete
T = TypeVar("T")


class EngineError(BenchError):
    """The engine did not start or respond; the message is its own error, in a sentence."""


class InvalidRequestError(EngineError):
    """A request is invalid; the engine keeps running."""


class Work(NamedTuple):
    """Requests that are sent at once, or as fast as ``at_once`` users are answered."""

    prompts: list[list[int]]
    params: list[dict[str, Any]]
    flushes: bool = True  # the caches before `RemoteEngine.each`
    at_once: int = MOST_AT_ONCE


@dataclass(frozen=True)
class TimedBatch:
    """Measurements of a batch of requests; times in seconds since they were sent."""

    first: list[float]
    end: list[float]
    infos: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(info["completion_tokens"] for info in self.infos)

    @property
    def decode_tokens(self) -> int:
        """Return all tokens but the first of each request, which prefill yields."""
        return self.tokens - len(self.infos)

    @property
    def decode_seconds(self) -> float:
        """Return the time from the last first token to the end."""
        return max(self.end) - max(self.first)

    @property
    def speed(self) -> float:
        """Return the tokens per second of all requests together, end to end."""
        return self.tokens / max(self.end)

    @property
    def decode_speed(self) -> float:
        """Return the tokens per second of all requests together, after the first tokens."""
        return self.decode_tokens / self.decode_seconds

    @property
    def passes(self) -> list[int]:
        """Return each request's target passes after the prompt."""
        return [info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in self.infos]

    @property
    def round_seconds(self) -> float:
        """Return the time of a target pass of the batch, which its requests share."""
        return self.decode_seconds / max(self.passes)


class RemoteEngine:
    """A running server, in processes of its own."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log
        self._client = client_of(url, None, timeout=None)

    def ask(self, work: Work) -> TimedBatch:
        """Send the work and wait for all answers."""
        self.post(FLUSH)
        start = time.perf_counter()
        found = [answer for _, answer in sorted(self._all(work, self._timed))]
        first, end, infos = map(list, zip(*found, strict=True))
        return TimedBatch([at - start for at in first], [at - start for at in end], infos)

    def each(self, work: Work) -> Iterator[dict[str, Any]]:
        """Yield answers as they complete, each with its ``place``; the others go on meanwhile."""
        if work.flushes:
            self.post(FLUSH)
        for place, answer in self._all(work, self._whole):
            yield {"place": place, **answer}

    def generate(self, **question: Any) -> Any:
        """Return the answers of /generate; raise RefusedError for an invalid request."""
        return self.post("/generate", **question).json()

    def internal_state(self) -> dict[str, Any]:
        """Return what /server_info says of the scheduler; ``smc`` where that runs."""
        told = told_by(self.url, "/server_info", "internal_states", None)
        return told["internal_states"][0]

    def post(self, route: str, **body: Any) -> httpx.Response:
        """Return the reply to a POST; raise RefusedError where it is an error."""
        with self._gone():
            reply = self._client.post(route, json=body)
        if not reply.is_success:
            raise InvalidRequestError(f"refused: {reply.text}"[:LONGEST_REASON])
        return reply

    def _all(self, work: Work, answer: Callable[..., T]) -> Iterator[tuple[int, T]]:
        """Yield place and answer of all requests, as they complete."""
        pool = ThreadPoolExecutor(work.at_once)
        try:
            pairs = zip(work.prompts, work.params, strict=True)
            asked = {pool.submit(answer, *pair): place for place, pair in enumerate(pairs)}
            for done in as_completed(asked):
                yield asked[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _whole(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return self.generate(input_ids=prompt, sampling_params=params)

    def _timed(self, prompt: list[int], params: dict[str, Any]) -> tuple[float, float, Any]:
        """Return the times of a request's first token and end, and its ``meta_info``."""
        body = {"input_ids": prompt, "sampling_params": {**params, "stream_interval": ONE_CHUNK}}
        first = 0.0
        end = 0.0
        info = {}
        with self._gone():
            for chunk in streamed(self._client, body):
                end = time.perf_counter()
                info = chunk["meta_info"]
                first = first or end
        return first, end, info

    @contextlib.contextmanager
    def _gone(self) -> Iterator[None]:
        """Turn a broken connection into the server's own error, and a refusal into one of ours."""
        try:
            yield
        except httpx.HTTPError as error:
            raise EngineError(reason(self._log.read_text(errors="replace"))) from error
        except ServerError as error:
            raise InvalidRequestError(f"refused: {error}") from error


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[RemoteEngine]:
    """Start a server for the ``with`` block; raise EngineError if it does not start."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            (url,) = stack.enter_context(serving.running(replace(launch, log=log)))
        except ServerError as error:
            raise EngineError(reason(log.read_text(errors="replace"))) from error
        yield RemoteEngine(url, log)


def reason(log: str) -> str:
    """Return the last error in a log, in a sentence."""
    errors = list(ERROR.finditer(log))
    if errors:
        name, message = errors[-1].groups()
        message = message or log[errors[-1].end() :].strip().partition("\n")[0]
        return f"{name}: {message.strip()}"[:LONGEST_REASON]
    last = log.strip().rpartition("\n")[2] or "it said nothing"
    return f"The engine ended without an error message; its last words: {last}"[:LONGEST_REASON]
