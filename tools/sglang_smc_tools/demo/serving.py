"""Start and stop an SGLang server as a user does: ``python -m sglang.launch_server``."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sglang_smc.command.program import ScriptError
from sglang_smc_tools.commands import bar, interruptible

HOST = "127.0.0.1"
PORTS = 10_000, 30_000  # below those of connections that go out: 32768 to 60999 on Linux
START_TIMEOUT = 600.0
LOG_TAIL_LINES = 25


class ServerError(ScriptError):
    """A server failed to start or to respond; the message names the log to read."""


@dataclass(frozen=True)
class Launch:
    """A server to start.

    Args:
        arguments: as `sglang.Engine` takes them.
        label: the display name; empty starts it without a progress bar.
        environment: added to this process's.
    """

    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    log: Path = Path(os.devnull)

    def __str__(self) -> str:
        """Return the command that starts it by hand."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*variables, "python", *server_command(self)])


def free_port() -> int:
    """Return a TCP port that is currently unused, of those that no connection takes by itself.

    A server binds it much later: until then a port of the system's own choice may be another's.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)  # SGLang seeds the others
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def server_command(launch: Launch) -> list[str]:
    """Return the command line of a server, behind Python's name."""
    return ["-m", "sglang.launch_server", *flags_of(launch.arguments)]


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return Engine keywords as flags: ``tp_size=2`` is ``--tp-size 2``, True a bare switch."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            found.append("--" + name.replace("_", "-"))
            values = value if isinstance(value, list) else [value]
            found += [] if value is True else map(str, values)
    return found


def smc_arguments(draft: Path, *, num_particles: int, num_steps: int) -> dict[str, Any]:
    """Return the arguments of SMC speculative decoding; each request sets its mode."""
    return {
        "speculative_algorithm": "SMC",
        "speculative_draft_model_path": str(draft),
        "speculative_smc_num_particles": num_particles,
        "speculative_num_steps": num_steps,
    }


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
        address = flags_of({"host": HOST, "port": port})
        # A session of its own: Ctrl-C reaches this process alone, which then ends the group.
        process = subprocess.Popen(
            [sys.executable, *server_command(launch), *address],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **launch.environment},
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
    deadline = time.monotonic() + START_TIMEOUT
    log = launch.log
    label = launch.label or "the server"
    form = "{desc} {elapsed} (20 to 60 s, most of it imports)"
    with bar(desc=f"Starting {label}", bar_format=form, disable=not launch.label) as line:
        while not _is_healthy(url):
            line.update()
            if process.poll() is not None:
                raise ServerError(f"{label} ended while starting.\n{describe_log(log)}")
            if time.monotonic() > deadline:
                told = f"{label} was not up in {START_TIMEOUT:.0f} s."
                raise ServerError(f"{told}\n{describe_log(log)}")
            time.sleep(0.3)


def _is_healthy(url: str) -> bool:
    # /health generates a token, which takes at least a second.
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def streamed(client: httpx.Client, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answer so far to a request of /generate, and its ``meta_info``, as they come.

    Raises ServerError if the server refuses the request, httpx.HTTPError if it is gone.
    """
    with client.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        if not reply.is_success:
            raise ServerError(f"HTTP {reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                if "error" in told:
                    raise ServerError(str(told["error"]))
                yield told


def describe_log(log: Path) -> str:
    """Return the log's last lines, below its name."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"The last lines of {log}:", *(f"    {line}" for line in lines)])


def reason_in(log: str, otherwise: str) -> str:
    """Return the last error that a log names, in SGLang's words; else what was seen here."""
    found = re.findall(r"^(?:- )?(?:\w+\.)*\w*(?:Error|Exception|Refused): (.+)", log, re.M)
    return found[-1] if found else otherwise.partition("\n")[0]
