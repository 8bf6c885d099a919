"""Watch the server, and check the requirements of a soak."""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import psutil
from soak.clients import LEFT, Ending

FULL = 0.85  # share of the pool; the longest prompt needs a tenth of it free
LEAST_FULL = 0.25  # share of the time; with less the soak is inconclusive
# Allowed growth of a process between the rest after the warm-up and the last one.
GROWTH = 0.02  # share of its memory
GROWTH_BYTES = 8 << 20  # or so many bytes, which allocators may keep
GROWTH_FDS = 4
GROWTH_THREADS = 4  # thread pools grow up to a bound as they are used
LOGPROB_NOISE = 1e-3  # nats between batches of other shapes; another token differs by ten and more
SHOWN = 20  # number of problems on the screen; the file has all
INTERVAL = 1.0  # seconds
ROLES = ("scheduler", "detokenizer", "resource_tracker", "launch_server")


class Held(NamedTuple):
    """Resources of a process: private bytes, open files and sockets, threads."""

    memory: int
    fds: int
    threads: int

    def __str__(self) -> str:
        return f"{self.memory / 2**20:+.1f} MiB, {self.fds:+} files, {self.threads:+} threads"


class Watch:
    """Samples of the server's pool, taken every second inside the ``with`` block.

    Attributes:
        is_loaded: whether clients are arriving; afterwards the pool drains.
        usage: shares of the pool in use while clients were arriving.
    """

    def __init__(self, url: str) -> None:
        self.is_loaded = False
        self.usage: list[float] = []
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        live = filter(_is_live, psutil.Process().children(recursive=True))
        self._processes = {f"{_role(child)} {child.pid}": child for child in live}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def now(self) -> dict[str, Held]:
        """Return the current resources of each live process of the server."""
        return {name: held(one) for name, one in self._processes.items() if _is_live(one)}

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            was_loaded = self.is_loaded
            try:
                load = load_of(self._url)
            except httpx.HTTPError:
                continue  # the server is slow or gone, which the clients report
            if was_loaded and self.is_loaded:
                self.usage.append(load["token_usage"])


def load_of(url: str) -> dict[str, Any]:
    """Return the server's load."""
    reply = httpx.get(f"{url}/v1/loads", timeout=60, trust_env=False).raise_for_status()
    return reply.json()["loads"][0]


def held(process: psutil.Process) -> Held:
    """Return a process's resources, without file-backed memory: paged-in code is no growth."""
    with process.oneshot():
        info = process.memory_info()
        return Held(info.rss - info.shared, process.num_fds(), process.num_threads())


def _is_live(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((role for role in ROLES if role in line), process.name())


# --- The verdict


@dataclass
class SoakVerdict:
    """The numbers of a soak, and its problems."""

    requests: int
    tokens: int
    left: int
    retracted: int
    verified: int
    verified_retracted: int  # of these; tokens before the retraction
    full_share: float  # of the time that the pool was full
    growth: dict[str, Held]  # of each process since the warm-up
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = len(self.problems) - SHOWN
        lines = [
            f"requests      {self.requests}, of which {self.left} left and {self.retracted} were "
            f"retracted; {self.tokens} tokens",
            f"verified      {self.verified} texts, each against the same request alone; of "
            f"{self.verified_retracted} what came before the retraction",
            f"pool          at {FULL:.0%} or above {self.full_share:.0%} of the time",
            *(f"since warm-up {name}: {growth}" for name, growth in self.growth.items()),
            *(f"PROBLEM       {problem}" for problem in self.problems[:SHOWN]),
            *([f"              and {more} more"] if more > 0 else []),
        ]
        return "\n".join([*lines, "FAILED" if self.problems else "All is well."])


def judge(
    endings: list[Ending],
    alone: list[Ending],
    usage: list[float],
    rests: list[dict[str, Held]],
    lost: list[str],
) -> SoakVerdict:
    """Check the requirements.

    Args:
        endings: of all requests.
        alone: some of their answers again, requested one at a time.
        usage: shares of the pool in use, at regular times during traffic.
        rests: resources of each process at rest, after the warm-up and at the end.
        lost: the server's own losses, as sentences.
    """
    warm, last = rests
    growth = {
        name: Held(*(now - then for then, now in zip(warm[name], last[name], strict=True)))
        for name in warm
        if name in last
    }
    full_share = statistics.fmean(u >= FULL for u in usage) if usage else 0.0
    retracted = {e.request.rid for e in endings if e.retractions}
    company = {ending.name: ending for ending in endings}
    problems = [
        *lost,
        *(f"{e.name} {e.problem:.500}" for e in endings if e.problem),
        *filter(None, (difference(company[a.name], a) for a in alone)),
        *(f"{name} is gone" for name in warm if name not in last),
        *(
            f"{name} grew since the warm-up: {more}"
            for name, more in growth.items()
            if more.memory > max(GROWTH * last[name].memory, GROWTH_BYTES)
            or more.fds > GROWTH_FDS
            or more.threads > GROWTH_THREADS
        ),
        *_unsoaked(endings, alone, len(retracted), full_share),
    ]
    return SoakVerdict(
        requests=len({e.request.rid for e in endings}),
        tokens=sum(len(e.output_ids) for e in endings),
        left=len({e.request.rid for e in endings if e.reason in LEFT}),
        retracted=len(retracted),
        verified=len(alone),
        verified_retracted=sum(company[a.name].retractions > 0 for a in alone),
        full_share=full_share,
        growth=growth,
        problems=problems,
    )


def difference(company: Ending, alone: Ending) -> str:
    """Return the difference between an answer under load and the same alone, or "".

    If the client left or the request was retracted only the prefix is compared, else the whole
    text.
    """
    if alone.problem:
        return f"{alone.name} alone {alone.problem:.500}"
    found = company.seeded
    text = alone.output_ids
    if found != (text if company.is_whole else text[: len(found)]):
        return f"{company.name} got {found} in company and {text} alone"
    pairs = list(zip(company.logprobs[: len(found)], alone.logprobs, strict=False))
    off = max((abs(here - there) for here, there in pairs), default=0.0)
    if off > LOGPROB_NOISE:
        return f"{company.name} has log-probabilities {off:.3g} off those alone: {pairs}"
    return ""


def _unsoaked(
    endings: list[Ending], alone: list[Ending], num_retracted: int, full_share: float
) -> list[str]:
    """Return the reasons why a soak without problems is inconclusive."""
    smaller = "Lower --pool, or raise --crowd, --running or --minutes."
    reasons = {
        "nothing was asked. Raise --minutes.": not endings,
        "no answer was verified. Raise --minutes.": endings and not alone,
        f"the pool was at {FULL:.0%} or above {full_share:.0%} of the time; {LEAST_FULL:.0%} make "
        f"a soak. {smaller}": full_share < LEAST_FULL,
        f"no request was retracted, so the pool was never too small. {smaller}": not num_retracted,
    }
    return [reason for reason, holds in reasons.items() if holds]
