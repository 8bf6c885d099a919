"""Potentials made of potentials: products and powers."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import msgspec

from sglang_smc.potentials.base import Potential, Text


def product(**parts: Potential) -> Potential:
    """The product of potentials, so the sum of their logarithms.

    A request gives each part its arguments under the part's name; those of a part that takes none,
    or whose arguments all have defaults, may be left out.

    Raises:
        ValueError: without parts.
    """
    if not parts:
        raise ValueError("product() has no parts; needed: one or more, as name=potential.")
    claims = all(part.prefix_is_complete for part in parts.values())
    return _Product.of({"Args": _args_of(parts), "prefix_is_complete": claims}, parts)


def exponent(potential: Potential, alpha: float) -> Potential:
    """The potential to the power alpha, so alpha times its logarithm.

    With 0 it is 1 for all texts, also for those that the potential forbids.

    Raises:
        ValueError: where alpha is no finite number >= 0.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"exponent() has alpha={alpha!r}; allowed: a finite number >= 0.")
    names = ("Args", "when", "prefix_is_complete")
    return _Power.of({name: getattr(potential, name) for name in names}, potential, alpha)


class _Made(Potential):
    """What is said of a class, an object of another may have of its own."""

    @classmethod
    def of(cls, said: dict[str, Any], *given: Any) -> Potential:
        """An object of a class of its own, of which ``said`` is true."""
        return type(cls.__name__, (cls,), said)(*given)


class _Product(_Made):
    def __init__(self, parts: dict[str, Potential]) -> None:
        self._parts = parts

    def open(self) -> None:
        for part in self._parts.values():
            part.open()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return self._sums(texts, lambda part: part.complete)

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return self._sums(texts, lambda part: part.prefix)

    def _sums(
        self,
        texts: Sequence[Text],
        method: Callable[[Potential], Callable[[Sequence[Text]], Sequence[float]]],
    ) -> list[float]:
        """Of each text; zip would hide that a part gave too few values."""
        columns = [
            method(part)([_with(text, getattr(text.args, name)) for text in texts])
            for name, part in self._parts.items()
        ]
        return [sum(values) for values in zip(*columns, strict=True)]


class _Power(_Made):
    def __init__(self, potential: Potential, alpha: float) -> None:
        self._potential, self._alpha = potential, alpha

    def open(self) -> None:
        self._potential.open()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [self._power(value) for value in self._potential.complete(texts)]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return [self._power(value) for value in self._potential.prefix(texts)]

    def _power(self, value: float) -> float:
        return self._alpha * value if self._alpha else 0.0  # 0 * -inf is NaN


def _args_of(parts: dict[str, Potential]) -> type[msgspec.Struct]:
    """A schema with a field for each part, one that may be left out where its schema allows it."""
    needed: list[tuple[str, Any]] = []
    optional: list[tuple[str, Any, Any]] = []
    for name, part in parts.items():
        if any(field.required for field in msgspec.structs.fields(part.Args)):
            needed.append((name, part.Args))
        else:
            optional.append((name, part.Args, msgspec.field(default_factory=part.Args)))
    return msgspec.defstruct(
        "ProductArgs", [*needed, *optional], frozen=True, forbid_unknown_fields=True
    )


def _with(text: Text, args: Any) -> Text:
    """The same text with a part's arguments; what is decoded of it stays."""
    found = copy(text)
    found.args = args
    return found
