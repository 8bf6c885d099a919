"""Run ``sglang-smc watch URL``: print a running server's rates every few seconds.

Rates are differences of counters between two samples; the only load on the server is its replies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from sglang_smc.printable import printable
from sglang_smc.tools.watch.lines import HEADER, lines_of
from sglang_smc.tools.watch.snapshots import WatchError, between, snapshot

CLEAR = "\033[H\033[2J"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if there is no SMC server; Ctrl-C ends the display."""
    options = parser().parse_args(argv)
    try:
        run(options)
    except WatchError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc watch",
        description="What a running SMC server does: on a terminal a screen that renews itself, "
        "elsewhere lines for each interval: one for each replica, and one for each request that "
        "runs, of which a replica tells the 64 with most rounds behind them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    result.add_argument("url", help="such as http://localhost:30000")
    result.add_argument("--interval", type=_seconds, default=2.0, help="seconds between two looks")
    result.add_argument("--once", action="store_true", help="one interval, then the end")
    result.add_argument("--api-key", help="of the server, where it has one")
    return result


def run(options: argparse.Namespace) -> None:
    """Print intervals until interrupted, or one with ``--once``."""
    renews = sys.stdout.isatty() and not options.once
    if not renews:
        print(HEADER, flush=True)
    before = snapshot(options.url, options.api_key)
    while True:
        time.sleep(options.interval)
        now = snapshot(options.url, options.api_key)
        lines = lines_of(list(between(before, now)))
        if renews:
            print(f"{CLEAR}{options.url}, every {options.interval:g} s; Ctrl-C ends\n\n{HEADER}")
        print("\n".join(lines), flush=True)
        if options.once:
            return
        before = now


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600")
    return value
