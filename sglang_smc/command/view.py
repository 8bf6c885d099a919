"""``sglang-smc view URL``: what a running server does, every few seconds.

Differences between two looks at ``/server_info``, and ``/v1/loads``: nothing runs in the server
for it but these answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

TIMEOUT = 30.0
CLEAR = "\033[H\033[2J"


class ViewError(RuntimeError):
    """There is nothing to show; the message says why and what to do."""


class Look(NamedTuple):
    """A replica of a server at one moment."""

    at: float  # seconds, of a clock that only goes forward
    totals: Mapping[str, Any]  # since the server's start
    in_force: Mapping[str, Any]  # mode, N and K
    load: Mapping[str, Any]  # requests, and KV slots
    fidelity: Mapping[str, Any]  # of the last answers


class Shown(NamedTuple):
    """What a line says of a replica; None where no round could tell."""

    running: int
    waiting: int
    tokens_per_second: float
    tokens_per_pass: float | None
    ess: float | None  # as a share of N, of the rounds that weigh
    resampled: float | None  # share of rounds
    silent: float | None
    tilt: float | None  # of the last answers: 0 is the target, 1 about the draft
    mode: str
    num_particles: int
    num_steps: int
    free: float | None  # share of the KV slots


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where there is no server to show. Ctrl-C ends it."""
    options = parser().parse_args(argv)
    try:
        run(options)
    except ViewError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc view",
        description="What a running SMC server does: on a terminal a screen that renews itself, "
        "elsewhere a line for each replica and interval.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    result.add_argument("url", help="such as http://localhost:30000")
    result.add_argument("--interval", type=_seconds, default=2.0, help="seconds between two looks")
    result.add_argument("--once", action="store_true", help="one interval, then the end")
    result.add_argument("--api-key", help="of the server, where it has one")
    return result


def run(options: argparse.Namespace) -> None:
    """Show intervals until there are no more."""
    renews = sys.stdout.isatty() and not options.once
    if not renews:
        print(HEADER, flush=True)
    before = look(options.url, options.api_key)
    while True:
        time.sleep(options.interval)
        now = look(options.url, options.api_key)
        lines = [line_of(place, one) for place, one in enumerate(between(before, now))]
        if renews:
            print(f"{CLEAR}{options.url}, every {options.interval:g} s; Ctrl-C ends\n\n{HEADER}")
        print("\n".join(lines), flush=True)
        if options.once:
            return
        before = now


def look(url: str, api_key: str | None = None) -> list[Look]:
    """Each replica of the server at ``url`` now.

    Raises ViewError where nothing answers, or what answers does not run SMC.
    """
    states = _get(url, "/server_info", api_key).get("internal_states") or ()
    if not all("smc" in state for state in states) or not states:
        raise ViewError(f"the server at {url} does not run SMC: /server_info has no `smc`.")
    loads = {one["dp_rank"]: one for one in _get(url, "/v1/loads?include=core", api_key)["loads"]}
    at = time.monotonic()
    return [_look(at, state["smc"], loads.get(rank, {})) for rank, state in enumerate(states)]


def _look(at: float, smc: Mapping[str, Any], load: Mapping[str, Any]) -> Look:
    return Look(at, smc["since_start"], smc["in_force"], load, smc["fidelity"]["all"])


def _get(url: str, route: str, api_key: str | None) -> dict[str, Any]:
    import httpx

    address = url.rstrip("/") + route
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # A proxy of the environment does not know this machine's own ports.
    is_here = any(f"//{name}" in url for name in ("localhost", "127.", "[::1]"))
    try:
        answer = httpx.get(address, headers=headers, timeout=TIMEOUT, trust_env=not is_here)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ViewError(f"{address}: {error or type(error).__name__}") from error


def between(before: Sequence[Look], now: Sequence[Look]) -> Iterator[Shown]:
    """What each replica did from one look to the next."""
    for first, last in zip(before, now, strict=False):
        yield _shown(first, last)


def _shown(first: Look, last: Look) -> Shown:
    # A server that began anew in between counts from its start.
    began_anew = last.totals["rounds"] < first.totals["rounds"]
    earlier: Mapping[str, Any] = {} if began_anew else first.totals
    gained = {name: (last.totals[name] or 0) - (earlier.get(name) or 0) for name in last.totals}
    rounds, slots = gained["rounds"], last.load.get("max_total_num_tokens", 0)
    return Shown(
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
    )


def _ess_sum(totals: Mapping[str, Any]) -> float:
    return (totals.get("mean_ess_ratio") or 0.0) * totals.get("weighed_rounds", 0)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_FORM = "{:>4}{:>9}{:>9}{:>10}{:>13}{:>9}{:>11}{:>8}{:>7}  {:7}{:>5}{:>5}{:>9}"
HEADER = _FORM.format(
    *("rank", "running", "waiting", "tokens/s", "tokens/pass", "ESS / N", "resampled", "silent"),
    "tilt",
    *("mode", "N", "K", "KV free"),
)


def line_of(rank: int, shown: Shown) -> str:
    """A line below `HEADER`; what there is no number for is a dash."""
    return _FORM.format(
        rank,
        shown.running,
        shown.waiting,
        f"{shown.tokens_per_second:.1f}",
        _cell(shown.tokens_per_pass, ".2f"),
        _cell(shown.ess, ".2f"),
        _cell(shown.resampled, ".0%"),
        _cell(shown.silent, ".0%"),
        _cell(shown.tilt, ".2f"),
        shown.mode,
        shown.num_particles,
        shown.num_steps,
        _cell(shown.free, ".0%"),
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600")
    return value
