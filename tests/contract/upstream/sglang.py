"""A release of SGLang, read from its files: what a dotted name stands for, and its shape.

Files are read once something in them is asked for, so a comparison reads some 200 of 3,000.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "sglang"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function
Import = ast.Import | ast.ImportFrom

# Bases of other packages that add no attribute that we would read.
BARE = {"object", "ABC", "Protocol", "Generic", "Struct", "NamedTuple"}
ENUMS = {"Enum", "IntEnum", "StrEnum", "str", "int"}


class Thing(NamedTuple):
    """A module, class, function or value of SGLang's; an import, where another package has it."""

    path: str
    node: Any
    file: str  # below the release's folder

    @property
    def owner(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def place(self) -> str:
        """File and line, as one opens them."""
        return f"{self.file}:{getattr(self.node, 'lineno', 1)}"

    def is_a(self, kind: Any) -> bool:
        return isinstance(self.node, kind)


class Tree:
    """Args: root: the folder that holds `sglang/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._found: dict[str, Thing | None] = {}
        for method in ("names", "lineage", "attributes", "fields"):
            setattr(self, method, lru_cache(None)(getattr(self, method)))

    def find(self, path: str) -> Thing | None:
        """What a name stands for, wherever it was imported from."""
        if path not in self._found:
            self._found[path] = None  # what a circle of imports finds
            self._found[path] = self._read(path)
        return self._found[path]

    def _read(self, path: str) -> Thing | None:
        owner, _, name = path.rpartition(".")
        around = self.find(owner) if owner else None
        if around is None:
            return self._module(path) if path == PACKAGE else None
        if around.is_a(Import):
            return around
        if around.is_a(ast.ClassDef):
            owners = [each for each in self.lineage(around) if name in self.names(each)]
            return self._followed(owners[0], name) if owners else None
        if not around.is_a(ast.Module):
            return None
        if name in (bound := self.names(around)):
            return self._followed(around, name)
        stars = (self.find(f"{_target(n, around, '*')}.{name}") for n in bound.get("*", ()))
        lazy = Thing(path, ast.Import([]), around.file) if "__getattr__" in bound else None
        return self._module(f"{around.path}.{name}") or next(filter(None, stars), lazy)

    def _module(self, path: str) -> Thing | None:
        """A module or package, which may be a folder alone; None where there is none."""
        place = self.root / path.replace(".", "/")
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return Thing(path, ast.parse(file.read_bytes()), str(file.relative_to(self.root)))
        return Thing(path, ast.Module([], []), path) if place.is_dir() else None

    def _followed(self, owner: Thing, name: str) -> Thing | None:
        """What a name of a module or class stands for, at the other end of imports and `a = b`."""
        node: Any = self.names(owner)[name][0]
        here = Thing(f"{owner.path}.{name}", node, owner.file)
        if isinstance(node, Import):
            target = _target(node, owner, name)
            if target == here.path:  # a package that imports a module of its own
                return self._module(target)
            is_own = target.partition(".")[0] == PACKAGE
            return self.find(target) if is_own else here._replace(path=target)
        value = getattr(node, "value", None)
        return (
            self.find(f"{owner.path}.{value.id}") or here if isinstance(value, ast.Name) else here
        )

    def names(self, thing: Thing) -> dict[str, list[ast.AST]]:
        """What a module or class binds: definitions come before imports, these before values."""
        found: dict[str, list[ast.AST]] = {}
        for node in statements(thing.node):
            for name in _bound(node):
                found.setdefault(name, []).insert(0, node)
        for nodes in found.values():
            nodes.sort(
                key=lambda node: 2 - isinstance(node, Import) - 2 * isinstance(node, Definition)
            )
        return found

    def own(self, path: str, kind: Any = ast.AST) -> Thing | None:
        """The same, but None where another package has it, or it is of another kind."""
        found = self.find(path)
        return found if found and found.is_a(kind) and not found.is_a(Import) else None

    def nearest(self, path: str) -> str:
        """Where the innermost thing around a name stands that is there."""
        found = self.find(path)
        return found.place if found else self.nearest(path.rpartition(".")[0]) if path else ""

    def around(self, line: str) -> str:
        """The dotted name of the function that stands at `srt/file.py:number`; "" for none."""
        file, _, number = line.rpartition(":")
        found = self.find(f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}")
        while found and not found.is_a(Function):
            inner = (node for node in statements(found.node) if isinstance(node, Definition))
            here = [n.name for n in inner if _first_line(n) <= int(number) <= (n.end_lineno or 0)]
            found = self.find(f"{found.path}.{here[0]}") if here else None
        return found.path if found else ""

    def lineage(self, cls: Thing) -> list[Thing]:
        """A class and those of SGLang that it inherits from, the nearest first."""
        parents = filter(None, (self.own(base, ast.ClassDef) for base in _bases(cls)))
        ancestors = (each for parent in parents for each in self.lineage(parent))
        return list(dict.fromkeys([cls, *ancestors]))

    def foreign_bases(self, cls: Thing) -> set[str]:
        """The last names of bases that are another package's, of a class and its ancestors."""
        bases = {base: self.find(base) for owner in self.lineage(cls) for base in _bases(owner)}
        foreign = {b: t for b, t in bases.items() if not t or not t.is_a(ast.ClassDef)}
        return {(t.path if t else base).rpartition(".")[2] for base, t in foreign.items()}

    def is_closed(self, cls: Thing) -> bool:
        """Whether all attributes of a class can be told: no foreign base, no `__getattr__`."""
        catch_all = any("__getattr" in name for c in self.lineage(cls) for name in self.names(c))
        return not catch_all and self.foreign_bases(cls) <= BARE | ENUMS

    def signature(self, found: Thing) -> Signature | None:
        """How a function or class is called; None where it is neither, or cannot be told."""
        if found.is_a(Function):
            return signature(found.node)
        for owner in self.lineage(found) if found.is_a(ast.ClassDef) else ():
            init = self.names(owner).get("__init__", [None])[0]
            if isinstance(init, Function):
                return without_first(signature(init))
            if is_dataclass(owner) or self.is_struct(owner):
                taken = [
                    Parameter(
                        n, Parameter.POSITIONAL_OR_KEYWORD, default=f.node.value or Parameter.empty
                    )
                    for n, f in self.fields(owner).items()
                    if "init=False" not in ast.unparse(f.node)
                ]
                return Signature(taken, __validate_parameters__=False)
        is_plain = found.is_a(ast.ClassDef) and self.foreign_bases(found) <= BARE
        return Signature() if is_plain else None

    def is_struct(self, cls: Thing) -> bool:
        return self._is_rebuilt(cls) or bool(self.foreign_bases(cls) & {"Struct", "NamedTuple"})

    def _is_rebuilt(self, cls: Thing) -> bool:
        """Whether its module makes the class anew, with fields that it has gathered."""
        module = self.find(cls.owner)
        bindings = self.names(module).get(cls.node.name, ()) if module else ()
        return any("defstruct(" in ast.unparse(n) for n in bindings if isinstance(n, ast.Assign))

    def fields(self, cls: Thing) -> dict[str, Thing]:
        """A dataclass's or struct's fields in the order of its constructor, those of bases first.

        A module may gather them for a class, as ServerArgs' are since 0.5.20:
        `collect_input_fields(NAMES)` reads the fields of the classes in NAMES, a list there, and
        `msgspec.defstruct` makes the class anew with them.
        """
        table: dict[str, Thing] = {}
        for owner in reversed(self.lineage(cls)):
            for name, (node, *_) in self.names(owner).items():
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(
                    node.annotation
                ):
                    table[name] = Thing(name, node, owner.file)
            for source in self._gathered(owner) if self._is_rebuilt(owner) else ():
                table |= self.fields(source)
        return table

    def _gathered(self, cls: Thing) -> Iterator[Thing]:
        module: Any = self.find(cls.owner)
        for statement in statements(module.node):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "collect_input_fields":
                names: Any = self.names(module)[ast.unparse(value.args[0])][0]
                found = (self.find(f"{module.path}.{ast.unparse(n)}") for n in names.value.elts)
                yield from filter(None, found)

    def methods(self, cls: Thing) -> dict[str, Thing]:
        """What a class itself defines, but for what Python calls."""
        found = {name: cls._replace(node=nodes[0]) for name, nodes in self.names(cls).items()}
        return {n: m for n, m in found.items() if m.is_a(Function) and not n.startswith("__")}

    def attributes(self, cls: Thing) -> dict[str, bool]:
        """What a class and its ancestors declare and set on `self`, and whether to None."""
        generated = ("__struct_fields__", "_replace", "_asdict") if self.is_struct(cls) else ()
        found = dict.fromkeys([*dir(object), *self.fields(cls), *generated], False)
        for owner in self.lineage(cls):
            if is_dataclass(owner):
                found["__dataclass_fields__"] = False
            for name, is_none in _stores(owner.node):
                found[name] = found.get(name, False) or is_none
        return found


def is_dataclass(cls: Thing) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in cls.node.decorator_list)
    return any(ast.unparse(each).endswith("dataclass") for each in decorators)


def signature(node: Any) -> Signature:
    """A function's parameters, all defaults None; of a class method without its class."""
    args = deepcopy(node.args)
    for arg in ast.walk(args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    args.defaults = [ast.Constant(None) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(None) for default in args.kw_defaults]
    taken = inspect.signature(eval(f"lambda {ast.unparse(args)}: 0"))
    of_class = any("classmethod" in ast.unparse(each) for each in node.decorator_list)
    return without_first(taken) if of_class else taken


def without_first(taken: Signature) -> Signature:
    return Signature([*taken.parameters.values()][1:])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a module or class, also under `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With | ast.For | ast.While | ast.ExceptHandler):
            yield from statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _bases(cls: Thing) -> list[str]:
    bases = [ast.unparse(base).partition("[")[0] for base in cls.node.bases]
    # A class may have the name of an imported one, which is its base.
    return [f"{cls.owner}.{base}" for base in bases if base != cls.node.name]


def _bound(node: ast.AST) -> Iterable[str]:
    """The names that a statement binds."""
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, Import):
        local = isinstance(node, ast.Import)
        return [a.asname or (a.name.partition(".")[0] if local else a.name) for a in node.names]
    return [name for name, _ in _targets(node) if "." not in name]


def _target(node: Any, owner: Thing, name: str) -> str:
    """The dotted name that an import binds to a name; of `*` the module."""
    of = {alias.asname or alias.name: alias.name for alias in node.names}.get(name, name)
    if isinstance(node, ast.Import):
        return of
    package = owner.path.split(".")[
        : owner.path.count(".") + 1 + owner.file.endswith("__init__.py") - node.level
    ]
    parts = [*(package if node.level else ()), node.module, of if of != "*" else None]
    return ".".join(filter(None, parts))


def _targets(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The names and attributes that an assignment binds, and whether to None."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in getattr(target, "elts", [target]):
                yield ast.unparse(each), is_none


def _stores(cls: ast.AST) -> Iterator[tuple[str, bool]]:
    """What stands in a class, and what its methods set on `self`, and whether to None."""
    for each in statements(cls):
        yield from ((name, False) for name in _bound(each))
        yield from _targets(each)
        plain = each.args.posonlyargs + each.args.args if isinstance(each, Function) else []
        for inner in ast.walk(each) if plain else ():
            for name, is_none in _targets(inner):
                receiver, _, attribute = name.partition(".")
                if receiver == plain[0].arg and attribute.isidentifier():
                    yield attribute, is_none


def _first_line(node: Any) -> int:
    return min(each.lineno for each in (node, *node.decorator_list))
