"""Start an engine in a child process, and send it requests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from speed.grid import Launch
from study import BenchError

CHILD = Path(__file__).resolve().parent / "child.py"
#: The last line of a Python traceback.
ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)): ?(.*)$", re.MULTILINE)
LONGEST_REASON = 300
#: Grace period of a finished engine in seconds, to complete its output; it is then killed.
PATIENCE = 0.5


class EngineError(BenchError):
    """The engine did not start or respond; the message is its own error, in a sentence."""


class RefusedError(EngineError):
    """A request is invalid; the engine keeps running."""


class Work(NamedTuple):
    """Requests that are sent at once."""

    prompts: list[list[int]]
    params: list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
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
    """An engine in a child process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, work: Work) -> Sample:
        """Send the work and wait for all answers."""
        return Sample(**self.exchange({"timed": True, **work._asdict()}))

    def each(self, work: Work) -> Iterator[dict[str, Any]]:
        """Yield answers as they complete, each with its ``place``; the others go on meanwhile."""
        self._send({"timed": False, **work._asdict()})
        for _ in work.prompts:
            yield self._reply()

    def generate(self, **question: Any) -> list[dict[str, Any]]:
        """Return the answers of `Engine.generate`; raise RefusedError for an invalid request."""
        return self.exchange({"generate": question})["answers"]

    def exchange(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line, and return the reply."""
        self._send(question)
        return self._reply()

    def _send(self, question: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply is reported
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineError(reason(self._log.read_text(errors="replace")))
        found = json.loads(answer)
        if "refused" in found:
            raise RefusedError(f"refused: {found['refused']}")
        return found


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[RemoteEngine]:
    """Start an engine for the ``with`` block; raise EngineError if it does not start."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore", **launch.environment},
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        try:
            engine = RemoteEngine(process, log)
            engine.exchange(launch.arguments)
            yield engine
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE)
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads its group, and all processes of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # an unread request
            if pipe is not None:
                pipe.close()


def reason(log: str) -> str:
    """Return the last error in a log, in a sentence."""
    errors = list(ERROR.finditer(log))
    if errors:
        name, message = errors[-1].groups()
        message = message or log[errors[-1].end() :].strip().partition("\n")[0]
        return f"{name}: {message.strip()}"[:LONGEST_REASON]
    last = log.strip().rpartition("\n")[2] or "it said nothing"
    return f"The engine ended without an error message; its last words: {last}"[:LONGEST_REASON]
