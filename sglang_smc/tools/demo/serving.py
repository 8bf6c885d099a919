"""Start and stop an SGLang server as a user does: ``python -m sglang.launch_server``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from sglang_smc.tools.commands import ScriptError, bar, interruptible

HOST = "127.0.0.1"
START_TIMEOUT = 600.0
RECORDS_TIMEOUT = 15.0
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


class Server(NamedTuple):
    """A running server, and the folder of its records of finished requests."""

    url: str
    records: Path


def free_port() -> int:
    """Return a TCP port that is currently unused."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def server_command(launch: Launch, port: int, records: Path) -> list[str]:
    """Return the command line of a server.

    The OpenAI routes return no ``meta_info`` with a stream. SGLang can write it to a file instead,
    one line for each request, under the id that the client receives.
    """
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(launch.model)),
        *("--host", HOST),
        *("--port", str(port)),
        *("--max-running-requests", str(launch.concurrency)),
        *("--random-seed", str(launch.seed)),
        "--export-metrics-to-file",
        *("--export-metrics-to-file-dir", str(records)),
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
def running(*launches: Launch) -> Iterator[list[Server]]:
    """Start servers together for the ``with`` block; yield them once all are ready."""
    with interruptible(), contextlib.ExitStack() as stack:
        started = [stack.enter_context(_starting(launch)) for launch in launches]
        for one in started:
            _wait_until_ready(one)
        yield [one.server for one in started]


class _Started(NamedTuple):
    launch: Launch
    process: subprocess.Popen[bytes]
    server: Server


@contextlib.contextmanager
def _starting(launch: Launch) -> Iterator[_Started]:
    """Start a server without waiting until it is ready; its output goes to its log."""
    with tempfile.TemporaryDirectory(prefix="smc-records-") as folder, launch.log.open("wb") as log:
        port, records = free_port(), Path(folder)
        # A session of its own: Ctrl-C reaches this process alone, which then ends the group.
        process = subprocess.Popen(
            server_command(launch, port, records),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _Started(launch, process, Server(f"http://{HOST}:{port}", records))
        finally:
            # On SIGTERM SGLang waits eight seconds for running requests; here there are none.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(started: _Started, timeout: float = START_TIMEOUT) -> None:
    deadline = time.monotonic() + timeout
    label, log = started.launch.label, started.launch.log
    form = "{desc} {elapsed} (20 to 60 s, most of it imports)"
    with bar(desc=f"Starting {label}", bar_format=form) as line:
        while not _is_healthy(started.server.url):
            line.update()
            if started.process.poll() is not None:
                raise ServerError(f"{label} ended while starting.\n{describe_log(log)}")
            if time.monotonic() > deadline:
                raise ServerError(f"{label} was not up in {timeout:.0f} s.\n{describe_log(log)}")
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


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the ``meta_info`` of all finished requests, by request id."""
    lines = (line for path in sorted(folder.iterdir()) for line in path.open())
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    for record in records:
        record.pop("request_parameters", None)
    return {record["id"]: record for record in records}


def wait_for_records(
    server: Server, ids: Iterable[str], timeout: float = RECORDS_TIMEOUT
) -> dict[str, dict[str, Any]]:
    """Return the ``meta_info`` of the requests ``ids``, written just after each answer."""
    wanted = set(ids)
    deadline = time.monotonic() + timeout
    while not wanted <= (found := read_records(server.records)).keys():
        if time.monotonic() > deadline:
            missing = len(wanted - found.keys())
            raise ServerError(f"The server wrote no record of {missing} of {len(wanted)} requests.")
        time.sleep(0.1)
    return {key: found[key] for key in wanted}


def tokens_per_pass(meta_infos: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens per decoding pass of the target; exactly 1 without speculation.

    Prefill yields the first token in every server, so both are left out.
    """
    tokens = sum(info["completion_tokens"] - 1 for info in meta_infos)
    passes = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in meta_infos)
    return tokens / max(1, passes)
