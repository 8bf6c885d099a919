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
from itertools import islice
from typing import Any, NamedTuple

from sglang_smc.potentials.base import Potential, Text
from sglang_smc.tools.testing.result import Result, Verdict

_Method = Callable[[Sequence[Text]], Sequence[float]]


class _Asked(NamedTuple):
    """One method's values of texts, all from one call."""

    method: str
    ask: _Method
    texts: Sequence[Text]
    values: list[float]


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
    asked = [
        _asked("prefix", potential.prefix, every),
        _asked("complete", potential.complete, texts),
    ]
    checked: tuple[tuple[str, str, Callable[[], Iterable[str]]], ...] = (
        (*_BATCHED, lambda: _unlike_alone(asked, tolerance)),
        (*_REPEATED, lambda: _unlike_again(asked, tolerance)),
        (*_FORBIDDEN, lambda: _allowed_again(series, asked)),
        (*_CLAIMED, lambda: _unlike_whole(potential, asked, tolerance)),
    )
    usable = _result(*_VALUES, _unusable(asked), len(texts))
    results = [usable]
    for check, proves, found in checked:
        if usable.failed:
            results.append(_not_applicable(check, proves, "Its values are unusable."))
        elif check == _CLAIMED[0] and not potential.prefix_is_complete:
            results.append(_not_applicable(check, proves, "It does not set prefix_is_complete."))
        else:
            results.append(_result(check, proves, found(), len(texts)))
    return results


_VALUES = (
    "potential-values",
    "prefix and complete give one value for each text: a finite logarithm, or -inf",
)
_BATCHED = ("potential-batched", "a text's value does not depend on what else is asked about")
_REPEATED = ("potential-repeated", "the same text has the same value when it is asked about again")
_FORBIDDEN = ("potential-forbidden", "no text goes on from a beginning that was forbidden")
_CLAIMED = ("potential-whole", "prefix of a whole text is complete of it, as it claims")
_MENDS = {
    _VALUES[0]: "Give a float for each text; log 0 is float('-inf').",
    _BATCHED[0]: "Let the texts of a call not influence each other: of a model, look at padding "
    "and masks.",
    _REPEATED[0]: "Draw no random numbers, and keep nothing from one call to the next.",
    _FORBIDDEN[0]: "Give -inf only where no continuation can mend it; else a large finite cost.",
    _CLAIMED[0]: "Let it not set prefix_is_complete, or let prefix and complete agree.",
}
_SHOWN = 40  # characters of a text that a note shows


def _beginnings(text: Text, most: int) -> list[Text]:
    """Return prefixes of growing length, from no token to all."""
    length = len(text.output_ids)
    count = min(most, length + 1)
    lengths = {round(length * step / max(1, count - 1)) for step in range(count)} | {length}
    return [text.beginning(some) for some in sorted(lengths)]


def _asked(name: str, ask: _Method, texts: Sequence[Text]) -> _Asked:
    return _Asked(name, ask, texts, list(ask(texts)))


def _unusable(asked: Sequence[_Asked]) -> Iterator[str]:
    for one in asked:
        if len(one.values) != len(one.texts):
            yield f"{one.method} gave {len(one.values)} values for {len(one.texts)} texts"
            continue
        for text, value in zip(one.texts, one.values, strict=True):
            if math.isnan(value) or value == math.inf:
                yield f"{one.method} of {_shown(text)} is {value}"


def _unlike_alone(asked: Sequence[_Asked], tolerance: float) -> Iterator[str]:
    for one in asked:
        for text, value in zip(one.texts, one.values, strict=True):
            (alone,) = one.ask([text])
            if not _alike(alone, value, tolerance):
                yield f"{one.method} of {_shown(text)} is {value:g} among others, {alone:g} alone"


def _unlike_again(asked: Sequence[_Asked], tolerance: float) -> Iterator[str]:
    for one in asked:
        for text, value, again in zip(one.texts, one.values, one.ask(one.texts), strict=True):
            if not _alike(again, value, tolerance):
                yield f"{one.method} of {_shown(text)} is {value:g}, then {again:g}"


def _allowed_again(series: Sequence[Sequence[Text]], asked: Sequence[_Asked]) -> Iterator[str]:
    """Yield prefixes of value -inf with an extension of another value."""
    beginnings, wholes = asked
    values = iter(beginnings.values)
    found = [list(islice(values, len(of_text))) for of_text in series]
    for of_text, own, whole in zip(series, found, wholes.values, strict=True):
        forbidden = None
        for text, value in zip(of_text, own, strict=True):
            if forbidden is not None and value > -math.inf:
                yield f"prefix of {_shown(forbidden)} is -inf, of {_shown(text)} {value:g}"
                break
            forbidden = text if value == -math.inf else forbidden
        if forbidden is not None and whole > -math.inf:
            yield f"prefix of {_shown(forbidden)} is -inf, complete of the whole text {whole:g}"


def _unlike_whole(potential: Potential, asked: Sequence[_Asked], tolerance: float) -> Iterator[str]:
    _, wholes = asked
    of_prefix = potential.prefix(wholes.texts)
    for text, whole, value in zip(wholes.texts, wholes.values, of_prefix, strict=True):
        if not _alike(whole, value, tolerance):
            yield f"of {_shown(text)} prefix is {value:g} and complete {whole:g}"


def _alike(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def _result(check: str, proves: str, found: Iterable[str], num_texts: int) -> Result:
    """Return PASS if there are no findings, else FAIL with the first finding and their number."""
    findings = list(found)
    known: dict[str, Any] = {"check": check, "proves": proves, "num_answers": num_texts}
    if not findings:
        return Result(**known, verdict=Verdict.PASS, note=f"On {num_texts} texts.")
    more = f" ({len(findings)} such)" if len(findings) > 1 else ""
    return Result(**known, verdict=Verdict.FAIL, note=f"{findings[0]}{more}. {_MENDS[check]}")


def _not_applicable(check: str, proves: str, note: str) -> Result:
    return Result(check=check, proves=proves, verdict=Verdict.NOT_APPLICABLE, note=note)


def _shown(text: Text) -> str:
    """Return the end of an output, where texts differ."""
    output = text.output
    return repr(output if len(output) <= _SHOWN else "..." + output[-_SHOWN:])
