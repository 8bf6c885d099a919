"""Choose one answer from several texts: majority vote, best, or a weighted draw."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from steering.grid import ANSWER_PATTERN

_ANSWER = re.compile(ANSWER_PATTERN)


def number_of(text: str) -> int | None:
    """Return the number that a text answers; None if it has no final answer."""
    found = _ANSWER.search(text)
    return int(found[1]) if found else None


def voted(texts: Sequence[str], weights: Sequence[float]) -> int | None:
    """Return the number with the largest total weight (ties: the first); None without any."""
    total: dict[int, float] = {}
    for text, weight in zip(texts, weights, strict=True):
        number = number_of(text)
        if number is not None:
            total[number] = total.get(number, 0.0) + weight
    return max(total, key=lambda number: total[number]) if total else None


def best(texts: Sequence[str], values: Sequence[float]) -> int | None:
    """Return the answer of the text with the highest value (ties: the first)."""
    place = max(range(len(texts)), key=lambda index: values[index])
    return number_of(texts[place])


def drawn(texts: Sequence[str], weights: Sequence[float], rng: random.Random) -> int | None:
    """Return the answer of a text drawn by weight."""
    return number_of(rng.choices(texts, weights)[0])
