"""`check_potential` finds each kind of inconsistency, and none where there is none."""

import math
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from sglang_smc.potentials import Potential, Text
from sglang_smc.testing import Verdict, check_potential

Values = Callable[[Sequence[Text]], Sequence[float]]
CHECKS = ("values", "batched", "repeated", "forbidden", "whole")


def text(output: str) -> Text:
    return Text([], [ord(c) for c in output], None, lambda ids: "".join(map(chr, ids)))


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


def test_a_sound_potential_passes() -> None:
    """Red where a check errs."""
    assert failed(Made(lengths, lengths)) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda texts: lengths(texts)[1:],
        lambda texts: [*lengths(texts), 0.0],
        each(lambda output: math.nan if output.endswith("c") else 0.0),
        each(lambda output: math.inf if output == "bb" else 0.0),
    ],
    ids=["too few", "too many", "NaN", "infinite"],
)
def test_values_that_are_none(wrong: Values) -> None:
    """Red where counts, NaN or plus infinity are not looked at; the others cannot say a thing."""
    assert failed(Made(wrong, lengths)) == {"values"}
    results = check_potential(Made(wrong, lengths), TEXTS)
    assert {result.verdict for result in results[1:]} == {Verdict.NOT_APPLICABLE}


def test_values_that_depend_on_the_others() -> None:
    """Red where only whole batches are asked about."""

    def centred(texts: Sequence[Text]) -> list[float]:
        found = lengths(texts)
        return [value - max(found) for value in found]

    assert "batched" in failed(Made(lengths, centred, claims=False))


def test_values_that_change() -> None:
    """Red where no text is asked about twice."""
    calls = count()
    assert "repeated" in failed(
        Made(lambda texts: [float(next(calls))] * len(texts), lengths, claims=False)
    )


def test_a_forbidden_beginning_that_goes_on() -> None:
    """Red where beginnings are not compared, or the whole text is not."""
    only_b = each(lambda output: -math.inf if output == "ab" else 0.0)
    nothing_whole = each(lambda output: -math.inf if "b" in output else 0.0)
    zeros = each(lambda output: 0.0)
    assert failed(Made(only_b, zeros, claims=False)) == {"forbidden"}
    assert failed(Made(nothing_whole, zeros, claims=False)) == {"forbidden"}
    assert failed(Made(nothing_whole, nothing_whole)) == set()


def test_a_claim_that_does_not_hold() -> None:
    """Red where the claim is not asked about; without a claim nothing is checked."""
    zeros = each(lambda output: 0.0)
    assert failed(Made(zeros, lengths)) == {"whole"}
    results = check_potential(Made(zeros, lengths, claims=False), TEXTS)
    assert results[-1].verdict is Verdict.NOT_APPLICABLE


def test_few_beginnings_of_a_long_text() -> None:
    """Red where the first or the whole is left out: the last token alone is forbidden again."""
    asked: list[int] = []

    def spy(texts: Sequence[Text]) -> list[float]:
        asked.extend(len(text.output_ids) for text in texts)
        return lengths(texts)

    check_potential(Made(spy, lengths), [text("a" * 100)], most_beginnings=5)
    assert sorted(set(asked)) == [0, 25, 50, 75, 100]


def test_rounding_is_no_failure() -> None:
    """Red where values are compared bit by bit, as a model's in another batch never are."""

    def rounded(texts: Sequence[Text]) -> list[float]:
        return [value * (1 + 1e-6 * len(texts)) for value in lengths(texts)]

    assert failed(Made(rounded, rounded)) == set()


def test_no_texts_are_refused() -> None:
    """Red where nothing looked at is a pass."""
    with pytest.raises(ValueError, match="no texts"):
        check_potential(Made(lengths, lengths), [])
