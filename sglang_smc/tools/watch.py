"""Run ``sglang-smc watch URL``: print a running server's rates every few seconds.

Rates are differences between two samples of ``/server_info`` and ``/v1/loads``; the only load on
the server is its replies. A terminal shows a line for each replica, and below for each request.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_smc.printable import printable
from sglang_smc.tools.commands import number

TIMEOUT = 30.0
CLEAR = "\033[H\033[2J"
_ID_LENGTH = 12
_FORM = "{:>4}{:>9}{:>9}{:>10}{:>13}{:>9}{:>11}{:>8}{:>7}  {:7}{:>5}{:>5}{:>9}"
HEADER = _FORM.format(
    *("rank", "running", "waiting", "tokens/s", "tokens/pass", "ESS / N", "resampled", "silent"),
    "tilt",
    *("mode", "N", "K", "KV free"),
)
# Fields of both tables share their columns.
_REQUEST_FORM = "{:>4}  {:12}{:>14}{:>13}{:>9}{:>11}{:>15}  {:7}{:>5}{:>5}"
REQUEST_HEADER = _REQUEST_FORM.format(
    *("rank", "request", "tokens", "tokens/pass", "ESS / N", "resampled", "", "mode", "N", "K")
)


class WatchError(RuntimeError):
    """An error that ends the display; the message gives the reason and the remedy."""


class Snapshot(NamedTuple):
    """A sample of one replica's counters."""

    at: float  # seconds, monotonic
    totals: Mapping[str, Any]  # since the server's start
    in_force: Mapping[str, Any]  # mode, N and K
    load: Mapping[str, Any]  # requests, and KV slots
    fidelity: Mapping[str, Any]  # of the last answers
    requests: Sequence[Mapping[str, Any]]  # running, those with most rounds first


class Row(NamedTuple):
    """Values of a replica's line; None if no round yields them."""

    running: int
    waiting: int
    tokens_per_second: float
    tokens_per_pass: float | None
    ess: float | None  # as a share of N, over the weighted rounds
    resampled: float | None  # share of rounds
    silent: float | None
    tilt: float | None  # of the last answers: 0 is the target, 1 about the draft
    mode: str
    num_particles: int
    num_steps: int
    free: float | None  # share of the KV slots
    requests: Sequence[Mapping[str, Any]] = ()  # running, those with most rounds first


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
    add = result.add_argument
    add("url", help="such as http://localhost:30000")
    seconds = number(float, 0.1, 3600)
    add("--interval", type=seconds, default=2.0, help="seconds between two looks")
    add("--once", action="store_true", help="one interval, then the end")
    add("--api-key", help="of the server, where it has one")
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


# --- Samples


def snapshot(url: str, api_key: str | None = None) -> list[Snapshot]:
    """Sample each replica of the server at ``url``.

    Raises WatchError if there is no server, or it does not run SMC.
    """
    states = _get(url, "/server_info", api_key).get("internal_states") or ()
    if not all("smc" in state for state in states) or not states:
        raise WatchError(f"the server at {url} does not run SMC: /server_info has no `smc`.")
    loads = {one["dp_rank"]: one for one in _get(url, "/v1/loads?include=core", api_key)["loads"]}
    at = time.monotonic()
    found = []
    for rank, state in enumerate(states):
        smc = state["smc"]
        shown = smc["in_force"], loads.get(rank, {}), smc["fidelity"]["all"], smc["running"]
        found.append(Snapshot(at, smc["since_start"], *shown))
    return found


def _get(url: str, route: str, api_key: str | None) -> dict[str, Any]:
    import httpx

    address = url.rstrip("/") + route
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The environment's proxies cannot reach this machine's own ports.
    is_here = any(f"//{name}" in url for name in ("localhost", "127.", "[::1]"))
    try:
        answer = httpx.get(address, headers=headers, timeout=TIMEOUT, trust_env=not is_here)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise WatchError(f"{address}: {error or type(error).__name__}") from error


def between(before: Sequence[Snapshot], now: Sequence[Snapshot]) -> Iterator[Row]:
    """Yield each replica's rates between two samples."""
    for first, last in zip(before, now, strict=False):
        yield _row(first, last)


def _row(first: Snapshot, last: Snapshot) -> Row:
    # A server that restarted in between counts from its start.
    began_anew = last.totals["rounds"] < first.totals["rounds"]
    earlier: Mapping[str, Any] = {} if began_anew else first.totals
    gained = {name: (last.totals[name] or 0) - (earlier.get(name) or 0) for name in last.totals}
    rounds, slots = gained["rounds"], last.load.get("max_total_num_tokens", 0)
    return Row(
        running=last.load.get("num_running_reqs", 0),
        waiting=last.load.get("num_waiting_reqs", 0),
        tokens_per_second=gained["emitted_tokens"] / max(last.at - first.at, 1e-9),
        tokens_per_pass=_share(gained["kept_columns"] + rounds, rounds),
        ess=_share(_ess_sum(last.totals) - _ess_sum(earlier), gained["weighed_rounds"]),
        resampled=_share(gained["resamplings"], rounds),
        silent=_share(gained["silent_rounds"], rounds),
        tilt=last.fidelity["tilt"],
        mode=last.in_force["mode"],
        num_particles=last.in_force["num_particles"],
        num_steps=last.in_force["num_steps"],
        free=_share(slots - last.load.get("num_used_tokens", 0), slots),
        requests=last.requests,
    )


def _ess_sum(totals: Mapping[str, Any]) -> float:
    return (totals.get("mean_ess_ratio") or 0.0) * totals.get("weighed_rounds", 0)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# --- Lines


def lines_of(replicas: Sequence[Row]) -> list[str]:
    """Return the lines below `HEADER`: one for each replica, then one for each request."""
    found = [printable(line_of(rank, row)) for rank, row in enumerate(replicas)]
    requests = [
        printable(request_line(rank, one))
        for rank, row in enumerate(replicas)
        for one in row.requests
    ]
    if not requests:
        return found
    running = max(sum(row.running for row in replicas), len(requests))
    rest = [f"{'':6}and {running - len(requests)} more"] if running > len(requests) else []
    return [*found, "", REQUEST_HEADER, *requests, *rest]


def line_of(rank: int, row: Row) -> str:
    """Return a replica's line, with a dash for missing numbers."""
    return _FORM.format(
        rank,
        row.running,
        row.waiting,
        f"{row.tokens_per_second:.1f}",
        _cell(row.tokens_per_pass, ".2f"),
        _cell(row.ess, ".2f"),
        _cell(row.resampled, ".0%"),
        _cell(row.silent, ".0%"),
        _cell(row.tilt, ".2f"),
        row.mode,
        row.num_particles,
        row.num_steps,
        _cell(row.free, ".0%"),
    )


def request_line(rank: int, request: Mapping[str, Any]) -> str:
    """Return a request's line below `REQUEST_HEADER`, over all its rounds so far."""
    return _REQUEST_FORM.format(
        rank,
        printable(request["rid"])[:_ID_LENGTH],
        request["output_tokens"],
        _cell(request["tokens_per_pass"], ".2f"),
        _cell(request["ess_ratio"], ".2f"),
        _cell(request["resample_rate"], ".0%"),
        "",
        request["mode"],
        request["num_particles"],
        request["num_steps"],
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
