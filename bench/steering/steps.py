"""Penalize wrong steps of arithmetic by a rule-based potential.

It ignores the question: a step with wrong numbers but a right result costs nothing.
"""

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from sglang_smc.potentials import Potential, Text

_STEP = re.compile(r"(\d+)([-+x*/])(\d+)=(\d+)(\D?)")


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request arguments: the cost of a wrong step in nats."""

    cost: Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)] = 5.0


class Steps(Potential):
    """log phi = -cost * wrong steps, of the forms a+b=c, a-b=c, axb=c, a*b=c and a/b=c.

    In a prefix a last number is not checked, since it may continue.
    """

    Args = Cost
    when: ClassVar[dict[str, Any]] = {"delimiter": "\n"}

    def complete(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.complete`."""
        return [-text.args.cost * wrong_steps(text.output, is_whole=True) for text in texts]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.prefix`."""
        return [-text.args.cost * wrong_steps(text.output, is_whole=False) for text in texts]


def wrong_steps(output: str, *, is_whole: bool) -> int:
    """Return the number of wrong steps of an output."""
    found = (match for match in _STEP.finditer(output) if match[5] or is_whole)
    return sum(not _holds(int(m[1]), m[2], int(m[3]), int(m[4])) for m in found)


def _holds(a: int, op: str, b: int, result: int) -> bool:
    if op == "/":
        return b != 0 and a == b * result
    return result == {"+": a + b, "-": a - b, "x": a * b, "*": a * b}[op]
