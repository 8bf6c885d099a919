"""Import what an operator names by a dotted path, as they import a class of their own package."""

import inspect
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def describe(error: BaseException) -> str:
    """Return the type and the message of what an operator's code raised."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # its __str__ is the operator's code, too
        return type(error).__name__


def not_loaded(shown: str, error: BaseException, what: str) -> ValueError:
    """Return the error for ``shown``, a flag and its value, whose code raised ``error``.

    Args:
        what: what the name must be.
    """
    return ValueError(
        f"{shown} cannot be had: {describe(error)}. The package must be installed where the server "
        f"runs, and the name be {what}."
    )


def at(path: str) -> Any:
    """Return what stands at a path ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def load_class(flag: str, given: str, base: type[T]) -> type[T]:
    """Return the class at ``given``, the value of a flag.

    Raises ValueError unless it can be imported, is a subclass of ``base``, and is not abstract.
    """
    what = f"a subclass of {base.__module__}.{base.__qualname__}"
    shown = f"{flag} {given}"
    if not all(given.partition(":")):
        raise ValueError(f"{flag} is {given!r}; allowed: package.module:Class, {what}.")
    try:
        found = at(given)
    except BaseException as error:  # the operator's code
        raise not_loaded(shown, error, what) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{shown} is {found!r:.200}; allowed: {what}. Name the class itself.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
        raise ValueError(f"{shown} is abstract; allowed: a class with {missing}. Define them.")
    return found
