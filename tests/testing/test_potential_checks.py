"""`check_potential` finds each kind of inconsistency, and none where there is none."""

import math
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from steered import text

from sglang_smc.potentials import Potential, Text
from sglang_smc.tools.testing import Verdict, check_potential

Values = Callable[[Sequence[Text]], Sequence[float]]
CHECKS = ("values", "batched", "repeated", "forbidden", "whole")


TEXTS = [text("abca"), text("bb"), text("")]


class Made(Potential):
    """Of functions; log phi is minus the output's length if nothing else is said."""

    def __init__(self, prefix: Values, complete: Values, claims: bool = True) -> None:
        self.prefix, self.complete = prefix, complete  # type: ignore[method-assign]
        self.prefix_is_complete = claims  # type: ignore[misc]

    def complete(self, texts: Sequence[Text]) -> Sequence[float]:
        raise NotImplementedError


def lengths(texts: Sequence[Text]) -> list[float]:
    return [-float(len(text.output_ids)) for text in texts]


def failed(potential: Potential, **options: int) -> set[str]:
    results = check_potential(potential, TEXTS, **options)
    assert [result.check for result in results] == [f"potential-{name}" for name in CHECKS]
    return {result.check.removeprefix("potential-") for result in results if result.failed}


def each(value: Callable[[str], float]) -> Values:
    return lambda texts: [value(text.output) for text in texts]


def rounded(texts: Sequence[Text]) -> list[float]:
    return [value * (1 + 1e-6 * len(texts)) for value in lengths(texts)]


def centred(texts: Sequence[Text]) -> list[float]:
    found = lengths(texts)
    return [value - max(found) for value in found]


zeros = each(lambda output: 0.0)
only_b = each(lambda output: -math.inf if output == "ab" else 0.0)
nothing_whole = each(lambda output: -math.inf if "b" in output else 0.0)
calls = count()
#: A potential, and the checks that fail of it.
FOUND: dict[str, tuple[Potential, set[str]]] = {
    "sound": (Made(lengths, lengths), set()),
    "too few": (Made(lambda texts: lengths(texts)[1:], lengths), {"values"}),
    "too many": (Made(lambda texts: [*lengths(texts), 0.0], lengths), {"values"}),
    "NaN": (
        Made(each(lambda output: math.nan if output.endswith("c") else 0.0), lengths),
        {"values"},
    ),
    "infinite": (Made(each(lambda o: math.inf if o == "bb" else 0.0), lengths), {"values"}),
    "depends on the others": (Made(lengths, centred, claims=False), {"batched"}),
    "changes": (
        Made(lambda texts: [float(next(calls))] * len(texts), lengths, claims=False),
        {"batched", "repeated"},
    ),
    "goes on behind a forbidden beginning": (Made(only_b, zeros, claims=False), {"forbidden"}),
    "ends behind one": (Made(nothing_whole, zeros, claims=False), {"forbidden"}),
    "forbids to its end": (Made(nothing_whole, nothing_whole), set()),
    "claims what does not hold": (Made(zeros, lengths), {"whole"}),
    # As a model's values are, which differ with the batch.
    "rounded": (Made(rounded, rounded), set()),
}


@pytest.mark.parametrize(("potential", "expected"), FOUND.values(), ids=FOUND.keys())
def test_each_inconsistency_is_found(potential: Potential, expected: set[str]) -> None:
    """Without values or a claim the checks of these cannot say a thing."""
    assert failed(potential) == expected
    results = {
        one.check.removeprefix("potential-"): one for one in check_potential(potential, TEXTS)
    }
    silent = {name for name, one in results.items() if one.verdict is Verdict.NOT_APPLICABLE}
    if expected == {"values"}:
        assert silent == results.keys() - expected
    else:
        assert silent == (set() if potential.prefix_is_complete else {"whole"})


def test_few_beginnings_of_a_long_text() -> None:
    """Red where the first or the whole is left out: the last token alone is forbidden again."""
    asked: list[int] = []

    def spy(texts: Sequence[Text]) -> list[float]:
        asked.extend(len(text.output_ids) for text in texts)
        return lengths(texts)

    check_potential(Made(spy, lengths), [text("a" * 100)], most_beginnings=5)
    assert sorted(set(asked)) == [0, 25, 50, 75, 100]


def test_no_texts_are_refused() -> None:
    """Red where nothing looked at is a pass."""
    with pytest.raises(ValueError, match="no texts"):
        check_potential(Made(lengths, lengths), [])
