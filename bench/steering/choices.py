"""Ways to make one answer of several texts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from steering.grid import ANSWER_PATTERN

_ANSWER = re.compile(ANSWER_PATTERN)


def number_of(text: str) -> int | None:
    """What a text answers; None where it does not come to an answer."""
    found = _ANSWER.search(text)
    return int(found[1]) if found else None


def voted(texts: Sequence[str], weights: Sequence[float]) -> int | None:
    """The number whose texts weigh most, of equals the first; None where no text has one."""
    total: dict[int, float] = {}
    for text, weight in zip(texts, weights, strict=True):
        number = number_of(text)
        if number is not None:
            total[number] = total.get(number, 0.0) + weight
    return max(total, key=lambda number: total[number]) if total else None


def best(texts: Sequence[str], values: Sequence[float]) -> int | None:
    """What the text of the highest value answers, of equals the first."""
    place = max(range(len(texts)), key=lambda index: values[index])
    return number_of(texts[place])


def drawn(texts: Sequence[str], weights: Sequence[float], rng: random.Random) -> int | None:
    """What a text answers that is drawn by weight."""
    return number_of(rng.choices(texts, weights)[0])
