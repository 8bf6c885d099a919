"""Sample the server every second: its pool usage, and its processes' resources."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any, NamedTuple

import httpx
import psutil

INTERVAL = 1.0  # seconds
NUM_KEPT = 200  # points per line in the file
ROLES = ("scheduler", "detokenizer", "resource_tracker", "launch_server")


class Held(NamedTuple):
    """Resources of a process: private bytes, open files and sockets, threads."""

    memory: int
    fds: int
    threads: int


class Watch:
    """Samples taken inside the ``with`` block.

    Attributes:
        is_loaded: whether clients are arriving; afterwards the pool drains.
        usage: (seconds, share of the pool in use).
        loaded_usage: shares while clients were arriving.
        held: by process, (seconds, resources).
    """

    def __init__(self, url: str) -> None:
        self.is_loaded = False
        self.usage: list[tuple[float, float]] = []
        self.loaded_usage: list[float] = []
        self.held: dict[str, list[tuple[float, Held]]] = defaultdict(list)
        self._url, self._begin = url, time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._processes = _named(psutil.Process())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def now(self) -> dict[str, Held]:
        """Return the current resources of each live process."""
        live = {name: one for name, one in self._processes.items() if _is_live(one)}
        return {name: held(process) for name, process in live.items()}

    def to_json(self) -> dict[str, Any]:
        """Return some points of each line for a plot, in seconds, shares and MiB."""
        lines = {
            name: [(round(s), round(h.memory / 2**20, 1), h.fds, h.threads) for s, h in _some(line)]
            for name, line in self.held.items()
        }
        usage = [(round(now), round(share, 2)) for now, share in _some(self.usage)]
        return {"usage": usage, "seconds_mib_fds_threads": lines}

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30, trust_env=False) as client:
            while not self._stopped.wait(INTERVAL):
                try:
                    self._sample(client)
                except (httpx.HTTPError, psutil.NoSuchProcess):
                    continue  # the server is slow or gone, which the clients report

    def _sample(self, client: httpx.Client) -> None:
        was_loaded = self.is_loaded
        share = client.get("/v1/loads").raise_for_status().json()["loads"][0]["token_usage"]
        now = time.monotonic() - self._begin
        self.usage.append((now, share))
        if was_loaded and self.is_loaded:
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


def _is_live(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _named(parent: psutil.Process) -> dict[str, psutil.Process]:
    """Return the server's processes by role and pid."""
    live = filter(_is_live, parent.children(recursive=True))
    return {f"{_role(child)} {child.pid}": child for child in live}


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((role for role in ROLES if role in line), process.name())
