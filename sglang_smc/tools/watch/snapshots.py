"""Compare samples of a server's ``/server_info`` and ``/v1/loads``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

TIMEOUT = 30.0


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


def snapshot(url: str, api_key: str | None = None) -> list[Snapshot]:
    """Sample each replica of the server at ``url``.

    Raises WatchError if there is no server, or it does not run SMC.
    """
    states = _get(url, "/server_info", api_key).get("internal_states") or ()
    if not all("smc" in state for state in states) or not states:
        raise WatchError(f"the server at {url} does not run SMC: /server_info has no `smc`.")
    loads = {one["dp_rank"]: one for one in _get(url, "/v1/loads?include=core", api_key)["loads"]}
    at = time.monotonic()
    return [_snapshot(at, state["smc"], loads.get(rank, {})) for rank, state in enumerate(states)]


def _snapshot(at: float, smc: Mapping[str, Any], load: Mapping[str, Any]) -> Snapshot:
    of_answers = smc["fidelity"]["all"]
    return Snapshot(at, smc["since_start"], smc["in_force"], load, of_answers, smc["running"])


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
