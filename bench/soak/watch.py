"""A look at the server every second: how full its pool is, and how large its processes are."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

INTERVAL = 1.0  # seconds
NUM_KEPT = 200  # points of a line, for the file


@dataclass
class Watch:
    """What was seen while it was entered."""

    url: str
    # Points of seconds and the share of the pool in use; process -> points of seconds and bytes.
    usage: list[tuple[float, float]] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._processes = _named(psutil.Process())
        self._begin = time.monotonic()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def usage_until(self, seconds: float) -> list[float]:
        """Shares of the pool in use, in the first so many seconds."""
        return [share for now, share in self.usage if now <= seconds]

    def to_json(self) -> dict[str, Any]:
        """What was seen, for a plot: some points of each line, in seconds, shares and MiB."""
        memory = {
            name: [(round(now), round(size / 2**20, 1)) for now, size in _some(points)]
            for name, points in self.memory.items()
        }
        usage = [(round(now), round(share, 2)) for now, share in _some(self.usage)]
        return {"usage": usage, "memory": memory}

    def _run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self._stopped.wait(INTERVAL):
                try:
                    self._look(client)
                except (httpx.HTTPError, psutil.NoSuchProcess):
                    continue  # a server that is slow, or gone: the clients will tell

    def _look(self, client: httpx.Client) -> None:
        share = client.get("/v1/loads").raise_for_status().json()["loads"][0]["token_usage"]
        now = time.monotonic() - self._begin
        self.usage.append((now, share))
        for name, process in self._processes.items():
            self.memory[name].append((now, own_bytes(process)))


def _some(points: list[Any]) -> list[Any]:
    return points[:: len(points) // NUM_KEPT + 1]


def own_bytes(process: psutil.Process) -> int:
    """Memory of a process that is no file's: code that is paged in is no growth."""
    info = process.memory_info()
    return info.rss - info.shared


def _named(parent: psutil.Process) -> dict[str, psutil.Process]:
    """The server's processes, by what they are."""
    children = parent.children(recursive=True)
    return {f"{_role(child)} {child.pid}": child for child in children}


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    for role in ("scheduler", "detokenizer", "resource_tracker", "launch_server"):
        if role in line:
            return role
    return process.name()
