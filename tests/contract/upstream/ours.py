"""What our own files ask of SGLang, read from their source: imports, calls, hooks, attributes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from contract.upstream.release import FAMILIES, ROOT, as_run
from contract.upstream.sglang import PACKAGE, Function, Parameters, signature

PRODUCT = ("sglang_smc", "patches")
FOLDERS = (*PRODUCT, "kernels", "tests", "bench", "examples")
MENTIONS = re.compile(r"\bsglang\b")


class Use(NamedTuple):
    path: str
    place: str
    node: ast.AST


class Source(NamedTuple):
    """A file of ours as it runs on a release."""

    path: str
    body: ast.Module
    nodes: list[ast.AST]  # all of them
    imported: dict[str, str]  # SGLang's names, by those under which they were imported

    @property
    def is_product(self) -> bool:
        """Whether it is part of the package, not a tool or a test."""
        return self.path.startswith(PRODUCT)

    def place(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def sglang_name(self, node: ast.AST) -> str | None:
        """The SGLang name that `a.b.c` stands for, if any."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.sglang_name(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None


def sources(of: frozenset[str], root: Path = ROOT) -> list[Source]:
    """Our files; links into the package are not followed, so that no file comes twice."""
    found = []
    for name, text in _texts(root):
        has_branches = any(family in text for family in FAMILIES)
        found.append(read(name, text, of if has_branches else frozenset()))
    return found


@cache
def _texts(root: Path) -> list[tuple[str, str]]:
    """The package's files and all others that mention SGLang."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    texts = ((str(path.relative_to(root)), path.read_text("utf-8")) for path in paths)
    return [(name, t) for name, t in texts if name.startswith(PRODUCT) or MENTIONS.search(t)]


@cache
def read(name: str, text: str, of: frozenset[str]) -> Source:
    body = as_run(text, of)
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
            yield Use(str(node.value), place, node)


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
    target: str
    place: str
    takes: Parameters | None  # without `original`; None: not to be told
    is_async: bool
    relies_on: tuple[str, ...]  # files and lines of SGLang's


def hooks(source: Source) -> Iterator[Hook]:
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
            function = _function(given["function"], functions)
            yield Hook(
                _text(given["target"], constants),
                source.place(node),
                None if function is None else signature(function)[1:],
                isinstance(function, ast.AsyncFunctionDef),
                tuple(re.findall(r"[\w/]+\.py:\d+", ast.unparse(given.get("relies_on", node)))),
            )


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


def _function(node: ast.AST, functions: dict[str, Function]) -> Function | None:
    """A function by its name, or the one that a call of a function of the file returns."""
    if not isinstance(node, ast.Call):
        return functions.get(ast.unparse(node))
    outer = functions.get(_called(node))
    body = [] if outer is None else outer.body
    inner = {child.name: child for child in body if isinstance(child, Function)}
    returned = (each.value for each in body if isinstance(each, ast.Return))
    return next((inner.get(ast.unparse(value)) for value in returned if value), None)


def requirement_fields(source: Source) -> Iterator[Use]:
    """Fields of ServerArgs in `Requirement(field, ...)` records."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and _called(node) == "Requirement" and node.args:
            yield Use(_text(node.args[0], {}), source.place(node), node)


def attribute_reads(source: Source) -> Iterator[tuple[str, Use]]:
    """What is read or set of parameters that are annotated with a class of SGLang's."""
    for function in source.nodes:
        owners = dict(_annotated(function, source)) if isinstance(function, Function) else {}
        if owners:
            asked = (n for n in ast.walk(function) if isinstance(n, ast.Call))
            narrowed = {ast.unparse(n.args[0]) for n in asked if _called(n) == "isinstance"}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    owner = owners.get(node.value.id)
                    if owner is not None and node.value.id not in narrowed:
                        yield owner, Use(node.attr, source.place(node), node)


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


class Heir(NamedTuple):
    source: Source
    node: ast.ClassDef
    bases: list[str]  # SGLang's, those of our own bases too
    methods: dict[str, Function]


def heirs(sources: list[Source]) -> list[Heir]:
    """All of them; our classes are known by their names alone, which are no two times there."""
    classes = {
        node.name: (source, node)
        for source in sources
        for node in source.body.body
        if isinstance(node, ast.ClassDef)
    }

    def bases_of(name: str) -> Iterator[str]:
        source, node = classes[name]
        for base in node.bases:
            path, own = source.sglang_name(base), ast.unparse(base)
            if path is not None:
                yield path
            elif own in classes:
                yield from bases_of(own)

    found = []
    for source, node in classes.values():
        methods = {each.name: each for each in node.body if isinstance(each, Function)}
        if bases := list(bases_of(node.name)):
            found.append(Heir(source, node, bases, methods))
    return found


def super_calls(found: list[Heir]) -> Iterator[Use]:
    """`super().method(...)` in our classes with one base of SGLang's, where it is not ours."""
    own = {(heir.node.name, name) for heir in found for name in heir.methods}
    for heir in found:
        for call in ast.walk(heir.node) if len(heir.bases) == 1 else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super()."):
                name = ast.unparse(call.func).removeprefix("super().")
                if not any((ast.unparse(base), name) in own for base in heir.node.bases):
                    yield Use(f"{heir.bases[0]}.{name}", heir.source.place(call), call)
