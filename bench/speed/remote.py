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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from speed.grid import Launch
from study import BenchError

CHILD = Path(__file__).resolve().parent / "child.py"
#: The last line of a Python traceback.
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ?(.*)$")
LONGEST_REASON = 300
STOP_SECONDS = 20.0


class EngineError(BenchError):
    """The engine did not start or respond; the message is its own error, in a sentence."""


@dataclass(frozen=True)
class Work:
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
    def seconds(self) -> float:
        return max(self.end)

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
        return self.tokens / self.seconds

    @property
    def decode_speed(self) -> float:
        """Return the tokens per second of all requests together, after the first tokens."""
        return self.decode_tokens / self.decode_seconds

    @property
    def passes(self) -> list[int]:
        """Return each request's target passes after the prompt."""
        return [info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in self.infos]

    @property
    def rounds(self) -> int:
        """Return the target passes of the batch, which its requests share."""
        return max(self.passes)


class Asker(Protocol):
    """An engine that runs work, or a stand-in."""

    def ask(self, work: Work) -> Sample:
        """Run the work; raise EngineError if the engine fails."""
        ...


class RemoteEngine:
    """An engine in a child process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, work: Work) -> Sample:
        """Send the work and wait for all answers."""
        return Sample(**self.exchange(asdict(work)))

    def exchange(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line, and return the reply."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply is reported below
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineError(reason(self._log.read_text(errors="replace")))
        return json.loads(answer)

    def stop(self, patience: float) -> None:
        """Let the process end by itself for ``patience`` seconds, to complete its output."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)


@contextlib.contextmanager
def running(launch: Launch, log: Path, patience: float = STOP_SECONDS) -> Iterator[RemoteEngine]:
    """Start an engine for the ``with`` block; raise EngineError if it does not start.

    After the block it has ``patience`` seconds to end by itself.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **launch.environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        try:
            engine = RemoteEngine(process, log)
            engine.exchange(launch.arguments)
            yield engine
            engine.stop(patience)
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
    lines = log.splitlines()
    for place in range(len(lines) - 1, -1, -1):
        found = ERROR.match(lines[place])
        if found:
            name = lines[place].split(":")[0]
            message = found[1] or next((line for line in lines[place + 1 :] if line.strip()), "")
            return f"{name}: {message.strip()}"[:LONGEST_REASON]
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"The engine ended without an error message; its last words: {last}"[:LONGEST_REASON]
