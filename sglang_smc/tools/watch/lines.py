"""Format a server's replicas, and below them the running requests, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_smc.printable import printable
from sglang_smc.tools.watch.snapshots import Row

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


def lines_of(replicas: Sequence[Row]) -> list[str]:
    """Return the lines below `HEADER`: one for each replica, then one for each request."""
    found = [printable(line_of(rank, shown)) for rank, shown in enumerate(replicas)]
    requests = [
        printable(request_line(rank, one))
        for rank, shown in enumerate(replicas)
        for one in shown.requests
    ]
    if not requests:
        return found
    running = max(sum(shown.running for shown in replicas), len(requests))
    rest = [f"{'':6}and {running - len(requests)} more"] if running > len(requests) else []
    return [*found, "", REQUEST_HEADER, *requests, *rest]


def line_of(rank: int, shown: Row) -> str:
    """Return a replica's line, with a dash for missing numbers."""
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
