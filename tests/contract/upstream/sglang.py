"""A release of SGLang as griffe reads its files: what a dotted name stands for, and its shape.

Modules are read once something in them is asked for, so a comparison reads some 200 of 3,000.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe

PACKAGE = "sglang"
Function = ast.FunctionDef | ast.AsyncFunctionDef
OWN = "sglang-smc"  # our key in what griffe keeps for others

# Bases of other packages that add no attribute that we would read.
BARE = {"object", "ABC", "Protocol", "Generic", "Struct", "NamedTuple"}
ENUMS = {"Enum", "IntEnum", "StrEnum", "str", "int"}


class Parameter(NamedTuple):
    name: str
    kind: str  # "position", "either", "keyword", "*" or "**"
    optional: bool = False


Parameters = tuple[Parameter, ...]


class Field(NamedTuple):
    """A dataclass's or struct's field: what its constructor takes, and where it is declared."""

    parameter: Parameter
    place: str
    in_constructor: bool


class _Members(dict[str, Any]):
    """A module's names: of several bindings the definition, and submodules as they are read."""

    def __init__(self, module: griffe.Module, tree: "Tree") -> None:
        super().__init__()
        self._module, self._tree = module, tree

    def __setitem__(self, name: str, value: Any) -> None:
        before = self.get(name)
        if before is None or _rank(before) >= _rank(value):
            super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        inner = self._tree.read(self._module, name)
        if inner is not None:
            self[name] = inner
            return inner
        for star in [member for member in self.values() if member.is_alias and member.wildcard]:
            found = self._tree.find(f"{star.target_path}.{name}")
            if found is not None:
                return found
        raise KeyError(name)


def _rank(member: Any) -> int:
    """Definitions come before imports, and these before assignments."""
    if member.is_alias:
        return 1
    return 2 if member.is_attribute else 0


class _Keeper(griffe.Extension):
    """Keeps the syntax of what griffe finds, for what griffe does not tell of it."""

    def __init__(self, tree: "Tree") -> None:
        self._tree = tree

    def on_module_instance(self, *, mod: griffe.Module, **_: Any) -> None:
        mod.members = _Members(mod, self._tree)

    def on_instance(self, *, node: ast.AST, obj: griffe.Object, **_: Any) -> None:
        obj.extra[OWN]["node"] = node
        defined = None if obj.parent is None else obj.parent.members.get(obj.name)
        is_other = defined is not None and defined is not obj and not defined.is_alias
        if is_other and defined.is_class:
            defined.extra[OWN]["rebound"] = ast.unparse(node)


class Tree:
    """Args: root: the folder that holds `sglang/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._collection = griffe.ModulesCollection()
        self._extensions = griffe.Extensions(_Keeper(self))
        self._found: dict[str, Any] = {}
        self.attributes = lru_cache(None)(self._attributes)
        self.fields = lru_cache(None)(self._fields)
        self.read(None, PACKAGE)

    def read(self, parent: griffe.Module | None, name: str) -> griffe.Module | None:
        """Read a module's file, or a package's; None where there is none."""
        folder = self.root if parent is None else Path(str(parent.filepath)).parent
        is_package = parent is None or parent.is_init_module
        paths = (folder / name / "__init__.py", folder / f"{name}.py") if is_package else ()
        path = next((path for path in paths if path.is_file()), None)
        if path is None and not (is_package and (folder / name).is_dir()):
            return None
        text = "" if path is None else path.read_text("utf-8")  # else a namespace package
        module = griffe.visit(
            name,
            path or folder / name / "__init__.py",
            text,
            extensions=self._extensions,
            parent=parent,
            modules_collection=self._collection,
        )
        if parent is None:
            self._collection.members[name] = module
        return module

    def find(self, path: str) -> Any:
        """What a name stands for: griffe's object; an alias where another package has it; None."""
        if path not in self._found:
            self._found[path] = None  # what a circle of imports finds
            found: Any = self._collection
            for name in path.split("."):
                found = self._step(found, name)
                if found is None or found.is_alias:
                    break
            self._found[path] = found
        return self._found[path]

    def own(self, path: str) -> Any:
        """The same, but None where another package has it."""
        found = self.find(path)
        return None if found is None or found.is_alias else found

    def _step(self, owner: Any, name: str) -> Any:
        if owner is not self._collection and owner.is_class:
            owners = [each for each in self.lineage(owner) if name in each.members]
            found = owners[0].members[name] if owners else None
        elif owner is self._collection or owner.is_module:
            try:
                found = owner.members[name]
            except KeyError:
                lazy = None if owner is self._collection else owner.members.get("__getattr__")
                return lazy and griffe.Alias(name, "elsewhere")
        else:
            return None
        return self._followed(found)

    def _followed(self, found: Any) -> Any:
        """What an import or `a = b` stands for."""
        if found is None:
            return None
        if found.is_alias:
            target = found.target_path
            return self.find(target) if target.partition(".")[0] == PACKAGE else found
        if found.is_attribute and isinstance(found.value, griffe.ExprName):
            return self.find(found.value.canonical_path) or found
        return found

    def nearest(self, path: str) -> str:
        """Where the innermost thing around a name stands that is there."""
        while path and (found := self.find(path)) is None:
            path = path.rpartition(".")[0]
        return self.place(found) if path else ""

    def place(self, found: Any) -> str:
        """File and line, as one opens them."""
        line = found.alias_lineno if found.is_alias else getattr(node_of(found), "lineno", 1)
        path = (found.parent if found.is_alias else found).filepath
        return f"{Path(str(path)).relative_to(self.root)}:{line}"

    def around(self, line: str) -> str:
        """The dotted name of the function that stands at `srt/file.py:number`; "" for none."""
        path, _, number = line.rpartition(":")
        found = self.find(f"{PACKAGE}.{path.removesuffix('.py').replace('/', '.')}")
        while found is not None and not found.is_function:
            inner = [member for member in found.members.values() if not member.is_alias]
            definitions = (member for member in inner if member.is_class or member.is_function)
            here = (d for d in definitions if d.lineno <= int(number) <= d.endlineno)
            found = next(here, None)
        return "" if found is None else found.path

    def lineage(self, cls: Any) -> list[Any]:
        """A class and those of SGLang that it inherits from, the nearest first."""
        found = [cls]
        for base in cls.bases:
            parent = self.own(base.canonical_path)
            if parent is not None and parent.is_class:
                found += [each for each in self.lineage(parent) if each not in found]
        return found

    def foreign_bases(self, cls: Any) -> set[str]:
        """The last names of bases that are another package's, of a class and its ancestors."""
        paths = {base.canonical_path for owner in self.lineage(cls) for base in owner.bases}
        parents = {path: self.own(path) for path in paths}
        foreign = [p for p, found in parents.items() if found is None or not found.is_class]
        return {path.rpartition(".")[2] for path in foreign}

    def is_closed(self, cls: Any) -> bool:
        """Whether all attributes of a class can be told: no foreign base, no `__getattr__`."""
        catch_all = any("__getattr" in name for c in self.lineage(cls) for name in c.members)
        return not catch_all and self.foreign_bases(cls) <= BARE | ENUMS

    def parameters(self, found: Any) -> Parameters | None:
        """How a function or class is called; None where it is neither, or cannot be told."""
        if found.is_function:
            return signature(node_of(found))
        return self._constructor(found) if found.is_class else None

    def _constructor(self, cls: Any) -> Parameters | None:
        for owner in self.lineage(cls):
            init = owner.members.get("__init__")
            if init is not None and init.is_function:
                return signature(node_of(init))[1:]
            if self._is_generated(owner):
                return tuple(f.parameter for f in self.fields(owner).values() if f.in_constructor)
        return () if self.foreign_bases(cls) <= BARE else None

    def _is_generated(self, cls: Any) -> bool:
        return is_dataclass(cls) or is_rebuilt(cls) or self._is_struct(cls)

    def _is_struct(self, cls: Any) -> bool:
        return bool(self.foreign_bases(cls) & {"Struct", "NamedTuple"})

    def _fields(self, cls: Any) -> dict[str, Field]:
        """A dataclass's or struct's fields in the order of its constructor, those of bases first.

        A module may gather them for a class, as ServerArgs' are since 0.5.20:
        `collect_input_fields(NAMES)` reads the fields of the classes in NAMES, a list there, and
        `msgspec.defstruct` makes the class anew with them.
        """
        table: dict[str, Field] = {}
        for owner in reversed(self.lineage(cls)):
            for name, member in owner.members.items():
                node = node_of(member)
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(
                    node.annotation
                ):
                    default = "" if node.value is None else ast.unparse(node.value)
                    taken = Parameter(name, "either", bool(default))
                    table[name] = Field(taken, self.place(member), "init=False" not in default)
            for source in self._gathered(owner) if is_rebuilt(owner) else ():
                table |= self.fields(source)
        return table

    def _gathered(self, cls: Any) -> Iterator[Any]:
        for statement in statements(node_of(cls.parent)):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "collect_input_fields":
                names = node_of(cls.parent.members[ast.unparse(value.args[0])]).value
                for element in names.elts:
                    yield self.find(f"{cls.parent.path}.{ast.unparse(element)}")

    def _attributes(self, cls: Any) -> dict[str, bool]:
        """What a class and its ancestors declare and set on `self`, and whether to None."""
        found = dict.fromkeys([*dir(object), *self.fields(cls)], False)
        if is_rebuilt(cls) or self._is_struct(cls):
            found |= {"__struct_fields__": False, "_replace": False, "_asdict": False}
        for owner in self.lineage(cls):
            if is_dataclass(owner):
                found["__dataclass_fields__"] = False
            for name, is_none in _stores(node_of(owner)):
                found[name] = found.get(name, False) or is_none
        return found


def node_of(found: Any) -> Any:
    """The syntax of what griffe found."""
    return None if found.is_alias else found.extra[OWN].get("node")


def is_dataclass(cls: Any) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node_of(cls).decorator_list)
    return any(ast.unparse(each).endswith("dataclass") for each in decorators)


def is_rebuilt(cls: Any) -> bool:
    """Whether its module makes the class anew, with fields that it has gathered."""
    return "defstruct(" in cls.extra[OWN].get("rebound", "")


def signature(node: Function) -> Parameters:
    """A function's parameters; of a class method without its class."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    first_default = len(plain) - len(args.defaults)
    kinds = ["position"] * len(args.posonlyargs) + ["either"] * len(args.args)
    found = [Parameter(a.arg, kinds[i], i >= first_default) for i, a in enumerate(plain)]
    found += [Parameter(args.vararg.arg, "*")] if args.vararg else []
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, "keyword", default is not None))
    found += [Parameter(args.kwarg.arg, "**")] if args.kwarg else []
    of_class = any("classmethod" in ast.unparse(each) for each in node.decorator_list)
    return tuple(found[of_class:])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a module or class, also under `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With | ast.For | ast.While | ast.ExceptHandler):
            yield from statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _stores(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """What stands in a class, and what its methods set on `self`, and whether to None."""
    for each in statements(node):
        receiver = ""
        if isinstance(each, Function | ast.ClassDef):
            yield each.name, False
            plain = each.args.posonlyargs + each.args.args if isinstance(each, Function) else []
            if not plain:
                continue
            receiver = f"{plain[0].arg}."
        for inner in ast.walk(each):
            if isinstance(inner, ast.Assign | ast.AnnAssign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                is_none = isinstance(inner.value, ast.Constant) and inner.value.value is None
                packed = (each for t in targets for each in getattr(t, "elts", [t]))
                for name in map(ast.unparse, packed):
                    if name.startswith(receiver) and "." not in name.removeprefix(receiver):
                        yield name.removeprefix(receiver), is_none
