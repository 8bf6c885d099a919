"""The shape of an SGLang name, read from source: fields, signatures, what is set on `self`."""

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from contract.shape import ASYNC_GENERATOR, COROUTINE, PLAIN, Parameter, Parameters, Shape
from contract.upstream.tree import Found, Function, Tree, statements

_NO_ARG = "field alone"
_OBJECT = frozenset(dir(object))


@cache
def shape_of(tree: Tree, found: Found) -> Shape:
    """What a class or function looks like; a bare shape for everything else."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        stores = dict.fromkeys(_inherent(tree, found), False)
        for name, nullable in _stores(tree, found):
            stores[name] = stores.get(name, False) or nullable
        nullable = frozenset(name for name, is_none in stores.items() if is_none)
        return Shape(constructor(tree, found), frozenset(stores), nullable)
    if isinstance(node, Function) and not _is_property(node):
        return Shape(signature(node), kind=_kind(node), body=node)
    return Shape()


def parameters_of(tree: Tree, found: Found) -> Parameters | None:
    """How a function or class is called; None where it is neither, or cannot be told."""
    if isinstance(found.node, ast.ClassDef):
        return constructor(tree, found)
    return signature(found.node) if isinstance(found.node, Function) else None


def signature(node: Function) -> Parameters:
    """A function's parameters; of a class method without its class."""
    args = node.args
    plain = _plain(node)
    first_default = len(plain) - len(args.defaults)
    found = [
        Parameter(
            arg.arg, "position" if i < len(args.posonlyargs) else "either", i >= first_default
        )
        for i, arg in enumerate(plain)
    ]
    if args.vararg:
        found.append(Parameter(args.vararg.arg, "*"))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, "keyword", default is not None))
    if args.kwarg:
        found.append(Parameter(args.kwarg.arg, "**"))
    return tuple(found[1:] if "classmethod" in _decorators(node) else found)


def constructor(tree: Tree, found: Found) -> Parameters | None:
    """How a class is built; None where another package's base may decide that."""
    for owner in tree.lineage(found):
        for node in statements(owner.node):
            if isinstance(node, Function) and node.name == "__init__":
                return signature(node)[1:]
        if _generates_init(tree, owner):
            return tuple(f.parameter for f in _fields(tree, owner) if f.parameter.kind != _NO_ARG)
        if _foreign_bases(tree, owner) - _BARE:
            return None
    return ()


def fields(tree: Tree, found: Found) -> dict[str, Found]:
    """A dataclass's or struct's fields, and where they are declared."""
    return {field.parameter.name: field.declared for field in _fields(tree, found)}


def methods(found: Found) -> dict[str, Found]:
    """What a class itself defines."""
    nodes = (node for node in statements(found.node) if isinstance(node, Function))
    return {node.name: Found(found.module, node) for node in nodes}


def is_closed(tree: Tree, found: Found) -> bool:
    """Whether all attributes of a class can be told: no foreign base, no `__getattr__`."""
    return not any(
        _foreign_bases(tree, owner) - _BARE - _ENUMS
        or any(getattr(node, "name", "") in _CATCH_ALL for node in statements(owner.node))
        for owner in tree.lineage(found)
    )


# Bases of other packages that add nothing that we would read.
_BARE = {"object", "ABC", "Protocol", "Generic", "Struct", "NamedTuple"}
_ENUMS = {"Enum", "IntEnum", "StrEnum", "str", "int"}
_CATCH_ALL = {"__getattr__", "__getattribute__"}


def _foreign_bases(tree: Tree, found: Found) -> set[str]:
    assert isinstance(found.node, ast.ClassDef)
    pairs = zip(found.node.bases, tree.bases(found), strict=True)
    foreign = (base for base, parent in pairs if parent is None)
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in foreign)
    return {ast.unparse(base).rpartition(".")[2] for base in plain}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return "dataclass" in _decorators(node)


def _is_struct(tree: Tree, found: Found) -> bool:
    classes = tree.lineage(found)
    bases = (base for owner in classes for base in getattr(owner.node, "bases", ()))
    return any(ast.unparse(base).rpartition(".")[2] in ("Struct", "NamedTuple") for base in bases)


def _generates_init(tree: Tree, found: Found) -> bool:
    assert isinstance(found.node, ast.ClassDef)
    is_generated = _is_dataclass(found.node) or _is_struct(tree, found)
    return is_generated or _is_rebuilt(tree, found)


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {ast.unparse(call).rpartition(".")[2] for call in calls}


def _is_property(node: Function) -> bool:
    return any("property" in name for name in _decorators(node))


def _kind(node: Function) -> str:
    if not isinstance(node, ast.AsyncFunctionDef):
        return PLAIN
    return ASYNC_GENERATOR if any(map(_is_yield, _own_nodes(node))) else COROUTINE


def _is_yield(node: ast.AST) -> bool:
    return isinstance(node, ast.Yield | ast.YieldFrom)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What belongs to a function itself, not to one within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from _own_nodes(child)


class _Field(NamedTuple):
    parameter: Parameter  # of the constructor
    declared: Found


@cache
def _fields(tree: Tree, found: Found) -> tuple[_Field, ...]:
    """Fields as the constructor takes them, those of bases first."""
    table: dict[str, _Field] = {}
    for owner in reversed(tree.lineage(found)):
        for node in statements(owner.node):
            if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
                continue
            if isinstance(node.target, ast.Name):
                parameter = _parameter_of(node.target.id, node.value)
                table[parameter.name] = _Field(parameter, Found(owner.module, node))
        table |= {field.parameter.name: field for field in _gathered(tree, owner)}
    return tuple(table.values())


def _parameter_of(name: str, default: ast.expr | None) -> Parameter:
    value = "" if default is None else ast.unparse(default)
    return Parameter(name, _NO_ARG if "init=False" in value else "either", bool(value))


def _gathered(tree: Tree, found: Found) -> Iterator[_Field]:
    """Fields that a module gathers for a class, as ServerArgs' do since 0.5.20.

    `collect_input_fields(NAMES)` reads the fields of the classes in NAMES, a list of that module,
    and `msgspec.defstruct` makes the class anew with them.
    """
    for node in statements(found.module.body) if _is_rebuilt(tree, found) else ():
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(call, ast.Call) and "collect_input_fields" in ast.unparse(call.func):
            listed = tree.evaluate(found.module, call.args[0])
            value = getattr(listed.node, "value", None) if listed is not None else None
            for element in getattr(value, "elts", ()):
                source = tree.evaluate(found.module, element)
                if source is not None:
                    yield from _fields(tree, source)


def _is_rebuilt(tree: Tree, found: Found) -> bool:
    nodes = tree.names(found.module).get(getattr(found.node, "name", ""), ())
    return any("defstruct(" in ast.unparse(node) for node in nodes if isinstance(node, ast.Assign))


def _inherent(tree: Tree, found: Found) -> Iterator[str]:
    """What every such class has, and what is generated."""
    yield from _OBJECT
    for owner in tree.lineage(found):
        assert isinstance(owner.node, ast.ClassDef)
        yield from (field.parameter.name for field in _gathered(tree, owner))
        if _is_dataclass(owner.node):
            yield from ("__dataclass_fields__",)
    if _is_rebuilt(tree, found):
        yield "__struct_fields__"
    if _is_struct(tree, found):
        yield from ("__struct_fields__", "_replace", "_asdict")


def _stores(tree: Tree, found: Found) -> Iterator[tuple[str, bool]]:
    """What a class declares and what its methods set on `self`, and whether to None."""
    for owner in tree.lineage(found):
        for node in statements(owner.node):
            if isinstance(node, Function | ast.ClassDef):
                yield node.name, False
                yield from _on_self(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (name for target in targets for name in ast.walk(target)):
                    if isinstance(name, ast.Name):
                        yield name.id, _is_none(node.value)


def _on_self(method: Function | ast.ClassDef) -> Iterator[tuple[str, bool]]:
    first = [] if isinstance(method, ast.ClassDef) else _plain(method)[:1]
    for node in ast.walk(method) if first else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_none(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and _is_on(target, first[0].arg):
                    yield target.attr, True
        elif isinstance(node, ast.Attribute) and _is_on(node, first[0].arg):
            yield node.attr, False


def _plain(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args]


def _is_on(node: ast.Attribute, receiver: str) -> bool:
    """Whether it sets something on a variable itself."""
    is_set = isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.value, ast.Name) and node.value.id == receiver


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
