"""Start and stop an SGLang server as a user does: ``python -m sglang.launch_server``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_smc.tools.commands import ScriptError, bar, interruptible

HOST = "127.0.0.1"
START_TIMEOUT = 600.0
LOG_TAIL_LINES = 25


class ServerError(ScriptError):
    """A server failed to start or to respond; the message names the log to read."""


@dataclass(frozen=True)
class Launch:
    """A server to start; ``flags`` come last on its command line and override earlier ones."""

    label: str
    model: Path
    log: Path
    concurrency: int
    seed: int = 0
    flags: Sequence[str] = ()


def free_port() -> int:
    """Return a TCP port that is currently unused."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def server_command(launch: Launch, port: int) -> list[str]:
    """Return the command line of a server."""
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(launch.model)),
        *("--host", HOST),
        *("--port", str(port)),
        *("--max-running-requests", str(launch.concurrency)),
        *("--random-seed", str(launch.seed)),
        *launch.flags,
    ]


def smc_flags(draft: Path, *, num_particles: int, num_steps: int) -> list[str]:
    """Return the flags of SMC speculative decoding; each request sets its mode."""
    return [
        *("--speculative-algorithm", "SMC"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-smc-num-particles", str(num_particles)),
        *("--speculative-num-steps", str(num_steps)),
    ]


@contextlib.contextmanager
def running(*launches: Launch) -> Iterator[list[str]]:
    """Start servers together for the ``with`` block; yield their addresses once all are ready."""
    with interruptible(), contextlib.ExitStack() as stack:
        started = [stack.enter_context(_starting(launch)) for launch in launches]
        for launch, (process, url) in zip(launches, started, strict=True):
            _wait_until_ready(launch, process, url)
        yield [url for _, url in started]


@contextlib.contextmanager
def _starting(launch: Launch) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server without waiting until it is ready; its output goes to its log."""
    with launch.log.open("wb") as log:
        port = free_port()
        # A session of its own: Ctrl-C reaches this process alone, which then ends the group.
        process = subprocess.Popen(
            server_command(launch, port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process, f"http://{HOST}:{port}"
        finally:
            # On SIGTERM SGLang waits eight seconds for running requests; here there are none.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(launch: Launch, process: subprocess.Popen[bytes], url: str) -> None:
    deadline, log = time.monotonic() + START_TIMEOUT, launch.log
    form = "{desc} {elapsed} (20 to 60 s, most of it imports)"
    with bar(desc=f"Starting {launch.label}", bar_format=form) as line:
        while not _is_healthy(url):
            line.update()
            if process.poll() is not None:
                raise ServerError(f"{launch.label} ended while starting.\n{describe_log(log)}")
            if time.monotonic() > deadline:
                told = f"{launch.label} was not up in {START_TIMEOUT:.0f} s."
                raise ServerError(f"{told}\n{describe_log(log)}")
            time.sleep(0.3)


def _is_healthy(url: str) -> bool:
    # /health generates a token, which takes at least a second.
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def describe_log(log: Path) -> str:
    """Return the log's last lines, below its name."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"The last lines of {log}:", *(f"    {line}" for line in lines)])


def tokens_per_pass(meta_infos: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens per decoding pass of the target; exactly 1 without speculation.

    Prefill yields the first token in every server, so both are left out.
    """
    tokens = sum(info["completion_tokens"] - 1 for info in meta_infos)
    passes = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in meta_infos)
    return tokens / max(1, passes)
