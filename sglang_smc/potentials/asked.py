"""What a request asks of potentials: which, with what arguments, how strongly, and when."""

import math
from typing import Any, NamedTuple

import msgspec

MOST = 8
"""Potentials that one request may name."""

MOST_TEXT = 65_536
"""Characters of JSON that name them and their arguments."""

_FORM = (
    'a list of {"name": ..., "args": {...}, "exponent": 1.0, "when": ...}, all but name optional'
)
WHEN = '"round", "end", {"tokens": n} with n from 1 on, or {"delimiter": a text or a token id}'


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One potential, as a request names it."""

    name: str
    args: dict[str, Any] = {}
    exponent: float = 1.0
    when: str | dict[str, Any] | None = None  # None: when the potential itself wants


class Schedule(NamedTuple):
    """When a potential is asked about the beginning of a text; of whole texts it always is."""

    is_each_round: bool = False
    tokens: int = 0  # behind every so many; 0: not
    delimiter: str | int | None = None  # behind each of these

    def falls_on(self, length: int, token: int) -> bool:
        """Whether a text of ``length`` tokens that ends with ``token`` is one to ask about.

        Where a delimiter is a text, that is for who can read it to say.
        """
        if self.tokens:
            return length % self.tokens == 0
        return isinstance(self.delimiter, int) and token == self.delimiter


def schedule_of(when: str | dict[str, Any]) -> Schedule:
    """What `when` says.

    Raises:
        ValueError: saying what is allowed.
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
    """The potentials of a request, whose value of `potentials` is ``given``, or that as JSON.

    Raises:
        ValueError: saying what is wrong; whether their names and arguments are known is not asked.
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
