"""Make requests that ask for opaque identifiers back: one, in another order, and inside JSON."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

LENGTH = 144  # tokens of a copy, at most
_LONG = 3  # times the records of a long prompt, each fourth list
_NAMES = ("get", "set", "merge", "user", "token", "cache", "index", "batch", "frame", "node")
_LETTERS = "ΩжЮяßé漢字日本한글λδאבñŁ5"
KINDS = ("hex", "uuid", "digits", "near", "name", "mixed")
FORMS = ("one", "order", "json")


class Copy(NamedTuple):
    """A request for some of a prompt's identifiers, whose list three requests share."""

    prompt: str
    identifiers: tuple[str, ...]  # that an answer must hold
    params: Mapping[str, Any]

    @property
    def is_greedy(self) -> bool:
        return self.params["temperature"] == 0.0

    def is_lacking(self, text: str) -> bool:
        """Return whether an answer lacks an identifier, in whatever words it comes."""
        return not all(identifier in text for identifier in self.identifiers)


def copies_of(count: int, num_records: int, seed: int = 0) -> list[Copy]:
    """Return so many requests, of which each fourth samples at temperature 1.

    Args:
        num_records: identifiers in a prompt, three or more; `_LONG` times as many in a long one.
        seed: of the identifiers.
    """
    draw = random.Random(seed)
    result = list[Copy]()
    while len(result) < count:
        number = len(result) // len(FORMS)
        size = num_records * (_LONG if number % 4 == 3 else 1)
        records = identifiers(draw, KINDS[number % len(KINDS)], size)
        result += [_copy(draw, records, form, len(result) + i) for i, form in enumerate(FORMS)]
    return result[:count]


def identifiers(draw: random.Random, kind: str, count: int) -> list[str]:
    """Return different identifiers of a kind, all of one length but names."""
    base = f"{draw.getrandbits(64):016x}"
    values = dict[str, None]()
    while len(values) < count:
        values[_identifier(draw, kind, base)] = None
    return list(values)


def _identifier(draw: random.Random, kind: str, base: str) -> str:
    if kind == "uuid":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    if kind == "digits":
        return str(draw.randrange(10**17, 10**18))
    if kind == "near":  # the base with one digit changed
        place = draw.randrange(len(base))
        return base[:place] + draw.choice("0123456789abcdef") + base[place + 1 :]
    if kind == "name":
        first, second, third = (draw.choice(_NAMES) for _ in range(3))
        return f"{first}{second.title()}_{third}{draw.randrange(100, 1000)}"
    if kind == "mixed":
        return "".join(draw.choice(_LETTERS) for _ in range(10))
    return f"{draw.getrandbits(64):016x}"


def _copy(draw: random.Random, records: list[str], form: str, index: int) -> Copy:
    """Return a request that ends where its answer begins, for models without a chat, too."""
    size = 1 if form == "one" else 3
    names = {f"r{place + 1}": records[place] for place in draw.sample(range(len(records)), size)}
    first = next(iter(names))
    text = "; ".join(names)
    ends = {
        "one": f"Record {text} again, exactly as above:\n{first} =",
        "order": f"Records {text} again, exactly as above, in this order:\n{first} =",
        "json": f'Records {text} again, exactly as above, as a JSON object:\n{{"{first}": "',
    }
    lines = "\n".join(f"r{place} = {record}" for place, record in enumerate(records, 1))
    asked = tuple(names.values())
    length = sum(len(one.encode()) + 8 for one in asked)
    temperature = float(index % 4 == 3)
    params = {"max_tokens": min(LENGTH, length), "temperature": temperature}
    return Copy(f"Records:\n{lines}\n\n{ends[form]}", asked, params)
