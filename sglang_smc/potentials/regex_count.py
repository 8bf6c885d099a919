"""The example: a potential in a few lines."""

import math
from collections.abc import Sequence

import msgspec
import regex

from sglang_smc.potentials.base import Potential, Text


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says: nats that a match adds; below 0 for what is not wanted."""

    weight: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight={self.weight!r}; allowed: a finite number")


class RegexCount(Potential):
    """log phi = weight * how often a pattern matches in the output.

    The pattern is the operator's, so that no request can bring one that takes for ever; whatever
    texts do to it, a search ends after ``seconds``, with an error of the request that it was for.
    """

    Args = Weight
    prefix_is_complete = True

    def __init__(self, pattern: str, seconds: float = 0.1) -> None:
        self._pattern, self._seconds = regex.compile(pattern), seconds

    def complete(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.complete`."""
        return [text.args.weight * self._count(text.output) for text in texts]

    prefix = complete

    def _count(self, output: str) -> int:
        return sum(1 for _ in self._pattern.finditer(output, timeout=self._seconds))
