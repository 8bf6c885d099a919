"""A look at the server every second: how full its pool is, and how large its processes are."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import httpx
import psutil

INTERVAL = 1.0  # seconds


@dataclass
class Watch:
    """What was seen, until `stop`."""

    url: str
    usage: list[float] = field(default_factory=list)  # share of the pool in use
    # Process -> points of seconds and bytes.
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

    def _run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            while not self._stopped.wait(INTERVAL):
                try:
                    load = client.get("/v1/loads").json()["loads"][0]
                    self._note(load["token_usage"])
                except (httpx.HTTPError, psutil.NoSuchProcess):
                    return  # the clients will tell

    def _note(self, usage: float) -> None:
        self.usage.append(usage)
        now = time.monotonic() - self._begin
        for name, process in self._processes.items():
            self.memory[name].append((now, process.memory_info().rss))


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
