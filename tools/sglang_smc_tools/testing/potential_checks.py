"""Check that a potential's values are usable by SMC, and that its declared properties hold.

They need no server::

    from transformers import AutoTokenizer
    from sglang_smc.potentials import Text
    from sglang_smc_tools.testing import check_potential

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from sglang_smc.potentials.base import Potential, Text
from sglang_smc_tools.testing.report import Result, Verdict

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
    methods = {"prefix": potential.prefix, "complete": potential.complete}
    series = [_beginnings(text, most_beginnings) for text in texts]
    asked = {"prefix": list(chain(*series)), "complete": list(texts)}
    values = {name: list(method(asked[name])) for name, method in methods.items()}

    def differing(name: str, others: Iterable[float], form: str) -> Iterator[str]:
        """Yield each value that another one differs from, which ``form`` describes."""
        for text, value, other in zip(asked[name], values[name], others, strict=True):
            if not math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance):
                yield f"of {_shown(text)} {name} is {value:g}{form.format(other)}"

    found = {"values": list(_unusable(asked, values)), "batched": [], "repeated": []}
    if not found["values"]:
        for name, method in methods.items():
            alone = [next(iter(method([text]))) for text in asked[name]]
            found["batched"] += differing(name, alone, " among others, {:g} alone")
            found["repeated"] += differing(name, method(asked[name]), ", then {:g}")
        found["forbidden"] = list(_allowed_again(series, values))
        if potential.prefix_is_complete:
            of_prefix = potential.prefix(asked["complete"])
            found["whole"] = list(differing("complete", of_prefix, ", and prefix {:g}"))
    results: list[Result] = []
    for name, (proves, remedy) in _CHECKS.items():
        if results and results[0].failed:
            verdict = Verdict.NOT_APPLICABLE
            note = "Its values are unusable."
        elif name not in found:
            verdict = Verdict.NOT_APPLICABLE
            note = "It does not set prefix_is_complete."
        elif problems := found[name]:
            more = f" ({len(problems)} such)" if len(problems) > 1 else ""
            verdict = Verdict.FAIL
            note = f"{problems[0]}{more}. {remedy}"
        else:
            verdict = Verdict.PASS
            note = f"On {len(texts)} texts."
        results.append(Result(f"potential-{name}", proves, verdict, note, num_answers=len(texts)))
    return results


def _unusable(asked: dict[str, list[Text]], values: dict[str, list[float]]) -> Iterator[str]:
    for name, texts in asked.items():
        if len(values[name]) != len(texts):
            yield f"{name} gave {len(values[name])} values for {len(texts)} texts"
            continue
        for text, value in zip(texts, values[name], strict=True):
            if math.isnan(value) or value == math.inf:
                yield f"{name} of {_shown(text)} is {value}"


def _allowed_again(series: list[list[Text]], values: dict[str, list[float]]) -> Iterator[str]:
    """Yield prefixes of value -inf with an extension of another value."""
    of_prefixes = iter(values["prefix"])
    for of_text, whole in zip(series, values["complete"], strict=True):
        forbidden = None
        for text, value in zip(of_text, islice(of_prefixes, len(of_text)), strict=True):
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


#: Of each check what a pass proves, and the remedy.
_CHECKS = {
    "values": (
        "prefix and complete give one value for each text: a finite logarithm, or -inf",
        "Give a float for each text; log 0 is float('-inf').",
    ),
    "batched": (
        "a text's value does not depend on what else is asked about",
        "Let the texts of a call not influence each other: of a model, look at padding and masks.",
    ),
    "repeated": (
        "the same text has the same value when it is asked about again",
        "Draw no random numbers, and keep nothing from one call to the next.",
    ),
    "forbidden": (
        "no text goes on from a beginning that was forbidden",
        "Give -inf only where no continuation can mend it; else a large finite cost.",
    ),
    "whole": (
        "prefix of a whole text is complete of it, as it claims",
        "Let it not set prefix_is_complete, or let prefix and complete agree.",
    ),
}


def _shown(text: Text) -> str:
    """Return the end of an output, where texts differ."""
    output = text.output
    return repr(output if len(output) <= _SHOWN else "..." + output[-_SHOWN:])
