"""Run heavy traffic against a server for a while, and check that it loses nothing.

    make soak                                                    # three minutes
    .venv/bin/python bench/soak --minutes 600                    # overnight
    .venv/bin/python bench/soak --requests 3000 --warm-up 0.17   # the first 510 are the warm-up
    .venv/bin/python bench/soak --requests 1500 --crowd 500 --pause 0 --leave 0.6 --dawdlers 60

Clients of all kinds arrive at random, about a third of them leave before the end, and the pool is
too small for them. SGLang's strict memory checks are on. The exit status is 0 if nothing is
lost, and nothing has grown since the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx
from results import provenance
from soak.clients import Clients, Ending
from soak.dawdlers import Dawdlers
from soak.traffic import MAX_LAG, NUM_PARTICLES, NUM_STEPS, requests
from soak.verdict import Held, Watch, judge, load_of
from study import PAIR, bar, main_of, parser, positive, prepare_folder

from sglang_smc_tools.demo.serving import Launch, describe_log, running, smc_arguments

ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # Admit requests as if their outputs hardly grew, so that the pool fills up and some are
    # retracted. After a retraction SGLang admits fewer; this decays over the given number of
    # rounds.
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.01",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "5",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
    # glibc keeps much of the freed memory, which looks like growth for minutes; with these
    # thresholds it is returned.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
REST = 60.0  # seconds for the server to become idle
CALM = 3.0  # further seconds for closing connections and returning memory
# Request of a slow reader: its chunks exceed all kernel buffers.
UNREAD = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 20,
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    made = parser("soak", "Many clients, a pool that is too small, and no request lost.")
    add = made.add_argument
    add("--minutes", type=float, help="of traffic; verifying comes on top (default: 3)")
    add("--requests", type=positive, help="so many, within the minutes if any are given")
    add("--warm-up", type=float, default=0.5, metavar="SHARE", help="that nothing may grow after")
    add("--verify", type=positive, default=200, metavar="N", help="texts to ask for again, alone")
    add("--crowd", type=positive, default=80, help="requests with the server at once")
    add("--running", type=positive, default=40, help="of which so many run at most")
    add("--pool", type=positive, default=2400, metavar="TOKENS", help="KV slots of the server")
    add("--pause", type=float, default=0.02, help="mean seconds from client to client")
    add("--leave", type=float, default=0.4, help="share of the clients that mean to leave early")
    add("--dawdlers", type=int, default=0, help="connections of a byte a second, beside these")
    add("--seed", type=int, default=0, help="of the traffic")
    options = made.parse_args(argv)
    if options.minutes is None and options.requests is None:
        options.minutes = 3.0
    return options


def server_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the server's arguments, with a small KV pool and chunked prefill."""
    return {
        "model_path": str(PAIR / "target"),
        **smc_arguments(PAIR / "draft", num_particles=NUM_PARTICLES, num_steps=NUM_STEPS),
        "speculative_smc_max_lag": MAX_LAG,
        "dtype": "float32",
        "random_seed": 0,
        "max_running_requests": options.running,
        "max_total_tokens": options.pool,
        "chunked_prefill_size": 64,
        "enable_priority_scheduling": True,
        "load_snapshot_publish_interval": 1,
    }


class Soak:
    """The traffic of a soak, and its record; no traffic follows a loss."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self.options = options
        self.endings: list[Ending] = []
        self.rests: list[dict[str, Held]] = []  # processes at each rest
        self.lost: list[str] = []  # as sentences
        self.alone: list[Ending] = []
        self.watch = Watch(url)
        self._traffic = requests(options.seed, options.leave, options.pause)

    def run(self) -> None:
        """Send the traffic in two legs with a rest after each: the first leg is the warm-up."""
        url = self.url
        options = self.options
        with self.watch:
            for share in (options.warm_up, 1 - options.warm_up):
                if not self.lost:
                    self._send(share)
                    self.lost += at_rest(url)
                    time.sleep(CALM)
                self.rests.append(self.watch.now())
        if not self.lost:
            self.alone = verify(url, self.endings, options)
            self.lost += at_rest(url)

    def _send(self, share: float) -> None:
        """Send a share of the traffic, and wait for its last request."""
        options = self.options
        watch = self.watch
        number = round(share * options.requests) if options.requests else None
        seconds = math.inf if options.minutes is None else 60.0 * share * options.minutes
        form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
        total = round(seconds) if number is None else number
        began = time.monotonic()
        line = bar(total=total, desc="Soaking", bar_format=form)

        def ended(some: list[Ending]) -> None:
            self.endings.extend(some)
            problems = sum(bool(one.problem) for one in self.endings)
            usage = watch.usage[-1] if watch.usage else 0.0
            told = f"{len(self.endings)} answers, {problems} problems, pool {usage:.0%}"
            line.set_postfix_str(told, refresh=False)
            gone = min(round(time.monotonic() - began), total)
            line.update(gone - line.n if number is None else 1)

        def sent() -> None:
            watch.is_loaded = False

        async def everybody() -> None:
            async with Dawdlers(self.url, options.dawdlers, UNREAD).at_work():
                some = itertools.islice(self._traffic, number)
                await Clients(self.url, options.crowd, ended).run(some, seconds, sent)

        watch.is_loaded = True
        with line:
            asyncio.run(everybody())


def at_rest(url: str) -> list[str]:
    """Return resources still in use without requests, as sentences; run SGLang's own checks."""
    deadline = time.monotonic() + REST
    state = "the server does not answer"
    while time.monotonic() < deadline:
        try:
            flushed = httpx.post(f"{url}/flush_cache", timeout=REST, trust_env=False).is_success
            load = load_of(url)
        except httpx.HTTPError as error:
            return [f"the server is gone: {type(error).__name__}"]
        names = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        if flushed and not any(load[name] for name in names):
            return []
        state = ", ".join(f"{name} is {load[name]}" for name in names)
        time.sleep(0.5)
    return [f"{REST:.0f} s after the last request {state}"]


def verify(url: str, endings: list[Ending], options: argparse.Namespace) -> list[Ending]:
    """Request some of the answers again, alone; half of them retracted ones, if available."""
    candidates = [ending for ending in endings if ending.is_verifiable]
    random.Random(options.seed).shuffle(candidates)
    retracted = [ending for ending in candidates if ending.retractions][: options.verify // 2]
    others = [ending for ending in candidates if not ending.retractions]
    chosen = [*retracted, *others[: options.verify - len(retracted)]]
    with bar(total=len(chosen), desc="Asking again, alone", unit="answer") as line:
        return asyncio.run(Clients(url, 1, lambda _: None).alone(chosen, line.update))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return exit status 0 if no problem is found."""
    options = parse_arguments(argv)
    return main_of(lambda: run(options), "")


def run(options: argparse.Namespace) -> int:
    """Start a server, send it traffic, check the outcome, and report it."""
    prepare_folder(options.output_dir)
    log = options.output_dir / "server.log"
    with running(Launch(server_arguments(options), ENVIRONMENT, "SMC server", log)) as (url,):
        found = Soak(url, options)
        found.run()
    lost = [*found.lost, describe_log(log)] if found.lost else []
    verdict = judge(found.endings, found.alone, found.watch.usage, found.rests, lost)
    report: dict[str, Any] = {
        "verdict": asdict(verdict) | {"growth": _named(verdict.growth)},
        "rests": [_named(rest) for rest in found.rests],
        **provenance({k: v for k, v in vars(options).items() if k != "output_dir"}),
    }
    path = options.output_dir / "soak.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{verdict}\nIn {options.output_dir}/: {path.name}, server.log.")
    return 1 if verdict.problems else 0


def _named(held: dict[str, Held]) -> dict[str, dict[str, int]]:
    """Return the resources of processes by name."""
    return {name: one._asdict() for name, one in held.items()}
