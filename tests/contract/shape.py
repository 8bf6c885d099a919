"""What a name of SGLang's looks like, and what `symbols.py` asks of it.

A shape is found in two ways, which must agree: by importing the name (`symbol_check.py`), and by
reading the source of a release that is not installed (`upstream/`). Standard library alone: the
second way has to run where nothing is installed.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

PLAIN = "plain"
COROUTINE = "coroutine"
ASYNC_GENERATOR = "async generator"


class Symbol(NamedTuple):
    """An SGLang name that must exist, with the shape that this package counts on."""

    path: str

    parameters: str | None = None
    """Of a function, or a class: the first of its parameters, in order; behind a ``*`` those that
    must be accepted by keyword. It may have more. None: not compared."""

    attributes: str = ""
    """Of a class: some of its fields and methods, and of what its methods set on `self`. With a
    ``?``: one that is None at times."""

    kind: str = PLAIN
    """Of a function: `PLAIN`, `COROUTINE` or `ASYNC_GENERATOR`."""

    calls: str = ""
    """Of a function: the ends of some expressions that it calls, as ``worker.update``."""

    passes: str = ""
    """Of a function: the keywords, all of them, of some call or dictionary in it."""

    hands_on: str = ""
    """Of a function: the ends of some expressions that it gives to what it calls."""


class Parameter(NamedTuple):
    """One parameter of a function."""

    name: str
    kind: str  # "position", "either", "keyword", "*" or "**"
    optional: bool = False


Parameters = tuple[Parameter, ...]


class Shape(NamedTuple):
    """What is known of a name."""

    parameters: Parameters | None = None  # None: no function, or not to be told
    attributes: frozenset[str] = frozenset()
    nullable: frozenset[str] = frozenset()  # attributes that are set to None somewhere
    kind: str | None = None  # None: no function
    body: ast.AST | None = None  # of a function


def breaches(symbol: Symbol, shape: Shape) -> list[str]:
    """One line for each way in which a name that exists has another shape than it should."""
    found = [
        *_of_parameters(symbol, shape.parameters),
        *_of_attributes(symbol, shape),
        *_of_body(symbol, shape.body),
    ]
    if shape.kind not in (None, symbol.kind):
        found.append(f"is now of kind {shape.kind}, not {symbol.kind}")
    return [f"{symbol.path} {line}" for line in found]


def _of_parameters(symbol: Symbol, actual: Parameters | None) -> Iterator[str]:
    if symbol.parameters is None:
        return
    if actual is None:
        yield "is no function"
        return
    before, _, behind = symbol.parameters.partition("*")
    expected = before.split()
    if names_by_position(actual)[: len(expected)] != expected:
        yield f"takes ({text_of(actual)}), not first ({' '.join(expected)})"
    for name in behind.split():
        if not takes_keyword(actual, name):
            yield f"takes no keyword {name}"


def _of_attributes(symbol: Symbol, shape: Shape) -> Iterator[str]:
    for word in symbol.attributes.split():
        name = word.rstrip("?")
        if name not in shape.attributes:
            yield f"has no {name}"
        elif word != name and name not in shape.nullable:
            yield f"never sets {name} to None"


def _of_body(symbol: Symbol, body: ast.AST | None) -> Iterator[str]:
    called, given, passed = _calls(body), _arguments(body), _keywords(body)
    for end in symbol.calls.split():
        if not _ends_some(end, called):
            yield f"does not call {end}"
    for end in symbol.hands_on.split():
        if not _ends_some(end, given):
            yield f"does not hand on {end}"
    if symbol.passes and set(symbol.passes.split()) not in passed:
        yield f"passes not just these keywords to anything: {symbol.passes}"


def _ends_some(end: str, names: set[str]) -> bool:
    return any(name == end or name.endswith("." + end) for name in names)


def _calls(body: ast.AST | None) -> set[str]:
    nodes = ast.walk(body) if body is not None else ()
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def _arguments(body: ast.AST | None) -> set[str]:
    calls = (node for node in ast.walk(body) if isinstance(node, ast.Call)) if body else ()
    given = (value for c in calls for value in (*c.args, *(k.value for k in c.keywords)))
    return {ast.unparse(value) for value in given}


def _keywords(body: ast.AST | None) -> list[set[str]]:
    """The keywords of each call, and the keys of each dictionary."""
    found = []
    for node in ast.walk(body) if body is not None else ():
        if isinstance(node, ast.Call):
            found.append({keyword.arg for keyword in node.keywords if keyword.arg})
        elif isinstance(node, ast.Dict):
            found.append({str(key.value) for key in node.keys if isinstance(key, ast.Constant)})
    return found


def names_by_position(parameters: Parameters) -> list[str]:
    """Of the parameters that may be given by position, in order."""
    return [p.name for p in parameters if p.kind in ("position", "either")]


def takes_keyword(parameters: Parameters, name: str) -> bool:
    """Whether a keyword is accepted."""
    return any(p.kind == "**" or (p.name == name and p.kind in _NAMED) for p in parameters)


def takes_any(parameters: Parameters, kind: str) -> bool:
    """Whether there is a parameter of this kind."""
    return any(p.kind == kind for p in parameters)


def text_of(parameters: Parameters) -> str:
    """Parameters as they are shown."""
    return " ".join((p.kind if "*" in p.kind else "") + p.name for p in parameters)


_NAMED = ("either", "keyword")
