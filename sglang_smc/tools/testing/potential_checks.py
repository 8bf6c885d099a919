"""Check that a potential's values are usable by SMC, and that its declared properties hold.

They need no server::

    from transformers import AutoTokenizer
    from sglang_smc.potentials import Text
    from sglang_smc.tools.testing import check_potential

    def test_my_potential_is_consistent():
        tokenizer = AutoTokenizer.from_pretrained("my/model")
        prompt, output = (tokenizer(text)["input_ids"] for text in ("1+2=", "3"))
        potential = MyPotential()
        potential.open()
        texts = [Text(prompt, output, MyPotential.Args(), tokenizer.decode)]
        for result in check_potential(potential, texts):
            assert not result.failed, result.note
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from sglang_smc.potentials.base import Potential, Text
from sglang_smc.tools.testing.report import Result, Verdict

_SHOWN = 40  # characters of a text that a note shows


class _Values(NamedTuple):
    """One method's values of texts, all from one call."""

    name: str
    method: Callable[[Sequence[Text]], Sequence[float]]
    texts: Sequence[Text]
    values: list[float]

    def differing(self, others: Sequence[float], tolerance: float) -> Iterator[tuple[str, float]]:
        """Yield a description of each value that another one differs from, and the other one."""
        for text, value, other in zip(self.texts, self.values, others, strict=True):
            if not math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance):
                yield f"of {_shown(text)} {self.name} is {value:g}", other


class _Asked(NamedTuple):
    """The values of a potential on some texts."""

    potential: Potential
    series: Sequence[Sequence[Text]]  # the prefixes of each text
    prefixes: _Values
    wholes: _Values
    tolerance: float

    @property
    def both(self) -> tuple[_Values, _Values]:
        return self.prefixes, self.wholes


def check_potential(
    potential: Potential,
    texts: Sequence[Text],
    *,
    most_beginnings: int = 32,
    tolerance: float = 1e-4,
) -> list[Result]:
    """Check that an opened potential is consistent on these texts and their prefixes.

    Args:
        texts: complete outputs, as in a server, with arguments of `Potential.Args`.
        most_beginnings: prefixes checked per text, evenly spaced, the first and last included.
        tolerance: allowed difference in nats between two values of one text, since models round
            differently in batches. For large values, the same relative difference.

    Returns:
        Results of five checks. If values are unusable, the other four are not applicable.

    Raises:
        ValueError: there are no texts.
    """
    if not texts:
        raise ValueError("check_potential was given no texts; needed: one or more.")
    series = [_beginnings(text, most_beginnings) for text in texts]
    every = [beginning for of_text in series for beginning in of_text]
    prefix, complete = potential.prefix, potential.complete
    prefixes = _Values("prefix", prefix, every, list(prefix(every)))
    wholes = _Values("complete", complete, texts, list(complete(texts)))
    asked = _Asked(potential, series, prefixes, wholes, tolerance)
    results: list[Result] = []
    for name, proves, remedy, check in _CHECKS:
        if results and results[0].failed:
            verdict, note = Verdict.NOT_APPLICABLE, "Its values are unusable."
        elif check is _unlike_whole and not potential.prefix_is_complete:
            verdict, note = Verdict.NOT_APPLICABLE, "It does not set prefix_is_complete."
        elif found := list(check(asked)):
            more = f" ({len(found)} such)" if len(found) > 1 else ""
            verdict, note = Verdict.FAIL, f"{found[0]}{more}. {remedy}"
        else:
            verdict, note = Verdict.PASS, f"On {len(texts)} texts."
        results.append(Result(f"potential-{name}", proves, verdict, note, num_answers=len(texts)))
    return results


def _beginnings(text: Text, most: int) -> list[Text]:
    """Return prefixes of growing length, from no token to all."""
    length = len(text.output_ids)
    count = min(most, length + 1)
    lengths = {round(length * step / max(1, count - 1)) for step in range(count)} | {length}
    return [text.beginning(some) for some in sorted(lengths)]


def _unusable(asked: _Asked) -> Iterator[str]:
    for one in asked.both:
        if len(one.values) != len(one.texts):
            yield f"{one.name} gave {len(one.values)} values for {len(one.texts)} texts"
            continue
        for text, value in zip(one.texts, one.values, strict=True):
            if math.isnan(value) or value == math.inf:
                yield f"{one.name} of {_shown(text)} is {value}"


def _unlike_alone(asked: _Asked) -> Iterator[str]:
    for one in asked.both:
        alone = [next(iter(one.method([text]))) for text in one.texts]
        for told, other in one.differing(alone, asked.tolerance):
            yield f"{told} among others, {other:g} alone"


def _unlike_again(asked: _Asked) -> Iterator[str]:
    for one in asked.both:
        for told, other in one.differing(one.method(one.texts), asked.tolerance):
            yield f"{told}, then {other:g}"


def _allowed_again(asked: _Asked) -> Iterator[str]:
    """Yield prefixes of value -inf with an extension of another value."""
    values = iter(asked.prefixes.values)
    for of_text, whole in zip(asked.series, asked.wholes.values, strict=True):
        forbidden = None
        for text, value in zip(of_text, islice(values, len(of_text)), strict=True):
            if forbidden is None:
                forbidden = text if value == -math.inf else None
            elif value > -math.inf:
                yield f"prefix of {_shown(forbidden)} is -inf, of {_shown(text)} {value:g}"
        if forbidden is not None and whole > -math.inf:
            yield f"prefix of {_shown(forbidden)} is -inf, complete of the whole text {whole:g}"


def _unlike_whole(asked: _Asked) -> Iterator[str]:
    of_prefix = asked.potential.prefix(asked.wholes.texts)
    for told, other in asked.wholes.differing(of_prefix, asked.tolerance):
        yield f"{told}, and prefix {other:g}"


#: Each check's name, what a pass proves, the remedy, and the function that yields findings.
_CHECKS: tuple[tuple[str, str, str, Callable[[_Asked], Iterator[str]]], ...] = (
    (
        "values",
        "prefix and complete give one value for each text: a finite logarithm, or -inf",
        "Give a float for each text; log 0 is float('-inf').",
        _unusable,
    ),
    (
        "batched",
        "a text's value does not depend on what else is asked about",
        "Let the texts of a call not influence each other: of a model, look at padding and masks.",
        _unlike_alone,
    ),
    (
        "repeated",
        "the same text has the same value when it is asked about again",
        "Draw no random numbers, and keep nothing from one call to the next.",
        _unlike_again,
    ),
    (
        "forbidden",
        "no text goes on from a beginning that was forbidden",
        "Give -inf only where no continuation can mend it; else a large finite cost.",
        _allowed_again,
    ),
    (
        "whole",
        "prefix of a whole text is complete of it, as it claims",
        "Let it not set prefix_is_complete, or let prefix and complete agree.",
        _unlike_whole,
    ),
)


def _shown(text: Text) -> str:
    """Return the end of an output, where texts differ."""
    output = text.output
    return repr(output if len(output) <= _SHOWN else "..." + output[-_SHOWN:])
