"""A real HTTP server, for tests that are its clients."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import warm
from tiny_models import ENGINE_DEFAULTS, STRICT_CHECKS

from sglang_smc_tools.demo.serving import flags_of, free_port

START_TIMEOUT = 1200.0
STOP_TIMEOUT = 60.0
HANGS = 600.0  # seconds; however slow the machine is, a request has an answer before


class Server:
    """A running server: its process, its address, its log; requests are sent with its API key."""

    def __init__(
        self, process: subprocess.Popen, port: int, log: Path, key: str | None = None
    ) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.key = key
        # A connection for each request: the server closes idle ones when it likes.
        self.client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=HANGS,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def get(self, route: str, **arguments: Any) -> httpx.Response:
        return self.client.get(route, **arguments)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(route, json=body)

    def outcomes(self, requests: Sequence[dict[str, Any]]) -> list[httpx.Response]:
        """Send requests to /generate at once, each by itself, so that one may fail alone."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda one: self.post("/generate", **one), requests))

    def generate(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers to requests sent at once, none of which fails."""
        found = self.outcomes(requests)
        assert all(one.status_code == 200 for one in found), [one.text[:300] for one in found]
        return [one.json() for one in found]

    @contextlib.contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Iterate over the chunks of a streamed answer of /generate."""
        with self.client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines())
            yield (json.loads(line) for line in lines if line.startswith("{"))

    def pause(self, mode: str) -> None:
        assert self.post("/pause_generation", mode=mode).status_code == 200

    def resume(self) -> None:
        assert self.post("/continue_generation").status_code == 200

    def ending(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def running_server(
    folder: Path,
    environment: dict[str, str] | None = None,
    *,
    cold: bool = False,
    kind: type[Any] = Server,
    **arguments: Any,
) -> Iterator[Any]:
    """A server for the ``with`` block, with SGLang's strict memory checks on.

    Args:
        folder: where its log goes.
        environment: added to ours.
        cold: start it as users do; else it is a copy of an interpreter that waits (`warm`).
        kind: of the server's client, a `Server`.
        arguments: as `sgl.Engine` takes them, over the tests' defaults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = folder / "server.log"
    given = {**ENGINE_DEFAULTS, "skip_server_warmup": False, "log_level": "info", **arguments}
    command = ["-m", "sglang.launch_server", "--port", str(port), *flags_of(given)]
    with log.open("w") as sink, warm.cold() if cold else contextlib.nullcontext():
        own = {"TORCHDYNAMO_DISABLE": "0"} if cold else {}
        variables = {**os.environ, **STRICT_CHECKS, **own, **(environment or {})}
        process = warm.start(command, variables, sink.fileno())
        server = kind(process, port, log, given.get("api_key"))
        try:
            _wait_until_ready(server)
            yield server
        finally:
            _end(process)


@contextlib.contextmanager
def running_router(folder: Path, workers: Sequence[str], num_workers: int) -> Iterator[Server]:
    """SGLang's own router for the ``with`` block, once it finds all of its workers healthy."""
    port = free_port()
    log = folder / "router.log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--port", str(port), *workers]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    router = Server(process, port, log)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while _num_healthy(router) < num_workers:
            assert process.poll() is None and time.monotonic() < deadline, router.ending()
            time.sleep(0.5)
        yield router
    finally:
        process.terminate()
        process.wait(timeout=STOP_TIMEOUT)


def _num_healthy(router: Server) -> int:
    try:
        workers = router.get("/workers", timeout=5).json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError):
        return 0
    return sum(worker["is_healthy"] for worker in workers)


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.ending()
        with contextlib.suppress(httpx.HTTPError):
            if server.get("/health_generate", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise TimeoutError(server.ending())


def _end(process: subprocess.Popen) -> None:
    """Politely, and then for good, with all that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
