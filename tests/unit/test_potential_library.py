"""The potentials that come with the package, but for the one that asks a server."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from sglang_smc.potentials.base import Potential, Text
from sglang_smc.potentials.combine import exponent, product
from sglang_smc.potentials.length import Length
from sglang_smc.potentials.regex_count import RegexCount
from sglang_smc.testing import check_potential


def text(output: str, args: object = None) -> Text:
    """A token for each character."""
    return Text([], [ord(c) for c in output], args, lambda ids: "".join(map(chr, ids)))


class NoX(Potential):
    """Forbids the letter x."""

    prefix_is_complete = True

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [-math.inf if "x" in text.output else 0.0 for text in texts]

    prefix = complete


def consistent(potential: Potential, texts: Sequence[Text]) -> bool:
    return not any(result.failed for result in check_potential(potential, texts))


def test_a_length_costs_what_is_missing_and_what_is_too_much() -> None:
    """Red where a beginning pays for what can still come, or a whole text does not."""
    args = Length.Args(per_token=0.5, target=4)
    short, long = text("ab", args), text("abcdef", args)
    assert Length().complete([short, long]) == [-1.0, -1.0]
    assert Length().prefix([short, long]) == [0.0, -1.0]
    assert consistent(Length(), [short, long])


@pytest.mark.parametrize(
    "args", [{}, {"per_token": -1.0}, {"per_token": 1.0, "target": -1}, {"per_token": 1.0, "x": 1}]
)
def test_lengths_that_are_none_are_refused(args: dict[str, float]) -> None:
    """Red where the schema takes what the potential would make nonsense of."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(args, Length.Args)


def test_matches_of_the_operators_pattern_count() -> None:
    """Red where matches overlap, or the prompt counts."""
    potential = RegexCount("a+b")
    texts = [text("aabab", potential.Args(-2.0)), text("ba", potential.Args(3.0))]
    assert potential.complete(texts) == [-4.0, 0.0]
    assert potential.prefix(texts) == [-4.0, 0.0]
    assert consistent(potential, texts)


def test_a_search_that_takes_for_ever_ends() -> None:
    """Red with `re`, which would still be at it."""
    potential = RegexCount("(a|aa|a?a)+$", seconds=0.01)
    with pytest.raises(TimeoutError):
        potential.complete([text("a" * 60 + "b", potential.Args(1.0))])


def test_a_product_adds_logarithms_and_has_its_parts_arguments() -> None:
    """Red where a part gets another's arguments, or one is left out of the sum."""
    both = product(count=RegexCount("a"), length=Length(), clean=NoX())
    args = msgspec.convert({"count": {"weight": 3.0}, "length": {"per_token": 0.5}}, both.Args)
    texts = [text("aab", args), text("aax", args)]
    assert both.complete(texts) == [6.0 - 1.5, -math.inf]
    assert both.prefix(texts) == [6.0 - 1.5, -math.inf]
    assert not both.prefix_is_complete, "that of a length is not"
    assert consistent(both, texts)


def test_a_product_opens_its_parts() -> None:
    """Red where a part that loads a model is never told to."""
    opened = []

    class Slow(NoX):
        def open(self) -> None:
            opened.append(self)

    potential = exponent(product(one=Slow(), other=Slow()), 2.0)
    potential.open()
    assert len(opened) == 2
    assert potential.prefix_is_complete


@pytest.mark.parametrize(
    "args", [{}, {"count": {}}, {"count": {"weight": 1.0}, "other": {}}, {"weight": 1.0}]
)
def test_a_products_arguments_are_checked(args: dict[str, object]) -> None:
    """Red where a part's schema is not asked, or an unknown part is let in."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(args, product(count=RegexCount("a"), clean=NoX()).Args)


def test_a_power_of_nothing_is_no_number_less() -> None:
    """Red where 0 * -inf is NaN: a potential to the power 0 is 1."""
    texts = [text("a"), text("x")]
    assert exponent(NoX(), 0.0).complete(texts) == [0.0, 0.0]
    assert exponent(NoX(), 2.0).complete(texts) == [0.0, -math.inf]
    halved = exponent(RegexCount("a"), 0.5)
    assert halved.prefix([text("aa", halved.Args(3.0))]) == [3.0]


@pytest.mark.parametrize("alpha", [-1.0, math.inf, math.nan])
def test_powers_that_are_none_are_refused(alpha: float) -> None:
    """Red where 1 / 0 would be a value."""
    with pytest.raises(ValueError, match="allowed: a finite number"):
        exponent(NoX(), alpha)


def test_a_product_of_nothing_is_refused() -> None:
    """Red where it would give no value for a text."""
    with pytest.raises(ValueError, match="no parts"):
        product()
