"""Run traffic in two legs with a rest after each: the first leg is the warm-up."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
from soak.answers import Ending
from soak.clients import Clients
from soak.dawdlers import Dawdlers
from soak.traffic import Request, requests
from soak.watch import Held, Watch
from study import bar

REST = 60.0  # seconds for the server to become idle
CALM = 3.0  # further seconds for closing connections and returning memory
# Request of a slow reader: its chunks exceed all kernel buffers.
UNREAD = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 20,
}


@dataclass
class Findings:
    """The record of a soak."""

    watch: Watch
    endings: list[Ending] = field(default_factory=list)
    rests: list[dict[str, Held]] = field(default_factory=list)  # processes at each rest
    lost: list[str] = field(default_factory=list)  # as sentences; no traffic follows a loss


def soak(url: str, options: argparse.Namespace) -> Findings:
    """Send all of the configured traffic."""
    traffic = requests(options.seed, options.leave, options.pause)
    with Watch(url) as watch:
        found = Findings(watch)
        for share in (options.warm_up, 1 - options.warm_up):
            if not found.lost:
                _leg(url, options, share, traffic, found)
                found.lost += at_rest(url)
                time.sleep(CALM)
            found.rests.append(watch.now())
    return found


def at_rest(url: str) -> list[str]:
    """Return resources still in use without requests, as sentences; run SGLang's own checks."""
    deadline = time.monotonic() + REST
    state = "the server does not answer"
    while time.monotonic() < deadline:
        try:
            flushed = httpx.post(f"{url}/flush_cache", timeout=REST, trust_env=False).is_success
            load = httpx.get(f"{url}/v1/loads", timeout=REST, trust_env=False).json()["loads"][0]
        except httpx.HTTPError as error:
            return [f"the server is gone: {type(error).__name__}"]
        names = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        if flushed and not any(load[name] for name in names):
            return []
        state = ", ".join(f"{name} is {load[name]}" for name in names)
        time.sleep(0.5)
    return [f"{REST:.0f} s after the last request {state}"]


def _leg(
    url: str,
    options: argparse.Namespace,
    share: float,
    traffic: Iterator[Request],
    found: Findings,
) -> None:
    """Send a share of the traffic, and wait for its last request."""
    number = round(share * options.requests) if options.requests else None
    seconds = math.inf if options.minutes is None else 60.0 * share * options.minutes
    line = _Line(number, seconds, found)

    async def everybody() -> None:
        async with Dawdlers(url, options.dawdlers, UNREAD).at_work():
            some = itertools.islice(traffic, number)
            await Clients(url, options.crowd, line.ended).run(some, seconds, found.watch.pause)

    found.watch.go_on()
    with line.bar:
        asyncio.run(everybody())


class _Line:
    """The progress bar of a leg: its share in requests or in seconds, and its problems."""

    def __init__(self, number: int | None, seconds: float, found: Findings) -> None:
        form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
        total = round(seconds) if number is None else number
        self.bar = bar(total=total, desc="Soaking", bar_format=form)
        self._counts, self._found, self._begin = number is not None, found, time.monotonic()

    def ended(self, some: list[Ending]) -> None:
        endings, usage = self._found.endings, self._found.watch.usage
        endings.extend(some)
        problems = sum(bool(e.problem) for e in endings)
        text = (
            f"{len(endings)} answers, {problems} problems, pool {usage[-1][1] if usage else 0:.0%}"
        )
        self.bar.set_postfix_str(text, refresh=False)
        gone = min(round(time.monotonic() - self._begin), self.bar.total)
        self.bar.update(1 if self._counts else gone - self.bar.n)
