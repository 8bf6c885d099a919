"""Parse the potentials that an operator declares and a request names.

The flag, ``NAME=package.module:factory``, names the operator's code, which is imported as the
server starts. A request only names declared potentials: nothing of it is imported or evaluated.
"""

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from sglang_smc.operator_code import at, describe, not_loaded
from sglang_smc.potentials.base import Potential
from sglang_smc.printable import reason, shown

MOST = 8
"""The most potentials that one request may name."""

MOST_TEXT = 65_536
"""The most characters of JSON for a request's potentials."""

MOST_DELIMITER = 512
"""The most characters of a delimiter: as many are decoded for each drafted token."""

CONTEXT = 8
"""Tokens of context with which a new one is decoded, beside those that a delimiter can span."""

FLAG = "--speculative-smc-potential"
WHEN = (
    '"round", "end", {"tokens": n} with n from 1 on, or {"delimiter": a token id, or a text of at '
    f"most {MOST_DELIMITER} characters}}"
)
_FORM = (
    'a list of {"name": ..., "args": {...}, "exponent": 1.0, "when": ...}, all but name optional'
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_FLAG_FORM = (
    "NAME=package.module:factory, where factory is a Potential's class or a function that returns "
    'one; literal keyword arguments may follow, as in NAME=package.module:factory(url="...")'
)


class Schedule(NamedTuple):
    """The prefixes at which a potential is queried; whole texts always are."""

    is_each_round: bool = False
    tokens: int = 0  # interval in tokens; 0: none
    delimiter: str | int | None = None  # queried after each occurrence

    @classmethod
    def of(cls, when: str | dict[str, Any]) -> "Schedule":
        """Parse a `when` value.

        Raises ValueError with the allowed values.
        """
        if when == "round":
            return cls(is_each_round=True)
        if when == "end":
            return cls()
        if isinstance(when, dict) and len(when) == 1:
            (kind, value), *_ = when.items()
            if kind == "tokens" and _is_number(value, 1):
                return cls(tokens=value)
            is_text = isinstance(value, str) and 0 < len(value) <= MOST_DELIMITER
            if kind == "delimiter" and (_is_number(value, 0) or is_text):
                return cls(delimiter=value)
        raise ValueError(f"when={shown(when)}; allowed: {WHEN}.")

    @property
    def context(self) -> int:
        """Return the tokens with which the newest is decoded: a delimiter's have a byte or more."""
        text = self.delimiter if isinstance(self.delimiter, str) else ""
        return len(text.encode()) + CONTEXT

    def is_due(
        self, length: int, recent: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> bool:
        """Return whether a query is due at a prefix of ``length`` tokens that ends in ``recent``.

        With "round" any prefix may be the one from which a round starts.
        """
        if self.tokens:
            return length % self.tokens == 0
        if isinstance(self.delimiter, str):
            before = decode(recent[:-1]).count(self.delimiter)
            return decode(recent).count(self.delimiter) > before
        return self.is_each_round or recent[-1] == self.delimiter


class PotentialSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One potential, as a request names it; `resolve` completes it."""

    name: str
    args: dict[str, Any] = {}  # resolved: the potential's `Args`
    exponent: float = 1.0
    when: str | dict[str, Any] | None = None  # None, until resolved: the potential's own default

    @property
    def schedule(self) -> Schedule:
        return Schedule.of("round" if self.when is None else self.when)

    def resolve(self, potentials: Mapping[str, Potential]) -> "PotentialSpec":
        """Return the spec with converted arguments and a schedule, for a server's potentials.

        Raises ValueError for an unknown name, or arguments that do not fit.
        """
        potential = potentials.get(self.name)
        if potential is None:
            known = ", ".join(map(repr, potentials)) or f"none, since this server has no {FLAG}"
            raise ValueError(f"potential {shown(self.name)}, which is unknown; allowed: {known}.")
        try:
            args = msgspec.convert(self.args, potential.Args)
        except BaseException as error:  # of `__post_init__`, which is the operator's code
            what = error if isinstance(error, msgspec.ValidationError) else describe(error)
            raise ValueError(
                f"potential {shown(self.name)} with args={shown(self.args)}: {reason(what)}; "
                f"allowed: {_fields(potential.Args)}."
            ) from error
        when = potential.when if self.when is None else self.when
        return msgspec.structs.replace(self, args=args, when=when)


def parse_specs(given: Any) -> tuple[PotentialSpec, ...]:
    """Parse the potentials of a request, from its value of `potentials`, or that as JSON.

    Raises ValueError for an invalid value; `PotentialSpec.resolve` checks names and arguments.
    """
    try:
        found = _decoded(given)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        told = f"potentials={shown(given)}: {reason(error)}"
        raise ValueError(f"{told}; allowed: {_FORM}.") from error
    if len(found) > MOST:
        raise ValueError(f"{len(found)} potentials; allowed: {MOST}. Make a product of some.")
    for spec in found:
        if not (math.isfinite(spec.exponent) and spec.exponent >= 0):
            raise ValueError(
                f"potential {shown(spec.name)} with exponent={spec.exponent!r}; allowed: a finite "
                "number >= 0."
            )
        try:
            _ = spec.schedule
        except ValueError as error:
            raise ValueError(f"potential {shown(spec.name)} with {error}") from error
    return found


def _decoded(given: Any) -> tuple[PotentialSpec, ...]:
    if not isinstance(given, str):
        return msgspec.convert(given, tuple[PotentialSpec, ...])
    if len(given) > MOST_TEXT:
        raise msgspec.ValidationError(f"{len(given)} characters are more than {MOST_TEXT}")
    return msgspec.json.decode(given, type=tuple[PotentialSpec, ...])


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class Declaration(NamedTuple):
    """One value of the flag."""

    name: str
    module: str
    factory: str
    arguments: dict[str, Any]

    @classmethod
    def parse(cls, given: str) -> "Declaration":
        """Parse one value of the flag.

        Raises ValueError for an invalid value.
        """
        name, _, target = given.partition("=")
        module, _, call = target.partition(":")
        if not (_NAME.fullmatch(name) and module and call):
            raise ValueError(f"{FLAG} is {given!r}; allowed: {_FLAG_FORM}.")
        try:
            return cls(name, module, *_parse_call(call))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{FLAG} is {given!r}: {error}; allowed: {_FLAG_FORM}.") from error

    def load(self) -> Potential:
        """Import the module and make the potential; raise ValueError for an unusable one."""
        shown = f"{FLAG} {self.name}={self.module}:{self.factory}"
        try:
            potential = at(f"{self.module}:{self.factory}")(**self.arguments)
        except BaseException as error:  # the operator's code
            what = "a Potential's class or a function that returns one"
            raise not_loaded(shown, error, what) from error
        if not isinstance(potential, Potential):
            raise ValueError(
                f"{shown} gives a {type(potential).__name__}; allowed: an object of a subclass of "
                "sglang_smc.potentials.Potential."
            )
        try:
            Schedule.of(potential.when)
        except ValueError as error:
            raise ValueError(f"{shown} has {error}") from error
        if not potential.Args.__struct_config__.frozen:
            raise ValueError(
                f"{shown} has Args that can be written into; allowed: a msgspec.Struct with "
                "frozen=True, since one object stands for all of a request's texts."
            )
        return potential


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name`` or ``name(key=literal, ...)`` without evaluating it."""
    found = ast.parse(text, mode="eval").body
    if isinstance(found, ast.Name):
        return found.id, {}
    if not (isinstance(found, ast.Call) and isinstance(found.func, ast.Name)):
        raise ValueError("behind the colon stands no name")
    if found.args or any(keyword.arg is None for keyword in found.keywords):
        raise ValueError("arguments need their names")
    return found.func.id, {key.arg or "": ast.literal_eval(key.value) for key in found.keywords}


def declaration_problems(given: Iterable[str]) -> list[str]:
    """Return what is wrong with the flag's values, a sentence each; import what they name."""
    found = []
    names = []
    for one in given:
        try:
            declaration = Declaration.parse(one)
            names.append(declaration.name)
            declaration.load()
        except ValueError as error:
            found.append(str(error))
    if not found and len(set(names)) < len(names):
        found.append(f"{FLAG} gives a name twice: {', '.join(names)}.")
    return found


@lru_cache(maxsize=4)
def load(given: tuple[str, ...]) -> Mapping[str, Potential]:
    """Return the potentials of a server by name, not opened; each call returns the same objects.

    Raises ValueError where one cannot be loaded.
    """
    return {one.name: one.load() for one in map(Declaration.parse, given)}


def _fields(schema: type[msgspec.Struct]) -> str:
    """Return the names and types of arguments, for an error message."""
    fields = msgspec.structs.fields(schema)
    shown = (f"{f.name}: {getattr(f.type, '__name__', None) or f.type}" for f in fields)
    return ", ".join(shown) or "none"
