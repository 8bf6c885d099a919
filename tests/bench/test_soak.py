"""The soak's verdict: each thing that may go wrong turns it red, and nothing else does."""

from typing import Any

import pytest
from soak.answers import Ending, failed
from soak.traffic import Request
from soak.verdict import GROWTH_BYTES, GROWTH_FDS, GROWTH_THREADS, Verdict, judge
from soak.watch import Held

MIB = 1 << 20


def request(number: int) -> Request:
    return Request(f"soak-{number:06}", [4, 5], {"sampling_seed": 10 * number})


def ended(number: int, ids: list[int], reason: str = "stop", **fields: Any) -> Ending:
    return Ending(request(number), 0, reason, ids, **fields)


# A server that did all it must: one answer was retracted, one client left, all are asked again.
# What was drawn behind the retraction is another text, with other log-probabilities.
ENDINGS = [
    ended(0, [7, 8], logprobs=[-0.5, -2.0]),
    ended(1, [7, 8, 9], retractions=1, undisturbed=[7, 8], logprobs=[-0.5, -2.0, -1.0]),
    ended(2, [6], "left"),
]
ALONE = [
    ended(0, [7, 8], logprobs=[-0.5, -2.0]),
    ended(1, [7, 8, 3, 2], logprobs=[-0.5, -2.0, -3.0, -0.1]),
    ended(2, [6, 5, 4]),
]
FULL = [0.5, 0.95, 0.97, 0.93]
WARM = Held(900 * MIB, 40, 12)


def verdict(**changes: Any) -> Verdict:
    rests = [{"scheduler 7": WARM}, {"scheduler 7": WARM}]
    given = {"endings": ENDINGS, "alone": ALONE, "usage": FULL, "rests": rests, "lost": []}
    return judge(**{**given, **changes})


def later(memory: int = 0, fds: int = 0, threads: int = 0) -> list[dict[str, Held]]:
    """Rests of a process that held so much more at the second."""
    more = Held(WARM.memory + memory, WARM.fds + fds, WARM.threads + threads)
    return [{"scheduler 7": WARM}, {"scheduler 7": more}]


def test_a_clean_soak() -> None:
    found = verdict()
    assert found.problems == []
    assert (found.requests, found.tokens) == (3, 6)
    assert (found.left, found.retracted) == (1, 1)
    assert (found.verified, found.verified_retracted) == (3, 1)
    assert found.full_share == 0.75
    assert found.growth == {"scheduler 7": Held(0, 0, 0)}
    assert str(found).endswith("All is well.")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"alone": [ended(0, [7, 9])]}, "got [7, 8] in company and [7, 9] alone"),
        ({"alone": [ended(0, [7, 8, 9])]}, "got [7, 8] in company and [7, 8, 9] alone"),
        ({"alone": [ended(2, [5, 6])]}, "got [6] in company and [5, 6] alone"),
        ({"alone": [ended(0, [7, 8], logprobs=[-0.5, -2.1])]}, "0.1 off those alone"),
        ({"alone": [ended(1, [7, 9, 9])]}, "000001[0] got [7, 8] in company and [7, 9, 9] alone"),
        ({"alone": [ended(0, [], problem="HTTP 500")]}, "soak-000000[0] alone HTTP 500"),
        ({"endings": [*ENDINGS, *failed(request(9), "ReadTimeout: ")]}, "000009[0] ReadTimeout"),
        ({"lost": ["num_used_tokens is 3"]}, "num_used_tokens is 3"),
        ({"rests": later(memory=29 * MIB)}, "scheduler 7 grew since the warm-up: +29.0 MiB"),
        ({"rests": later(fds=GROWTH_FDS + 1)}, "+0.0 MiB, +5 files, +0 threads"),
        ({"rests": later(threads=GROWTH_THREADS + 1)}, "+0 files, +5 threads"),
        ({"rests": [{"scheduler 7": WARM}, {}]}, "scheduler 7 is gone"),
        ({"usage": [0.84] * 9 + [0.86]}, "85% or above 10% of the time"),
        ({"usage": []}, "0% of the time"),
        ({"endings": ENDINGS[:1], "alone": ALONE[:1]}, "no request was retracted"),
        ({"alone": []}, "no answer was verified"),
        ({"endings": [], "alone": []}, "nothing was asked"),
    ],
)
def test_what_turns_it_red(changes: dict[str, Any], says: str) -> None:
    found = verdict(**changes)
    assert any(says in problem for problem in found.problems), found.problems
    assert str(found).endswith("FAILED")
    assert "PROBLEM" in str(found)


def test_a_little_growth_is_the_allocators() -> None:
    little = later(GROWTH_BYTES, GROWTH_FDS, GROWTH_THREADS)
    assert verdict(rests=little).problems == []
