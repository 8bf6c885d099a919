"""Potentials over the letters of `toy_laws`, and the laws that they make of p."""

import math
from collections.abc import Callable, Sequence

import msgspec
from toy_laws import EOS, Text

from sglang_smc.potentials import Potential
from sglang_smc.potentials import Text as Asked
from sglang_smc.potentials.calls import Caller


class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much each "b" counts."""

    weight: float = 0.8


class Letters(Potential):
    """phi = exp(weight * number of "b"), and 0 of what begins with "aab".

    Of beginnings it says something else, which must not matter. It notes what it is asked.
    """

    Args = Args

    def __init__(self) -> None:
        self.asked: list[tuple[bool, list[str]]] = []

    def complete(self, texts: Sequence[Asked]) -> list[float]:
        self.asked.append((True, [text.output for text in texts]))
        return [log_phi(text.output, text.args.weight) for text in texts]

    def prefix(self, texts: Sequence[Asked]) -> list[float]:
        self.asked.append((False, [text.output for text in texts]))
        assert all(text.prompt == "ba" for text in texts)
        return [
            -math.inf if text.output.startswith("aab") else 0.3 * text.output.count("ba")
            for text in texts
        ]


def log_phi(output: str, weight: float = 0.8) -> float:
    return -math.inf if output.startswith("aab") else weight * output.count("b")


def callers(seconds: float = 60.0, **potentials: Potential) -> dict[str, Caller]:
    """Who asks them, as a server does."""
    return {name: Caller(name, potential, seconds) for name, potential in potentials.items()}


def times_phi(masses: dict[Text, float], phi: Callable[[str], float]) -> dict[Text, float]:
    """Masses of texts times exp of ``phi`` of what they read."""
    return {text: mass * math.exp(phi(read(text))) for text, mass in masses.items()}


def read(text: Text) -> str:
    """A text, filled up with ends, as its tokenizer has it."""
    length = text.index(EOS) + 1 if EOS in text else len(text)
    return "".join("ab."[token] for token in text[:length])
