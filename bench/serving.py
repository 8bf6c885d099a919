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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

HOST = "127.0.0.1"
START_TIMEOUT = 600.0
RECORDS_TIMEOUT = 15.0
LOG_TAIL_LINES = 25


class ServerError(RuntimeError):
    """The server did not start, or did not do what it should; the message says what to read."""


class Server(NamedTuple):
    """A running server, and the folder where it writes a record of each finished request."""

    url: str
    records: Path


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def server_command(
    model: Path, *, port: int, records: Path, concurrency: int, seed: int, flags: Iterable[str] = ()
) -> list[str]:
    """The command line of a server; ``flags`` come last, so they win.

    The OpenAI routes return no ``meta_info`` with a stream. SGLang can write it to a file
    instead, one line for each request, under the id that the client sees.
    """
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--host", HOST),
        *("--port", str(port)),
        *("--max-running-requests", str(concurrency)),
        *("--random-seed", str(seed)),
        "--export-metrics-to-file",
        *("--export-metrics-to-file-dir", str(records)),
        *flags,
    ]


def smc_flags(
    draft: Path, *, num_particles: int, num_steps: int, resample_at: str, mode: str = "smc"
) -> list[str]:
    """What turns a server into one with SMC speculative decoding."""
    return [
        *("--speculative-algorithm", "SMC"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-smc-num-particles", str(num_particles)),
        *("--speculative-num-steps", str(num_steps)),
        *("--speculative-smc-mode", mode),
        # The exact mode weighs nothing, and refuses what steers weights.
        *(("--speculative-smc-resample-at", resample_at) if mode == "smc" else ()),
    ]


@contextlib.contextmanager
def running(
    model: Path,
    *,
    label: str,
    log: Path,
    concurrency: int,
    seed: int = 0,
    flags: Iterable[str] = (),
) -> Iterator[Server]:
    """A server for the ``with`` block; its output goes to ``log``."""
    with tempfile.TemporaryDirectory(prefix="smc-records-") as folder:
        port, records = free_port(), Path(folder)
        command = server_command(
            model, port=port, records=records, concurrency=concurrency, seed=seed, flags=flags
        )
        url = f"http://{HOST}:{port}"
        with log.open("wb") as output, _own_group(command, output) as process:
            _wait_until_ready(process, url, label, log)
            yield Server(url, records)


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


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    url: str,
    label: str,
    log: Path,
    timeout: float = START_TIMEOUT,
) -> None:
    deadline = time.monotonic() + timeout
    form = "{desc} {elapsed} (20 to 60 s, most of it imports)"
    with tqdm(desc=f"Starting {label}", bar_format=form, mininterval=progress_interval()) as line:
        while not _is_healthy(url):
            line.update()
            if process.poll() is not None:
                raise ServerError(f"{label} ended while starting.\n{describe_log(log)}")
            if time.monotonic() > deadline:
                raise ServerError(f"{label} was not up in {timeout:.0f} s.\n{describe_log(log)}")
            time.sleep(0.3)


def progress_interval() -> float:
    """Seconds between two states of a progress bar: fewer where each becomes a line of a log."""
    return 0.2 if sys.stderr.isatty() else 10.0


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
