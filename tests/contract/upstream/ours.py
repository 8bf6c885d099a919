"""What our own files ask of SGLang, read from their source: imports, calls, hooks, attributes."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract.shape import Parameters
from contract.upstream.release import ROOT, as_run
from contract.upstream.source_shape import signature
from contract.upstream.tree import PACKAGE, Function

PRODUCT = ("sglang_smc", "patches")
FOLDERS = (*PRODUCT, "kernels", "tests", "bench", "examples")


class Use(NamedTuple):
    """An SGLang name in a file of ours."""

    path: str
    place: str
    node: ast.AST


class Source(NamedTuple):
    """A file of ours as it runs on a release, older or newer."""

    path: str
    body: ast.Module
    nodes: list[ast.AST]  # all of them
    imported: dict[str, str]  # SGLang's names, by those under which they were imported

    @property
    def is_product(self) -> bool:
        """Whether it is part of the package, not a tool or a test."""
        return self.path.startswith(PRODUCT)

    def place(self, node: ast.AST) -> str:
        """File and line."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def sglang_name(self, node: ast.AST) -> str | None:
        """The SGLang name that `a.b.c` stands for, if any."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.sglang_name(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None


def sources(newer: bool, root: Path = ROOT, newest: bool = False) -> list[Source]:
    """Our files; links into the package are not followed, so that no file comes twice."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return [read(path, str(path.relative_to(root)), newer, newest) for path in paths]


def read(path: Path, name: str, newer: bool, newest: bool = False) -> Source:
    """One file."""
    body = as_run(path.read_text("utf-8"), newer, newest)
    nodes = list(ast.walk(body))
    imported = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and is_sglang(node.module or "") and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_sglang(alias.name):
                    imported[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
    return Source(name, body, nodes, imported)


def is_sglang(name: str) -> bool:
    """Whether a dotted name is SGLang's, and not ours."""
    return name.partition(".")[0] == PACKAGE


def names(source: Source) -> Iterator[Use]:
    """Names that are imported, that stand in strings, or that are reached through a module."""
    for node in source.nodes:
        place = source.place(node)
        if isinstance(node, ast.ImportFrom) and is_sglang(node.module or "") and not node.level:
            yield from (Use(f"{node.module}.{a.name}", place, node) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (Use(a.name, place, node) for a in node.names if is_sglang(a.name))
        elif isinstance(node, ast.Attribute) and (path := source.sglang_name(node)):
            yield Use(path, place, node)
        elif isinstance(node, ast.Constant) and _is_path(node.value):
            yield Use(node.value, place, node)


def _is_path(value: object) -> bool:
    """Whether a string is a dotted name, of a module at least: as hooks and test doubles have."""
    if not isinstance(value, str) or value.count(".") < 2 or not is_sglang(value):
        return False
    return all(part.isidentifier() for part in value.split("."))


def calls(source: Source) -> Iterator[Use]:
    """Calls of SGLang's functions and classes, by the names under which they were imported."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and (path := source.sglang_name(node.func)):
            yield Use(path, source.place(node), node)


class Hook(NamedTuple):
    """A record of `patches/`."""

    target: str
    place: str
    takes: Parameters | None  # without `original`; None: not to be told


def hooks(source: Source) -> Iterator[Hook]:
    """The `Patch(...)` records of a file."""
    constants = {
        target.id: node.value
        for node in source.body.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name: node for node in source.body.body if isinstance(node, Function)}
    for node in source.nodes:
        if isinstance(node, ast.Call) and _called(node) == "Patch":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            takes = _parameters(given["function"], functions)
            yield Hook(_text(given["target"], constants), source.place(node), takes)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _text(node: ast.AST, constants: dict[str, ast.expr]) -> str:
    """The value of strings, names of strings, and their sums."""
    if isinstance(node, ast.BinOp):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.Name):
        return _text(constants[node.id], constants)
    assert isinstance(node, ast.Constant), f"{ast.unparse(node)} is no plain text"
    return str(node.value)


def _parameters(node: ast.AST, functions: dict[str, Function]) -> Parameters | None:
    """Of a function by its name, or of the one that a call of a function of the file returns."""
    name = _called(node) if isinstance(node, ast.Call) else ast.unparse(node)
    function = functions.get(name)
    if function is not None and isinstance(node, ast.Call):
        inner = {child.name: child for child in function.body if isinstance(child, Function)}
        returned = (node.value for node in function.body if isinstance(node, ast.Return))
        function = next((inner.get(ast.unparse(value)) for value in returned if value), None)
    return None if function is None else signature(function)[1:]


def requirement_fields(source: Source) -> Iterator[Use]:
    """Fields of ServerArgs in `Requirement(field, ...)` records."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and _called(node) == "Requirement" and node.args:
            yield Use(_text(node.args[0], {}), source.place(node), node)


def attribute_reads(source: Source) -> Iterator[tuple[str, Use]]:
    """What is read of parameters that are annotated with a class of SGLang's: class, attribute."""
    for function in source.nodes:
        if isinstance(function, Function):
            owners = dict(_annotated(function, source))
            narrowed = set(_narrowed(function)) if owners else set()
            for node in map(_read, ast.walk(function)) if owners else ():
                if node is not None and isinstance(node.value, ast.Name):
                    owner = owners.get(node.value.id)
                    if owner is not None and node.value.id not in narrowed:
                        yield owner, Use(node.attr, source.place(node), node)


def _read(node: ast.AST) -> ast.Attribute | None:
    """An attribute that a node reads; `a.b += c` does, too."""
    if isinstance(node, ast.AugAssign):
        return node.target if isinstance(node.target, ast.Attribute) else None
    is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    return node if is_read else None


def _narrowed(function: Function) -> Iterator[str]:
    """Names of which a function asks what they are."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _called(node) == "isinstance":
            yield ast.unparse(node.args[0])


def _annotated(function: Function, source: Source) -> Iterator[tuple[str, str]]:
    args = function.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        if arg.annotation is not None:
            named = {path for path in _classes(arg.annotation, source) if path}
            if len(named) == 1:
                yield arg.arg, named.pop()


def _classes(annotation: ast.AST, source: Source) -> Iterator[str | None]:
    """SGLang's classes in `X`, `"X"` and `X | None`; of `list[X]` none, whose attributes differ."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        yield from _classes(annotation.left, source)
        yield from _classes(annotation.right, source)
    else:
        yield source.sglang_name(annotation)


class Override(NamedTuple):
    """A method of ours in a class that inherits from SGLang's."""

    bases: list[str]
    name: str
    place: str
    takes: Parameters


class Heir(NamedTuple):
    """A class of ours that inherits from SGLang's."""

    source: Source
    node: ast.ClassDef
    bases: list[str]  # SGLang's, those of our own bases too


def heirs(sources: list[Source]) -> list[Heir]:
    """All of them; our classes are known by their names alone, which are no two times there."""
    classes = {
        node.name: (source, node)
        for source in sources
        for node in source.body.body
        if isinstance(node, ast.ClassDef)
    }
    found = [Heir(s, n, list(_sglang_bases(n.name, classes))) for s, n in classes.values()]
    return [heir for heir in found if heir.bases]


def _sglang_bases(name: str, classes: dict[str, tuple[Source, ast.ClassDef]]) -> Iterator[str]:
    source, node = classes[name]
    for base in node.bases:
        path, own = source.sglang_name(base), ast.unparse(base)
        if path is not None:
            yield path
        elif own in classes:
            yield from _sglang_bases(own, classes)


def overrides(sources: list[Source]) -> Iterator[Override]:
    """Methods of our classes that may take the place of SGLang's."""
    for source, node, bases in heirs(sources):
        for method in node.body:
            if isinstance(method, Function) and method.name != "__init__":
                yield Override(bases, method.name, source.place(method), signature(method))


def super_calls(sources: list[Source]) -> Iterator[Use]:
    """`super().method(...)` in our classes with one base of SGLang's, where it is not ours."""
    found = heirs(sources)
    own = {(h.node.name, m.name) for h in found for m in h.node.body if isinstance(m, Function)}
    for source, node, bases in found:
        for call in ast.walk(node) if len(bases) == 1 else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super()."):
                name = ast.unparse(call.func).removeprefix("super().")
                if not any((ast.unparse(base), name) in own for base in node.bases):
                    yield Use(f"{bases[0]}.{name}", source.place(call), call)
