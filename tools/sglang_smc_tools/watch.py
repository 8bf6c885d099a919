"""Run ``sglang-smc watch URL``: print a running server's rates every few seconds.

Rates are differences between two samples of ``/server_info`` and ``/v1/loads``; the only load on
the server is its replies. A terminal shows a line for each replica, and below for each request.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang_smc.command.program import command, number
from sglang_smc.printable import printable
from sglang_smc_tools.commands import told_by

CLEAR = "\033[H\033[2J"
_ID_LENGTH = 12
#: Columns of both tables, which share places.
_REPLICA = "{:>4}{:>9}{:>9}{:>10}{:>13}{:>9}{:>11}{:>8}{:>7}  {:7}{:>5}{:>5}{:>9}"
_REQUEST = "{:>4}  {:12}{:>14}{:>13}{:>9}{:>11}{:>15}  {:7}{:>5}{:>5}"
_SIZES = ("mode", "N", "K")
_RATES = ("tokens/pass", "ESS / N", "resampled")
REPLICA = ("rank", "running", "waiting", "tokens/s", *_RATES, "silent", "tilt", *_SIZES, "KV free")
REQUEST = ("rank", "request", "tokens", *_RATES, "", *_SIZES)
HEADER = _REPLICA.format(*REPLICA)
REQUEST_HEADER = _REQUEST.format(*REQUEST)
NUMBERS = {"tokens/s": ".1f", "tokens/pass": ".2f", "ESS / N": ".2f", "resampled": ".0%"}
NUMBERS |= {"silent": ".0%", "tilt": ".2f", "KV free": ".0%"}


class Snapshot(NamedTuple):
    """A sample of one replica."""

    at: float  # seconds, monotonic
    smc: Mapping[str, Any]  # of /server_info
    load: Mapping[str, Any]  # of /v1/loads: requests, and KV slots


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc watch",
        description="Shows what a running SMC server does, as a screen that renews itself, or into "
        "a file as lines: in each interval one for each replica and one for each running request "
        "(at most 64 of a replica, those with most rounds).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("url", help="the server, such as http://localhost:30000")
    seconds = number(float, 0.1, 3600)
    add("--interval", type=seconds, default=2.0, help="seconds between two updates")
    add("--once", action="store_true", help="print one interval and exit")
    add("--api-key", help="the server's API key")
    return result


def run(options: argparse.Namespace) -> None:
    """Print intervals until interrupted, or one with ``--once``."""
    renews = sys.stdout.isatty() and not options.once
    if not renews:
        print(HEADER, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        before = snapshot(options.url, options.api_key)
        while True:
            time.sleep(options.interval)
            now = snapshot(options.url, options.api_key)
            if renews:
                every = f"{options.url}, every {options.interval:g} s; Ctrl-C ends"
                print(f"{CLEAR}{every}\n\n{HEADER}")
            print("\n".join(lines_of(before, now)), flush=True)
            if options.once:
                return
            before = now


def snapshot(url: str, api_key: str | None = None) -> list[Snapshot]:
    """Sample each replica of the server at ``url``.

    Raises ValueError if there is no server, or it does not run SMC.
    """
    states = told_by(url, "/server_info", "internal_states", api_key)["internal_states"]
    if not states or not all("smc" in state for state in states):
        raise ValueError(f"the server at {url} does not run SMC: /server_info has no `smc`.")
    told = told_by(url, "/v1/loads?include=core", "loads", api_key)["loads"]
    loads = {one["dp_rank"]: one for one in told}
    at = time.monotonic()
    return [Snapshot(at, one["smc"], loads.get(rank, {})) for rank, one in enumerate(states)]


def rates(first: Snapshot, last: Snapshot) -> dict[str, Any]:
    """Return a replica's values between two samples, by column; None if no round yields one.

    ``ESS / N`` is over the weighted rounds, ``resampled`` and ``silent`` are shares of all rounds,
    and ``tilt`` is of the last answers: 0 is the target, 1 about the draft.
    """
    totals = last.smc["since_start"]
    load = last.load
    in_force = last.smc["in_force"]
    # A server that restarted in between counts from its start.
    began_anew = totals["rounds"] < first.smc["since_start"]["rounds"]
    earlier: Mapping[str, Any] = {} if began_anew else first.smc["since_start"]
    gained = {name: (totals[name] or 0) - (earlier.get(name) or 0) for name in totals}
    rounds = gained["rounds"]
    slots = load.get("max_total_num_tokens", 0)
    return {
        "running": load.get("num_running_reqs", 0),
        "waiting": load.get("num_waiting_reqs", 0),
        "tokens/s": gained["emitted_tokens"] / max(last.at - first.at, 1e-9),
        "tokens/pass": _share(gained["emitted_tokens"], rounds),
        "ESS / N": _share(_ess_sum(totals) - _ess_sum(earlier), gained["weighed_rounds"]),
        "resampled": _share(gained["resamplings"], rounds),
        "silent": _share(gained["silent_rounds"], rounds),
        "tilt": last.smc["fidelity"]["all"]["tilt"],
        **_sizes(in_force),
        "KV free": _share(slots - load.get("num_used_tokens", 0), slots),
    }


def _ess_sum(totals: Mapping[str, Any]) -> float:
    return (totals.get("mean_ess_ratio") or 0.0) * totals.get("weighed_rounds", 0)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sizes(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"mode": of["mode"], "N": of["num_particles"], "K": of["num_steps"]}


def lines_of(before: Sequence[Snapshot], now: Sequence[Snapshot]) -> list[str]:
    """Return the lines below `HEADER`: one for each replica, then one for each request.

    Of a replica's requests the server tells those with most rounds; their values are over all their
    rounds so far.
    """
    rows = [rates(*both) for both in zip(before, now, strict=False)]
    replicas = [_line(_REPLICA, REPLICA, {"rank": n, **row}) for n, row in enumerate(rows)]
    reasons = ((n, replica.smc.get("reason")) for n, replica in enumerate(now))
    replicas += [printable(f"{n:>4}  {reason}") for n, reason in reasons if reason]
    requests = [
        {
            "rank": rank,
            "request": printable(one["rid"])[:_ID_LENGTH],
            "tokens": one["output_tokens"],
            "tokens/pass": one["tokens_per_pass"],
            "ESS / N": one["ess_ratio"],
            "resampled": one["resample_rate"],
            "": "",
            **_sizes(one),
        }
        for rank, replica in enumerate(now)
        for one in replica.smc["running"]
    ]
    if not requests:
        return replicas
    more = sum(row["running"] for row in rows) - len(requests)
    rest = [f"{'':6}and {more} more"] if more > 0 else []
    return [*replicas, "", REQUEST_HEADER, *(_line(_REQUEST, REQUEST, r) for r in requests), *rest]


def _line(form: str, columns: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a line of a table, with a dash for missing numbers."""
    cells = ((values[name], NUMBERS.get(name, "")) for name in columns)
    told = ("-" if value is None else format(value, number) for value, number in cells)
    return printable(form.format(*told))


main = command(parser, run, refused=1)

if __name__ == "__main__":
    sys.exit(main())
