"""What an installed SGLang lacks of the names in `symbols.py`."""

import ast
import dis
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from contract.shape import (
    ASYNC_GENERATOR,
    COROUTINE,
    PLAIN,
    Parameter,
    Parameters,
    Shape,
    Symbol,
    breaches,
)

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "position",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def problems(symbol: Symbol) -> list[str]:
    """One line for each way in which a symbol is missing or has another shape."""
    try:
        found = pkgutil.resolve_name(symbol.path)
    except Exception as error:  # whatever importing it raises is what a test has to show
        return [f"{symbol.path} is missing ({error})"]
    return breaches(symbol, _shape_of(found, symbol))


def _shape_of(found: Any, symbol: Symbol) -> Shape:
    """What `symbol` asks for; signatures, attributes and source are looked at only where asked."""
    stores = dict(_stores(found)) if symbol.attributes else {}
    function = inspect.unwrap(found) if callable(found) else None
    is_function = inspect.isroutine(function)
    return Shape(
        parameters=_parameters(found) if symbol.parameters is not None else None,
        attributes=frozenset(stores) | frozenset(dir(found)),
        nullable=frozenset(name for name, nullable in stores.items() if nullable),
        kind=_kind(function) if is_function else None,
        body=_body(function) if symbol.calls or symbol.passes or symbol.hands_on else None,
    )


def _parameters(found: Any) -> Parameters | None:
    if not callable(found):
        return None
    actual = inspect.signature(inspect.unwrap(found)).parameters.values()
    return tuple(Parameter(p.name, _KINDS[p.kind], p.default is not p.empty) for p in actual)


def _kind(function: Any) -> str:
    if inspect.isasyncgenfunction(function):
        return ASYNC_GENERATOR
    return COROUTINE if inspect.iscoroutinefunction(function) else PLAIN


def _body(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _stores(found: Any) -> Iterator[tuple[str, bool]]:
    """What a class declares and what its methods set on `self`; those set to None come last."""
    owners = inspect.getmro(found) if inspect.isclass(found) else ()
    stores = [(name, False) for owner in owners for name in inspect.get_annotations(owner)]
    for owner in owners:
        stores += [(name, value is None) for name, value in vars(owner).items()]
        declared = vars(owner).get("__dataclass_fields__", {}).items()
        stores += [(name, field.default is None) for name, field in declared]
        for member in vars(owner).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType) and function.__code__.co_argcount:
                stores += _stores_on(function.__code__.co_varnames[0], function.__code__)
    return iter(sorted(stores, key=lambda store: store[1]))


def _stores_on(receiver: str, code: CodeType) -> Iterator[tuple[str, bool]]:
    """Attributes that code sets on a variable itself, and whether to None."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for index, step in enumerate(steps):
        if step.opname == "STORE_ATTR" and _loads(steps[index - 1], receiver):
            value = steps[index - 2]
            yield step.argval, value.opname == "LOAD_CONST" and value.argval is None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _stores_on(receiver, inner)


def _loads(step: dis.Instruction, name: str) -> bool:
    # Newer interpreters load two variables at once; the last is on top of the stack.
    loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and loaded == name
