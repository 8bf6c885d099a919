"""Prometheus itself, as Debian and Ubuntu ship it: fetched once, never installed."""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from sglang_smc.demo.serving import free_port

CACHE = Path.home() / ".cache/sglang-smc/prometheus"
CONFIG = Path(__file__).parents[1] / "examples/grafana/prometheus.yaml"
TARGET = "127.0.0.1:30000"  # which stands in the configuration

ACCEPT_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
"""What Prometheus 3 asks for by default (`acceptHeader` in its scrape/scrape.go)."""


def find_binary() -> str | None:
    """An installed Prometheus, or the one of the package; None where there is neither."""
    if (installed := shutil.which("prometheus")) is not None:
        return installed
    binary = CACHE / "usr/bin/prometheus"
    if not binary.exists() and shutil.which("apt-get") is not None:
        CACHE.mkdir(parents=True, exist_ok=True)
        # As any user; the lists of packages are those of the last `apt-get update`.
        subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, capture_output=True)
        for package in CACHE.glob("prometheus_*.deb"):
            subprocess.run(["dpkg", "-x", package, CACHE], check=True)
    return str(binary) if binary.exists() else None


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        """What its API answers, which must be a success."""
        answer = httpx.get(self._api + path, params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, query: str) -> list[float]:
        """The values of a query's series, those that are no numbers aside."""
        found = [float(one["value"][1]) for one in self.get("query", query=query)["result"]]
        return [value for value in found if math.isfinite(value)]

    def wait_for_scrapes(self, number: int) -> None:
        """Until it has read so many more."""
        taken = self._num_scrapes()
        deadline = time.monotonic() + 60
        while self._num_scrapes() < taken + number:
            assert time.monotonic() < deadline, self.get("targets")
            time.sleep(0.3)

    def _num_scrapes(self) -> float:
        """Those that found the server."""
        return sum(self.ask('sum_over_time(up{job="sglang"}[1h])'))


@contextmanager
def prometheus(binary: str, folder: Path, server: str) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration, but for the address ``server`` that it reads."""
    folder.mkdir()
    shipped, port = CONFIG.read_text(), free_port()
    assert shipped.count(TARGET) == 1
    (folder / "prometheus.yaml").write_text(shipped.replace(TARGET, server))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_ready(port, process, folder / "log")
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(port: int, process: subprocess.Popen, log: Path) -> None:
    for _ in range(200):
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(log.read_text()[-2000:])


@contextmanager
def asking(server: str, accept: str) -> Iterator[str]:
    """The address of a proxy that asks a server's /metrics as ``accept`` says."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = httpx.get(f"http://{server}/metrics", headers={"Accept": accept})
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing, to keep pytest's output."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
