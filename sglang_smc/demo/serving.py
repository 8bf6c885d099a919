"""Start and stop an SGLang server the way a user does: ``python -m sglang.launch_server``."""

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

from sglang_smc.demo.script import ScriptError, bar

HOST = "127.0.0.1"
START_TIMEOUT = 600.0
RECORDS_TIMEOUT = 15.0
LOG_TAIL_LINES = 25


class ServerError(ScriptError):
    """The server did not start, or did not do what it should; the message says what to read."""


@dataclass(frozen=True)
class Launch:
    """A server to start; ``flags`` come last on its command line, so they win."""

    label: str
    model: Path
    log: Path
    concurrency: int
    seed: int = 0
    flags: Sequence[str] = ()


class Server(NamedTuple):
    """A running server, and the folder where it writes a record of each finished request."""

    url: str
    records: Path


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def server_command(launch: Launch, port: int, records: Path) -> list[str]:
    """The command line of a server.

    The OpenAI routes return no ``meta_info`` with a stream. SGLang can write it to a file
    instead, one line for each request, under the id that the client sees.
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
    """What turns a server into one with SMC speculative decoding, whose requests choose a mode."""
    return [
        *("--speculative-algorithm", "SMC"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-smc-num-particles", str(num_particles)),
        *("--speculative-num-steps", str(num_steps)),
    ]


def standalone_flags(draft: Path, *, num_steps: int) -> list[str]:
    """What turns a server into one with SGLang's own speculation: a chain, verified exactly."""
    return [
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(num_steps)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_steps + 1)),
    ]


@contextlib.contextmanager
def running(*launches: Launch) -> Iterator[list[Server]]:
    """Servers for the ``with`` block, all started at once."""
    with contextlib.ExitStack() as stack:
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
    """A server that may not be up yet; its output goes to its log."""
    with tempfile.TemporaryDirectory(prefix="smc-records-") as folder:
        port, records = free_port(), Path(folder)
        command = server_command(launch, port, records)
        with launch.log.open("wb") as output, _own_group(command, output) as process:
            yield _Started(launch, process, Server(f"http://{HOST}:{port}", records))


@contextlib.contextmanager
def _own_group(command: list[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    # In a session of its own, so that Ctrl-C reaches us alone and we can end all of its processes.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield process
    finally:
        # A polite SIGTERM makes SGLang wait eight seconds for requests; here none are left.
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
    # /health runs a request of its own, and waits for it at least a second.
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def describe_log(log: Path) -> str:
    """The log's last lines, below its name."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"The last lines of {log}:", *(f"    {line}" for line in lines)])


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """The ``meta_info`` of all finished requests, by request id."""
    lines = [
        line for path in sorted(folder.iterdir()) for line in path.open() if line.endswith("\n")
    ]
    records = map(json.loads, lines)
    return {
        record["id"]: {key: value for key, value in record.items() if key != "request_parameters"}
        for record in records
    }


def wait_for_records(
    server: Server, ids: Iterable[str], timeout: float = RECORDS_TIMEOUT
) -> dict[str, dict[str, Any]]:
    """The ``meta_info`` of the requests ``ids``; the server writes it just after the answer."""
    wanted = set(ids)
    deadline = time.monotonic() + timeout
    while not wanted <= (found := read_records(server.records)).keys():
        if time.monotonic() > deadline:
            missing = len(wanted - found.keys())
            raise ServerError(f"The server wrote no record of {missing} of {len(wanted)} requests.")
        time.sleep(0.1)
    return {key: found[key] for key in wanted}


def tokens_per_pass(meta_infos: Sequence[Mapping[str, Any]]) -> float:
    """Tokens for each decoding pass of the target; exactly 1 without speculation.

    The pass over the prompt yields the first token in every server, so both are left out.
    """
    tokens = sum(info["completion_tokens"] - 1 for info in meta_infos)
    passes = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in meta_infos)
    return tokens / max(1, passes)
