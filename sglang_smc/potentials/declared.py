"""The potentials that an operator gives a server: ``NAME=package.module:factory``.

What the flag names is code of the operator's, imported as the server starts. A request only ever
names what was declared: nothing of it is imported or evaluated.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from sglang_smc.potentials.asked import Asked, Schedule, schedule_of
from sglang_smc.potentials.base import Potential

FLAG = "--speculative-smc-potential"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_FORM = (
    "NAME=package.module:factory, where factory is a Potential's class or a function that returns "
    'one; literal keyword arguments may follow, as in NAME=package.module:factory(url="...")'
)


class Declared(NamedTuple):
    """One value of the flag, taken apart."""

    name: str
    module: str
    factory: str
    arguments: dict[str, Any]


class Chosen(NamedTuple):
    """A potential as one request has it."""

    name: str
    args: Any  # of the potential's `Args`
    exponent: float
    schedule: Schedule


def declared(given: str) -> Declared:
    """One value of the flag.

    Raises:
        ValueError: where it is none.
    """
    name, _, target = given.partition("=")
    module, _, call = target.partition(":")
    if not (_NAME.fullmatch(name) and module and call):
        raise ValueError(f"{FLAG} is {given!r}; allowed: {_FORM}.")
    try:
        factory, arguments = _call(call)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{FLAG} is {given!r}: {error}; allowed: {_FORM}.") from error
    return Declared(name, module, factory, arguments)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name(key=literal, ...)``; nothing of it is run."""
    found = ast.parse(text, mode="eval").body
    if isinstance(found, ast.Name):
        return found.id, {}
    if not (isinstance(found, ast.Call) and isinstance(found.func, ast.Name)):
        raise ValueError("behind the colon stands no name")
    if found.args or any(keyword.arg is None for keyword in found.keywords):
        raise ValueError("arguments need their names")
    return found.func.id, {key.arg or "": ast.literal_eval(key.value) for key in found.keywords}


def names(given: Iterable[str]) -> tuple[str, ...]:
    """The names that flags declare, which `problems` has looked at."""
    return tuple(declared(one).name for one in given)


def problems(given: Iterable[str]) -> list[str]:
    """What is wrong with the flag's values, a sentence each; imports what they name."""
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
    """The potentials of a server, not opened, by name; the same objects for each call.

    Raises:
        ValueError: where one cannot be had.
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
    """Return a potential as a request asks for it.

    Raises:
        ValueError: where its name is unknown, or its arguments do not fit.
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
    """The names and types of arguments, as an error tells them."""
    fields = msgspec.structs.fields(schema)
    shown = (f"{f.name}: {getattr(f.type, '__name__', None) or f.type}" for f in fields)
    return ", ".join(shown) or "none"
