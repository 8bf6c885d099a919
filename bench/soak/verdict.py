"""What a soak must show, and what it did."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from soak.clients import Ending

FULL = 0.9  # of the pool
GROWTH = 0.02  # of a process's memory, over the second half
GROWTH_BYTES = 8 << 20  # or so much, which allocators keep and give back at will

Points = list[tuple[float, int]]  # seconds and bytes


@dataclass
class Verdict:
    """The numbers, and what is wrong with them."""

    requests: int
    left: int
    retracted: int
    verified: int
    full_share: float  # of the time that the pool was full
    growth: dict[str, int]  # bytes of each process over the second half
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)

    def __str__(self) -> str:
        growth = ", ".join(f"{name} {size / 2**20:+.1f} MiB" for name, size in self.growth.items())
        lines = [
            f"requests      {self.requests}, of which {self.left} left and {self.retracted} were "
            "retracted",
            f"verified      {self.verified} texts, each against the same request alone",
            f"pool          at {FULL:.0%} or above {self.full_share:.0%} of the time",
            f"memory        {growth} over the second half",
            *(f"PROBLEM       {problem}" for problem in self.problems),
        ]
        return "\n".join([*lines, "FAILED" if self.problems else "All is well."])


def judge(
    endings: list[Ending],
    alone: dict[str, list[int]],
    usage: list[float],
    memory: dict[str, Points],
    lost: list[str],
) -> Verdict:
    """Hold what happened against what must.

    Args:
        endings: of all requests.
        alone: texts of some of them, asked one at a time, by their ids.
        usage: shares of the pool in use, at regular times.
        memory: of each process.
        lost: what the server itself has lost, in words.
    """
    growth = {name: grown(points) for name, points in memory.items()}
    problems = [
        *lost,
        *(f"{e.request.rid} got no answer: {e.reason:.200}" for e in endings if e.is_error),
        *(_wrong(e, alone[e.request.rid]) for e in endings if _is_wrong(e, alone)),
        *(
            f"{name} grew by {growth[name] / 2**20:.1f} MiB over the second half"
            for name, points in memory.items()
            if growth[name] > max(GROWTH * points[-1][1], GROWTH_BYTES)
        ),
    ]
    if not endings:
        problems.append("nothing was asked")
    return Verdict(
        requests=len(endings),
        left=sum(e.reason in ("left", "abort") for e in endings),
        retracted=sum(e.retractions > 0 for e in endings),
        verified=len(alone),
        full_share=statistics.fmean(u >= FULL for u in usage) if usage else 0.0,
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


def _is_wrong(ending: Ending, alone: dict[str, list[int]]) -> bool:
    """Who left has the beginning of a text, all others have the whole."""
    text = alone.get(ending.request.rid)
    if text is None:
        return False
    found = ending.output_ids
    return found != (text[: len(found)] if ending.reason in ("left", "abort") else text)


def _wrong(ending: Ending, text: list[int]) -> str:
    return f"{ending.request.rid} got {ending.output_ids} in company and {text} alone"
