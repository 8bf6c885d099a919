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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from sglang_smc.potentials.base import Potential, Text
from sglang_smc.tools.testing.report import Result, Verdict

_SHOWN = 40  # characters of a text that a note shows


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

    Raises ValueError if there are no texts.
    """
    if not texts:
        raise ValueError("check_potential was given no texts; needed: one or more.")
    values = _Values(potential, texts, most_beginnings, tolerance)
    results: list[Result] = []
    for name, proves, remedy, check in _CHECKS:
        if results and results[0].failed:
            verdict, note = Verdict.NOT_APPLICABLE, "Its values are unusable."
        elif name == "whole" and not potential.prefix_is_complete:
            verdict, note = Verdict.NOT_APPLICABLE, "It does not set prefix_is_complete."
        elif found := list(check(values)):
            more = f" ({len(found)} such)" if len(found) > 1 else ""
            verdict, note = Verdict.FAIL, f"{found[0]}{more}. {remedy}"
        else:
            verdict, note = Verdict.PASS, f"On {len(texts)} texts."
        results.append(Result(f"potential-{name}", proves, verdict, note, num_answers=len(texts)))
    return results


class _Values:
    """The values of a potential on texts and their prefixes; each check yields what it finds."""

    def __init__(
        self, potential: Potential, texts: Sequence[Text], most: int, tolerance: float
    ) -> None:
        self.tolerance = tolerance
        self.series = [_beginnings(text, most) for text in texts]
        self.methods = {"prefix": potential.prefix, "complete": potential.complete}
        self.texts = {"prefix": list(chain(*self.series)), "complete": list(texts)}
        self.values = {name: self.again(name) for name in self.methods}

    def again(self, name: str) -> list[float]:
        return list(self.methods[name](self.texts[name]))

    def unusable(self) -> Iterator[str]:
        for name, texts in self.texts.items():
            values = self.values[name]
            if len(values) != len(texts):
                yield f"{name} gave {len(values)} values for {len(texts)} texts"
                continue
            for text, value in zip(texts, values, strict=True):
                if math.isnan(value) or value == math.inf:
                    yield f"{name} of {_shown(text)} is {value}"

    def differing(self, name: str, others: Iterable[float], form: str) -> Iterator[str]:
        """Yield each value that another one differs from, which ``form`` describes."""
        near = {"rel_tol": self.tolerance, "abs_tol": self.tolerance}
        for text, value, other in zip(self.texts[name], self.values[name], others, strict=True):
            if not math.isclose(value, other, **near):
                yield f"of {_shown(text)} {name} is {value:g}{form.format(other)}"

    def unlike_alone(self) -> Iterator[str]:
        for name, method in self.methods.items():
            alone = [next(iter(method([text]))) for text in self.texts[name]]
            yield from self.differing(name, alone, " among others, {:g} alone")

    def unlike_again(self) -> Iterator[str]:
        for name in self.methods:
            yield from self.differing(name, self.again(name), ", then {:g}")

    def unlike_whole(self) -> Iterator[str]:
        of_prefix = self.methods["prefix"](self.texts["complete"])
        yield from self.differing("complete", of_prefix, ", and prefix {:g}")

    def allowed_again(self) -> Iterator[str]:
        """Yield prefixes of value -inf with an extension of another value."""
        values = iter(self.values["prefix"])
        for of_text, whole in zip(self.series, self.values["complete"], strict=True):
            forbidden = None
            for text, value in zip(of_text, islice(values, len(of_text)), strict=True):
                if forbidden is None:
                    forbidden = text if value == -math.inf else None
                elif value > -math.inf:
                    yield f"prefix of {_shown(forbidden)} is -inf, of {_shown(text)} {value:g}"
            if forbidden is not None and whole > -math.inf:
                yield f"prefix of {_shown(forbidden)} is -inf, complete of the whole text {whole:g}"


def _beginnings(text: Text, most: int) -> list[Text]:
    """Return prefixes of growing length, from no token to all."""
    length = len(text.output_ids)
    count = min(most, length + 1)
    lengths = {round(length * step / max(1, count - 1)) for step in range(count)} | {length}
    return [text.beginning(some) for some in sorted(lengths)]


#: Each check's name, what a pass proves, the remedy, and the function that yields findings.
_CHECKS: tuple[tuple[str, str, str, Callable[[_Values], Iterator[str]]], ...] = (
    (
        "values",
        "prefix and complete give one value for each text: a finite logarithm, or -inf",
        "Give a float for each text; log 0 is float('-inf').",
        _Values.unusable,
    ),
    (
        "batched",
        "a text's value does not depend on what else is asked about",
        "Let the texts of a call not influence each other: of a model, look at padding and masks.",
        _Values.unlike_alone,
    ),
    (
        "repeated",
        "the same text has the same value when it is asked about again",
        "Draw no random numbers, and keep nothing from one call to the next.",
        _Values.unlike_again,
    ),
    (
        "forbidden",
        "no text goes on from a beginning that was forbidden",
        "Give -inf only where no continuation can mend it; else a large finite cost.",
        _Values.allowed_again,
    ),
    (
        "whole",
        "prefix of a whole text is complete of it, as it claims",
        "Let it not set prefix_is_complete, or let prefix and complete agree.",
        _Values.unlike_whole,
    ),
)


def _shown(text: Text) -> str:
    """Return the end of an output, where texts differ."""
    output = text.output
    return repr(output if len(output) <= _SHOWN else "..." + output[-_SHOWN:])
