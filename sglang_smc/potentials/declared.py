"""Load the potentials that an operator declares: ``NAME=package.module:factory``.

The flag names the operator's code, which is imported as the server starts. A request only names
declared potentials: nothing of it is imported or evaluated.
"""

import ast
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from sglang_smc.potentials.base import Potential

MOST = 8
"""The most potentials that one request may name."""

MOST_TEXT = 65_536
"""The most characters of JSON for a request's potentials."""

_FORM = (
    'a list of {"name": ..., "args": {...}, "exponent": 1.0, "when": ...}, all but name optional'
)
WHEN = '"round", "end", {"tokens": n} with n from 1 on, or {"delimiter": a text or a token id}'


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One potential, as a request names it."""

    name: str
    args: dict[str, Any] = {}
    exponent: float = 1.0
    when: str | dict[str, Any] | None = None  # None: the potential's own default


class Schedule(NamedTuple):
    """The prefixes at which a potential is queried; whole texts always are."""

    is_each_round: bool = False
    tokens: int = 0  # interval in tokens; 0: none
    delimiter: str | int | None = None  # queried after each occurrence

    def falls_on(self, length: int, token: int) -> bool:
        """Return whether a query is due at a prefix of ``length`` tokens that ends with ``token``.

        Delimiters that are text are handled by `rules.potentials`, which can decode.
        """
        if self.tokens:
            return length % self.tokens == 0
        return isinstance(self.delimiter, int) and token == self.delimiter


def schedule_of(when: str | dict[str, Any]) -> Schedule:
    """Parse a `when` value.

    Raises:
        ValueError: with the allowed values.
    """
    if when == "round":
        return Schedule(is_each_round=True)
    if when == "end":
        return Schedule()
    if isinstance(when, dict) and len(when) == 1:
        (kind, value), *_ = when.items()
        if kind == "tokens" and _is_number(value, 1):
            return Schedule(tokens=value)
        if kind == "delimiter" and (_is_number(value, 0) or (isinstance(value, str) and value)):
            return Schedule(delimiter=value)
    raise ValueError(f"when={when!r}; allowed: {WHEN}.")


def _check_when(name: str, when: str | dict[str, Any]) -> None:
    try:
        schedule_of(when)
    except ValueError as error:
        raise ValueError(f"potential {name!r} with {error}") from error


def _parsed(given: Any) -> tuple[Asked, ...]:
    if not isinstance(given, str):
        return msgspec.convert(given, tuple[Asked, ...])
    if len(given) > MOST_TEXT:
        raise msgspec.ValidationError(f"{len(given)} characters are more than {MOST_TEXT}")
    return msgspec.json.decode(given, type=tuple[Asked, ...])


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def asked_of(given: Any) -> tuple[Asked, ...]:
    """Parse the potentials of a request, from its value of `potentials`, or that as JSON.

    Raises:
        ValueError: for an invalid value; names and arguments are checked by `choose`.
    """
    try:
        found = _parsed(given)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ValueError(f"potentials={given!r:.200}: {error}; allowed: {_FORM}.") from error
    if len(found) > MOST:
        raise ValueError(f"{len(found)} potentials; allowed: {MOST}. Make a product of some.")
    for asked in found:
        if not (math.isfinite(asked.exponent) and asked.exponent >= 0):
            raise ValueError(
                f"potential {asked.name!r} with exponent={asked.exponent!r}; allowed: a finite "
                "number >= 0."
            )
        if asked.when is not None:
            _check_when(asked.name, asked.when)
    return found


FLAG = "--speculative-smc-potential"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_FLAG_FORM = (
    "NAME=package.module:factory, where factory is a Potential's class or a function that returns "
    'one; literal keyword arguments may follow, as in NAME=package.module:factory(url="...")'
)


class Declared(NamedTuple):
    """One parsed value of the flag."""

    name: str
    module: str
    factory: str
    arguments: dict[str, Any]


class Chosen(NamedTuple):
    """A potential with one request's arguments."""

    name: str
    args: Any  # of the potential's `Args`
    exponent: float
    schedule: Schedule


def declared(given: str) -> Declared:
    """Parse one value of the flag.

    Raises:
        ValueError: for an invalid value.
    """
    name, _, target = given.partition("=")
    module, _, call = target.partition(":")
    if not (_NAME.fullmatch(name) and module and call):
        raise ValueError(f"{FLAG} is {given!r}; allowed: {_FLAG_FORM}.")
    try:
        factory, arguments = _call(call)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{FLAG} is {given!r}: {error}; allowed: {_FLAG_FORM}.") from error
    return Declared(name, module, factory, arguments)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name`` or ``name(key=literal, ...)`` without evaluating it."""
    found = ast.parse(text, mode="eval").body
    if isinstance(found, ast.Name):
        return found.id, {}
    if not (isinstance(found, ast.Call) and isinstance(found.func, ast.Name)):
        raise ValueError("behind the colon stands no name")
    if found.args or any(keyword.arg is None for keyword in found.keywords):
        raise ValueError("arguments need their names")
    return found.func.id, {key.arg or "": ast.literal_eval(key.value) for key in found.keywords}


def names(given: Iterable[str]) -> tuple[str, ...]:
    """Return the names that flag values declare, which `problems` has accepted."""
    return tuple(declared(one).name for one in given)


def problems(given: Iterable[str]) -> list[str]:
    """Return what is wrong with the flag's values, a sentence each; import what they name."""
    found = []
    for one in given:
        try:
            _loaded(declared(one))
        except ValueError as error:
            found.append(str(error))
    if not found and len(set(names(given))) < len(list(given)):
        found.append(f"{FLAG} gives a name twice: {', '.join(names(given))}.")
    return found


@lru_cache(maxsize=4)
def load(given: tuple[str, ...]) -> Mapping[str, Potential]:
    """Return the potentials of a server by name, not opened; each call returns the same objects.

    Raises:
        ValueError: where one cannot be loaded.
    """
    return {one.name: _loaded(one) for one in map(declared, given)}


def _loaded(one: Declared) -> Potential:
    shown = f"{FLAG} {one.name}={one.module}:{one.factory}"
    try:
        factory = getattr(import_module(one.module), one.factory)
        potential = factory(**one.arguments)
    except BaseException as error:  # the operator's code
        raise ValueError(
            f"{shown} cannot be had: {said(error)}. The package must be installed where the server "
            "runs, and the name be a Potential's class or a function that returns one."
        ) from error
    if not isinstance(potential, Potential):
        raise ValueError(
            f"{shown} gives a {type(potential).__name__}; allowed: an object of a subclass of "
            "sglang_smc.potentials.Potential."
        )
    try:
        schedule_of(potential.when)
    except ValueError as error:
        raise ValueError(f"{shown} has {error}") from error
    if not potential.Args.__struct_config__.frozen:
        raise ValueError(
            f"{shown} has Args that can be written into; allowed: a msgspec.Struct with "
            "frozen=True, since one object stands for all of a request's texts."
        )
    return potential


def said(error: BaseException) -> str:
    """Return the type and the message of what an operator's code raised."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # its __str__ is the operator's code, too
        return type(error).__name__


def choose(asked: Asked, potentials: Mapping[str, Potential]) -> Chosen:
    """Return a potential with a request's arguments and schedule.

    Raises:
        ValueError: for an unknown name, or arguments that do not fit.
    """
    potential = potentials.get(asked.name)
    if potential is None:
        known = ", ".join(map(repr, potentials)) or f"none, since this server has no {FLAG}"
        raise ValueError(f"potential {asked.name!r}, which is unknown; allowed: {known}.")
    try:
        args = msgspec.convert(asked.args, potential.Args)
    except BaseException as error:  # of `__post_init__`, which is the operator's code
        what = error if isinstance(error, msgspec.ValidationError) else said(error)
        raise ValueError(
            f"potential {asked.name!r} with args={asked.args!r}: {what}; allowed: "
            f"{fields_of(potential.Args)}."
        ) from error
    when = potential.when if asked.when is None else asked.when
    return Chosen(asked.name, args, asked.exponent, schedule_of(when))


def fields_of(schema: type[msgspec.Struct]) -> str:
    """Return the names and types of arguments, for an error message."""
    fields = msgspec.structs.fields(schema)
    shown = (f"{f.name}: {getattr(f.type, '__name__', None) or f.type}" for f in fields)
    return ", ".join(shown) or "none"
