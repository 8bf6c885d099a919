"""What a soak must show, and what it did."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from soak.answers import LEFT, Ending

FULL = 0.9  # of the pool
LEAST_FULL = 0.25  # of the time; what is full less is not soaked
GROWTH = 0.02  # of a process's memory, over the second half
GROWTH_BYTES = 8 << 20  # or so much, which allocators keep and give back at will
LOGPROB_NOISE = 1e-3  # nats between batches of other shapes; another token is ten and more off
SHOWN = 20  # problems on the screen; the file has all

Points = list[tuple[float, int]]  # seconds and bytes


@dataclass
class Verdict:
    """The numbers, and what is wrong with them."""

    requests: int
    tokens: int
    left: int
    retracted: int
    verified: int
    full_share: float  # of the time that the pool was full
    growth: dict[str, int]  # bytes of each process over the second half
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        growth = ", ".join(f"{name} {size / 2**20:+.1f} MiB" for name, size in self.growth.items())
        more = len(self.problems) - SHOWN
        lines = [
            f"requests      {self.requests}, of which {self.left} left and {self.retracted} were "
            f"retracted; {self.tokens} tokens",
            f"verified      {self.verified} texts, each against the same request alone",
            f"pool          at {FULL:.0%} or above {self.full_share:.0%} of the time",
            f"memory        {growth} over the second half",
            *(f"PROBLEM       {problem}" for problem in self.problems[:SHOWN]),
            *([f"              and {more} more"] if more > 0 else []),
        ]
        return "\n".join([*lines, "FAILED" if self.problems else "All is well."])


def judge(
    endings: list[Ending],
    alone: list[Ending],
    usage: list[float],
    memory: dict[str, Points],
    lost: list[str],
) -> Verdict:
    """Hold what happened against what must.

    Args:
        endings: of all requests.
        alone: some of their answers again, asked for one at a time.
        usage: shares of the pool in use, at regular times.
        memory: of each process.
        lost: what the server itself has lost, in words.
    """
    growth = {name: grown(points) for name, points in memory.items()}
    full_share = statistics.fmean(u >= FULL for u in usage) if usage else 0.0
    retracted = {e.request.rid for e in endings if e.retractions}
    company = {ending.name: ending for ending in endings}
    problems = [
        *lost,
        *(f"{e.name} {e.problem:.500}" for e in endings if e.problem),
        *filter(None, (difference(company[a.name], a) for a in alone)),
        *(
            f"{name} grew by {growth[name] / 2**20:.1f} MiB over the second half"
            for name, points in memory.items()
            if growth[name] > max(GROWTH * points[-1][1], GROWTH_BYTES)
        ),
        *_unsoaked(endings, alone, len(retracted), full_share),
    ]
    return Verdict(
        requests=len({e.request.rid for e in endings}),
        tokens=sum(len(e.output_ids) for e in endings),
        left=len({e.request.rid for e in endings if e.reason in LEFT}),
        retracted=len(retracted),
        verified=len(alone),
        full_share=full_share,
        growth=growth,
        problems=problems,
    )


def grown(points: Points) -> int:
    """Bytes that a line through the second half of the points rises, from its start to its end."""
    half = points[len(points) // 2 :]
    if len(half) < 3:
        return 0
    seconds, sizes = zip(*half, strict=True)
    slope = statistics.linear_regression(seconds, sizes).slope
    return round(slope * (seconds[-1] - seconds[0]))


def difference(company: Ending, alone: Ending) -> str:
    """How an answer in company differs from the same alone, or "".

    Who left has the beginning of a text, all others have the whole.
    """
    if alone.problem:
        return f"{alone.name} alone {alone.problem:.500}"
    found, text = company.output_ids, alone.output_ids
    if found != (text[: len(found)] if company.reason in LEFT else text):
        return f"{company.name} got {found} in company and {text} alone"
    pairs = list(zip(company.logprobs, alone.logprobs, strict=False))
    off = max((abs(here - there) for here, there in pairs), default=0.0)
    if off > LOGPROB_NOISE:
        return f"{company.name} has log-probabilities {off:.3g} off those alone: {pairs}"
    return ""


def _unsoaked(
    endings: list[Ending], alone: list[Ending], num_retracted: int, full_share: float
) -> list[str]:
    """Why nothing is known although nothing went wrong."""
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
