"""The soak's verdict: each thing that may go wrong turns it red, and nothing else does."""

from typing import Any

import pytest
from soak.answers import Ending, failed
from soak.traffic import Request
from soak.verdict import GROWTH_BYTES, Verdict, grown, judge

MIB = 1 << 20


def request(number: int) -> Request:
    return Request(f"soak-{number:06}", [4, 5], {"sampling_seed": 10 * number})


def ended(number: int, ids: list[int], reason: str = "stop", **fields: Any) -> Ending:
    return Ending(request(number), 0, reason, ids, **fields)


# A server that did all it must: one answer was retracted, one client left, two are asked again.
ENDINGS = [
    ended(0, [7, 8], logprobs=[-0.5, -2.0]),
    ended(1, [7, 8, 9], retractions=1),
    ended(2, [6], "left"),
]
ALONE = [ended(0, [7, 8], logprobs=[-0.5, -2.0]), ended(2, [6, 5, 4])]
FULL = [0.5, 0.95, 0.97, 0.93]
FLAT = {"scheduler 7": [(float(second), 900 * MIB) for second in range(60)]}


def verdict(**changes: Any) -> Verdict:
    given = {"endings": ENDINGS, "alone": ALONE, "usage": FULL, "memory": FLAT, "lost": []}
    return judge(**{**given, **changes})


def test_a_clean_soak() -> None:
    found = verdict()
    assert found.problems == []
    assert (found.requests, found.tokens) == (3, 6)
    assert (found.left, found.retracted, found.verified) == (1, 1, 2)
    assert found.full_share == 0.75
    assert found.growth == {"scheduler 7": 0}
    assert str(found).endswith("All is well.")


def growing(slope: float, *, until: float = 60.0) -> dict[str, Any]:
    """A process that grows by so many bytes a second, for so many of its 60 seconds."""
    return {"scheduler 7": [(s, 900 * MIB + round(slope * min(s, until))) for s in range(60)]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"alone": [ended(0, [7, 9])]}, "got [7, 8] in company and [7, 9] alone"),
        ({"alone": [ended(0, [7, 8, 9])]}, "got [7, 8] in company and [7, 8, 9] alone"),
        ({"alone": [ended(2, [5, 6])]}, "got [6] in company and [5, 6] alone"),
        ({"alone": [ended(0, [7, 8], logprobs=[-0.5, -2.1])]}, "0.1 off those alone"),
        ({"alone": [ended(0, [], problem="HTTP 500")]}, "soak-000000[0] alone HTTP 500"),
        ({"endings": [*ENDINGS, *failed(request(9), "ReadTimeout: ")]}, "000009[0] ReadTimeout"),
        ({"lost": ["num_used_tokens is 3"]}, "num_used_tokens is 3"),
        ({"memory": growing(MIB)}, "scheduler 7 grew by 29.0 MiB over the second half"),
        ({"usage": [0.89] * 9 + [0.91]}, "90% or above 10% of the time"),
        ({"usage": []}, "0% of the time"),
        ({"endings": [e for e in ENDINGS if not e.retractions]}, "no request was retracted"),
        ({"alone": []}, "no answer was verified"),
        ({"endings": [], "alone": []}, "nothing was asked"),
    ],
)
def test_what_turns_it_red(changes: dict[str, Any], says: str) -> None:
    found = verdict(**changes)
    assert any(says in problem for problem in found.problems), found.problems
    assert str(found).endswith("FAILED")
    assert "PROBLEM" in str(found)


def test_growth_that_stops_is_none() -> None:
    assert verdict(memory=growing(10 * MIB, until=30)).problems == []


def test_a_little_growth_is_the_allocators() -> None:
    per_second = GROWTH_BYTES / 60
    assert verdict(memory=growing(per_second)).problems == []
    assert grown(growing(per_second)["scheduler 7"]) == pytest.approx(per_second * 29, rel=0.01)
