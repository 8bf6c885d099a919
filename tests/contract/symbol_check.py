"""What an installed SGLang lacks of the names in `symbols.py`."""

import dis
import inspect
import pkgutil
from types import FunctionType

from contract.symbols import Symbol


def problems(symbol: Symbol) -> list[str]:
    """One line for each way in which a symbol is missing or has another shape."""
    try:
        found = pkgutil.resolve_name(symbol.path)
    except Exception as error:  # whatever importing it raises is what a test has to show
        return [f"{symbol.path} is missing ({error})"]
    return _check_parameters(symbol, found) + _check_attributes(symbol, found)


def _check_parameters(symbol: Symbol, found: object) -> list[str]:
    if symbol.parameters is None:
        return []
    if not callable(found):
        return [f"{symbol.path} is no function"]
    actual = " ".join(inspect.signature(inspect.unwrap(found)).parameters)
    if actual == symbol.parameters:
        return []
    return [f"{symbol.path} takes ({actual}), not the expected ({symbol.parameters})"]


def _check_attributes(symbol: Symbol, found: object) -> list[str]:
    expected = symbol.attributes.split()
    names = _attribute_names(found) if expected else set()
    return [f"{symbol.path} has no {name}" for name in expected if name not in names]


def _attribute_names(found: object) -> set[str]:
    names = set(dir(found))
    for owner in inspect.getmro(found) if inspect.isclass(found) else ():
        names.update(inspect.get_annotations(owner))
        for member in vars(owner).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType):
                names.update(_stored_names(function))
    return names


def _stored_names(function: FunctionType) -> set[str]:
    instructions = dis.get_instructions(function)
    return {step.argval for step in instructions if step.opname == "STORE_ATTR"}
