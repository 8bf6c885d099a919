"""Check the requirements of a soak."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from soak.clients import LEFT, Ending
from soak.watch import Held

FULL = 0.85  # share of the pool; the longest prompt needs a tenth of it free
LEAST_FULL = 0.25  # share of the time; with less the soak is inconclusive
# Allowed growth of a process between the rest after the warm-up and the last one.
GROWTH = 0.02  # share of its memory
GROWTH_BYTES = 8 << 20  # or so many bytes, which allocators may keep
GROWTH_FDS = 4
GROWTH_THREADS = 4  # thread pools grow up to a bound as they are used
LOGPROB_NOISE = 1e-3  # nats between batches of other shapes; another token differs by ten and more
SHOWN = 20  # number of problems on the screen; the file has all


@dataclass
class Verdict:
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
            *(f"since warm-up {name}: {_words(growth)}" for name, growth in self.growth.items()),
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
) -> Verdict:
    """Check the requirements.

    Args:
        endings: of all requests.
        alone: some of their answers again, requested one at a time.
        usage: shares of the pool in use, at regular times during traffic.
        rests: resources of each process at rest, after the warm-up and at the end.
        lost: the server's own losses, as sentences.
    """
    warm, last = rests
    growth = {name: grown(warm[name], last[name]) for name in warm if name in last}
    full_share = statistics.fmean(u >= FULL for u in usage) if usage else 0.0
    retracted = {e.request.rid for e in endings if e.retractions}
    company = {ending.name: ending for ending in endings}
    problems = [
        *lost,
        *(f"{e.name} {e.problem:.500}" for e in endings if e.problem),
        *filter(None, (difference(company[a.name], a) for a in alone)),
        *(f"{name} is gone" for name in warm if name not in last),
        *(
            f"{name} grew since the warm-up: {_words(more)}"
            for name, more in growth.items()
            if _is_too_much(more, last[name])
        ),
        *_unsoaked(endings, alone, len(retracted), full_share),
    ]
    return Verdict(
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


def grown(before: Held, after: Held) -> Held:
    """Return the growth of a process's resources."""
    return Held(*(now - then for then, now in zip(before, after, strict=True)))


def _is_too_much(more: Held, last: Held) -> bool:
    return (
        more.memory > max(GROWTH * last.memory, GROWTH_BYTES)
        or more.fds > GROWTH_FDS
        or more.threads > GROWTH_THREADS
    )


def _words(more: Held) -> str:
    return f"{more.memory / 2**20:+.1f} MiB, {more.fds:+} files, {more.threads:+} threads"


def difference(company: Ending, alone: Ending) -> str:
    """Return the difference between an answer under load and the same alone, or "".

    If the client left or the request was retracted only the prefix is compared, else the whole
    text.
    """
    if alone.problem:
        return f"{alone.name} alone {alone.problem:.500}"
    found, text = company.seeded, alone.output_ids
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
    found = []
    if not endings:
        found.append("nothing was asked. Raise --minutes.")
    if endings and not alone:
        found.append("no answer was verified. Raise --minutes.")
    if full_share < LEAST_FULL:
        found.append(
            f"the pool was at {FULL:.0%} or above {full_share:.0%} of the time; "
            f"{LEAST_FULL:.0%} make a soak. {smaller}"
        )
    if not num_retracted:
        found.append(f"no request was retracted, so the pool was never too small. {smaller}")
    return found
