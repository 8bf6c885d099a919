"""Sample the server every second: its pool usage, and its processes' resources."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import psutil

INTERVAL = 1.0  # seconds
NUM_KEPT = 200  # points per line in the file


class Held(NamedTuple):
    """Resources of a process: private bytes, open files and sockets, threads."""

    memory: int
    fds: int
    threads: int


@dataclass
class Watch:
    """Samples taken inside the ``with`` block."""

    url: str
    # usage: (seconds, share of the pool in use); held: by process, (seconds, resources).
    usage: list[tuple[float, float]] = field(default_factory=list)
    held: dict[str, list[tuple[float, Held]]] = field(default_factory=lambda: defaultdict(list))
    loaded_usage: list[float] = field(default_factory=list)  # shares while clients were arriving

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._processes = _named(psutil.Process())
        self._begin = time.monotonic()
        self._is_loaded = False

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def go_on(self) -> None:
        """Mark the start of traffic."""
        self._is_loaded = True

    def pause(self) -> None:
        """Mark the end of arrivals: the pool drains, and its usage no longer counts."""
        self._is_loaded = False

    def now(self) -> dict[str, Held]:
        """Return the current resources of each live process."""
        found = {}
        for name, process in self._processes.items():
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found[name] = held(process)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return some points of each line for a plot, in seconds, shares and MiB."""
        lines = {
            name: [(round(s), round(h.memory / 2**20, 1), h.fds, h.threads) for s, h in _some(line)]
            for name, line in self.held.items()
        }
        usage = [(round(now), round(share, 2)) for now, share in _some(self.usage)]
        return {"usage": usage, "seconds_mib_fds_threads": lines}

    def _run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self._stopped.wait(INTERVAL):
                try:
                    self._look(client)
                except (httpx.HTTPError, psutil.NoSuchProcess):
                    continue  # the server is slow or gone, which the clients report

    def _look(self, client: httpx.Client) -> None:
        was_loaded = self._is_loaded
        share = client.get("/v1/loads").raise_for_status().json()["loads"][0]["token_usage"]
        now = time.monotonic() - self._begin
        self.usage.append((now, share))
        if was_loaded and self._is_loaded:
            self.loaded_usage.append(share)
        for name, found in self.now().items():
            self.held[name].append((now, found))


def _some(points: list[Any]) -> list[Any]:
    return points[:: len(points) // NUM_KEPT + 1]


def held(process: psutil.Process) -> Held:
    """Return a process's resources, without file-backed memory: paged-in code is no growth."""
    with process.oneshot():
        info = process.memory_info()
        return Held(info.rss - info.shared, process.num_fds(), process.num_threads())


def _named(parent: psutil.Process) -> dict[str, psutil.Process]:
    """Return the server's processes by role and pid."""
    children = parent.children(recursive=True)
    live = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return {f"{_role(child)} {child.pid}": child for child in live}


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    for role in ("scheduler", "detokenizer", "resource_tracker", "launch_server"):
        if role in line:
            return role
    return process.name()
