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
import json
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from results import provenance
from soak.answers import Ending
from soak.clients import Clients
from soak.legs import Findings, at_rest, soak
from soak.traffic import MAX_LAG, NUM_PARTICLES, NUM_STEPS
from soak.verdict import Verdict, judge
from soak.watch import Held
from study import PAIR, PUBLISHED, bar, main_of, parser, positive, prepare_folder

from sglang_smc.tools.demo.serving import Launch, describe_log, running, smc_flags

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
MEAN_PAUSE = 0.02


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    found = parser("soak", "Many clients, a pool that is too small, and no request lost.")
    add = found.add_argument
    add("--minutes", type=float, help="of traffic; verifying comes on top (default: 3)")
    add("--requests", type=positive, help="so many, within the minutes if any are given")
    add("--warm-up", type=float, default=0.5, metavar="SHARE", help="that nothing may grow after")
    add("--verify", type=positive, default=200, metavar="N", help="texts to ask for again, alone")
    add("--crowd", type=positive, default=80, help="requests with the server at once")
    add("--running", type=positive, default=40, help="of which so many run at most")
    add("--pool", type=positive, default=2400, metavar="TOKENS", help="KV slots of the server")
    add("--pause", type=float, default=MEAN_PAUSE, help="mean seconds from client to client")
    add("--leave", type=float, default=0.4, help="share of the clients that mean to leave early")
    add("--dawdlers", type=int, default=0, help="connections of a byte a second, beside these")
    add("--seed", type=int, default=0, help="of the traffic")
    add("--pair", type=Path, default=PAIR, help="folder of target/ and draft/")
    add("--publish", metavar="NAME", help="also copy soak.json to bench/results/soak/NAME.json")
    options = found.parse_args(argv)
    if options.minutes is None and options.requests is None:
        options.minutes = 3.0
    return options


def server_flags(options: argparse.Namespace) -> list[str]:
    """Return the server flags, with a small KV pool and chunked prefill."""
    return [
        *smc_flags(options.pair / "draft", num_particles=NUM_PARTICLES, num_steps=NUM_STEPS),
        *("--speculative-smc-max-lag", str(MAX_LAG)),
        *("--dtype", "float32"),
        *("--max-total-tokens", str(options.pool)),
        *("--chunked-prefill-size", "64"),
        "--enable-priority-scheduling",
        *("--load-snapshot-publish-interval", "1"),
    ]


def run(options: argparse.Namespace) -> tuple[Verdict, Findings]:
    """Start a server, send it traffic, and check the outcome."""
    prepare_folder(options.output_dir)
    os.environ.update(ENVIRONMENT)
    log, target = options.output_dir / "server.log", options.pair / "target"
    launch = Launch("SMC server", target, log, options.running, flags=server_flags(options))
    with running(launch) as (server,):
        found = soak(server.url, options)
        alone = [] if found.lost else verify(server.url, found.endings, options)
        lost = found.lost or at_rest(server.url)
    if lost:
        lost.append(describe_log(log))
    return judge(found.endings, alone, found.watch.loaded_usage, found.rests, lost), found


def verify(url: str, endings: list[Ending], options: argparse.Namespace) -> list[Ending]:
    """Request some of the answers again, alone; half of them retracted ones, if available."""
    candidates = [ending for ending in endings if ending.is_verifiable]
    random.Random(options.seed).shuffle(candidates)
    retracted = [ending for ending in candidates if ending.retractions][: options.verify // 2]
    others = [ending for ending in candidates if not ending.retractions]
    chosen = [*retracted, *others[: options.verify - len(retracted)]]
    with bar(total=len(chosen), desc="Asking again, alone", unit="answer") as line:
        return asyncio.run(Clients(url, 1, lambda _: None).alone(chosen, line.update))


def main(argv: list[str] | None = None) -> int:
    """Run the soak; return exit status 0 if no problem is found."""
    options = parse_arguments(argv)
    return main_of(lambda: _report(options), "")


def _report(options: argparse.Namespace) -> int:
    verdict, found = run(options)
    where = ("output_dir", "pair", "publish")  # paths of this machine
    report = {
        "verdict": in_words(asdict(verdict)),
        "rests": in_words(found.rests),
        "watch": found.watch.to_json(),
        **provenance({name: value for name, value in vars(options).items() if name not in where}),
    }
    path = options.output_dir / "soak.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{verdict}\nIn {options.output_dir}/: {path.name}, server.log.")
    if options.publish:
        folder = PUBLISHED / "soak"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / f"{options.publish}.json")
    return 1 if verdict.problems else 0


def in_words(value: Any) -> Any:
    """Return a value as JSON, with the field names of a process's resources."""
    if isinstance(value, Held):
        return value._asdict()
    if isinstance(value, dict):
        return {name: in_words(one) for name, one in value.items()}
    return [in_words(one) for one in value] if isinstance(value, list) else value
