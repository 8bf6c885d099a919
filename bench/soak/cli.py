"""Leave a server alone with a crowd for a while, and then count what it has lost.

    make soak                                     # three minutes
    .venv/bin/python bench/soak --minutes 600     # overnight

Clients of all kinds arrive at random, about a third of them leave before the end, and the pool is
too small for them. SGLang's strict memory checks are on. The exit status is 0 where nothing is
lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path

import httpx
from results import provenance
from soak.answers import Ending
from soak.clients import Clients
from soak.traffic import MAX_LAG, NUM_PARTICLES, NUM_STEPS, requests
from soak.verdict import Verdict, judge
from soak.watch import Watch
from study import PAIR, bar, main_of, parser, positive, prepare_folder

from sglang_smc.demo.serving import Launch, describe_log, running, smc_flags

ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # Admit as if texts hardly grew, so that the pool fills up and some requests are retracted. That
    # makes SGLang careful; after so many rounds it has forgotten.
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.01",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "5",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
    # glibc keeps much of what is freed, which looks like growth for minutes: what is left then is
    # what somebody holds.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
REST = 60.0  # seconds that a server may take to come to rest
MEAN_PAUSE = 0.02


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    found = parser("soak", "Many clients, a pool that is too small, and no request lost.")
    add = found.add_argument
    add("--minutes", type=float, default=3.0, help="of traffic; verifying comes on top")
    add("--verify", type=positive, default=200, metavar="N", help="texts to ask for again, alone")
    add("--crowd", type=positive, default=80, help="requests with the server at once")
    add("--running", type=positive, default=40, help="of which so many run at most")
    add("--pool", type=positive, default=2400, metavar="TOKENS", help="KV slots of the server")
    add("--leave", type=float, default=0.4, help="share of the clients that mean to leave early")
    add("--seed", type=int, default=0, help="of the traffic")
    add("--pair", type=Path, default=PAIR, help="folder of target/ and draft/")
    return found.parse_args(argv)


def server_flags(options: argparse.Namespace) -> list[str]:
    """What makes the server's life hard."""
    return [
        *smc_flags(options.pair / "draft", num_particles=NUM_PARTICLES, num_steps=NUM_STEPS),
        *("--speculative-smc-max-lag", str(MAX_LAG)),
        *("--dtype", "float32"),
        *("--max-total-tokens", str(options.pool)),
        *("--chunked-prefill-size", "64"),
        "--enable-priority-scheduling",
        *("--load-snapshot-publish-interval", "1"),
    ]


def run(options: argparse.Namespace) -> tuple[Verdict, Watch]:
    """Start a server, send it traffic, and judge what came of it."""
    prepare_folder(options.output_dir)
    os.environ.update(ENVIRONMENT)
    log, target = options.output_dir / "server.log", options.pair / "target"
    launch = Launch("SMC server", target, log, options.running, flags=server_flags(options))
    with running(launch) as (server,):
        endings, watch = soak(server.url, options)
        lost = at_rest(server.url)
        alone = [] if lost else verify(server.url, endings, options)
        lost += [] if lost else at_rest(server.url)
    if lost:
        lost.append(describe_log(log))
    usage = watch.usage_until(60.0 * options.minutes)  # then the pool drains
    return judge(endings, alone, usage, watch.memory, lost), watch


def soak(url: str, options: argparse.Namespace) -> tuple[list[Ending], Watch]:
    """Traffic for as long as was asked for."""
    endings: list[Ending] = []
    seconds, begin = 60.0 * options.minutes, time.monotonic()
    form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
    with (
        Watch(url) as watch,
        bar(total=round(seconds), desc="Soaking", bar_format=form) as line,
    ):

        def ended(some: list[Ending]) -> None:
            endings.extend(some)
            problems = sum(bool(e.problem) for e in endings)
            full = watch.usage[-1][1] if watch.usage else 0.0
            line.set_postfix_str(
                f"{len(endings)} answers, {problems} problems, pool {full:.0%}", refresh=False
            )
            line.update(min(round(time.monotonic() - begin), line.total) - line.n)

        traffic = requests(options.seed, options.leave, MEAN_PAUSE)
        asyncio.run(Clients(url, options.crowd, ended).run(traffic, seconds))
    return endings, watch


def at_rest(url: str) -> list[str]:
    """What is still in use once nobody asks any more, in words; SGLang's own checks run, too."""
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


def verify(url: str, endings: list[Ending], options: argparse.Namespace) -> list[Ending]:
    """Some of the answers again, alone."""
    candidates = [ending for ending in endings if ending.is_verifiable]
    number = min(options.verify, len(candidates))
    chosen = random.Random(options.seed).sample(candidates, number)
    with bar(total=number, desc="Asking again, alone", unit="answer") as line:
        return asyncio.run(Clients(url, 1, lambda _: None).alone(chosen, line.update))


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 where all is well."""
    options = parse_arguments(argv)
    return main_of(lambda: _report(options), "")


def _report(options: argparse.Namespace) -> int:
    verdict, watch = run(options)
    origin = provenance({name: str(value) for name, value in vars(options).items()})
    report = {"verdict": asdict(verdict), "watch": watch.to_json(), **origin}
    path = options.output_dir / "soak.json"
    path.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(f"\n{verdict}\nIn {options.output_dir}/: {path.name}, server.log.")
    return 1 if verdict.problems else 0
