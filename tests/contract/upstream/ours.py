"""What our own files ask of SGLang, read from their source: imports, calls, hooks, attributes."""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from contract.upstream.release import FAMILIES, ROOT
from contract.upstream.sglang import PACKAGE, Function

#: The packages, and the benchmarks' own plugin, which has hooks too.
PRODUCT = ("sglang_smc", "patches", "tools/sglang_smc_tools", "bench/baselines")
FOLDERS = ("sglang_smc", "patches", "kernels", "tools", "tests", "bench", "examples")


class Use(NamedTuple):
    path: str
    place: str
    node: Any


class Source(NamedTuple):
    """A file of ours as it runs on a release."""

    path: str
    body: ast.Module
    nodes: list[ast.AST]  # all of them
    imported: dict[str, str]  # SGLang's names, by those under which they were imported

    @property
    def is_product(self) -> bool:
        """Whether it is part of a package, not a benchmark or a test."""
        return self.path.startswith(PRODUCT)

    def use(self, path: str, node: Any) -> Use:
        return Use(path, f"{self.path}:{node.lineno}", node)

    def sglang_name(self, node: ast.AST) -> str | None:
        """The SGLang name that `a.b.c` stands for, if any."""
        if isinstance(node, ast.Attribute):
            owner = self.sglang_name(node.value)
            return owner and f"{owner}.{node.attr}"
        return self.imported.get(node.id) if isinstance(node, ast.Name) else None


def sources(of: frozenset[str], root: Path = ROOT) -> list[Source]:
    """The package's files and all others that mention SGLang, each once."""
    every = frozenset(FAMILIES)  # most files run alike on all, and are read once
    has_branches = re.compile("|".join(FAMILIES)).search
    return [read(name, text, of if has_branches(text) else every) for name, text in _texts(root)]


@cache
def _texts(root: Path) -> list[tuple[str, str]]:
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    texts = ((str(path.relative_to(root)), path.read_text("utf-8")) for path in paths)
    return [(n, t) for n, t in texts if n.startswith(PRODUCT) or re.search(r"\bsglang\b", t)]


@cache
def read(name: str, text: str, of: frozenset[str]) -> Source:
    """A file as it runs on a release of some families."""
    body = ast.parse(text)
    keep_taken(body, of)
    nodes = list(ast.walk(body))
    imported = {}
    for node in nodes:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            path = f"{_module(node)}{alias.name}"
            if isinstance(node, ast.Import) and not alias.asname and _is_sglang(path):
                imported[PACKAGE] = PACKAGE
            elif _is_sglang(path):
                imported[alias.asname or alias.name] = path
    return Source(name, body, nodes, imported)


def _module(node: ast.Import | ast.ImportFrom) -> str:
    """What stands before the names of an import."""
    return f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""


def _is_sglang(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


def keep_taken(node: ast.AST, of: frozenset[str]) -> None:
    """Leave of a file what runs on a release of some families.

    Of a branch on a release the one that is taken stays, and of records that name a family, as
    `@PATCHES.on(...)` and `Requirement(...)` may, those that are for this release.
    """
    for name, value in ast.iter_fields(node):
        setattr(node, name, list(_taken(value, of)) if isinstance(value, list) else value)
        if isinstance(value, ast.IfExp):
            setattr(node, name, *_taken([value], of))
    for child in ast.iter_child_nodes(node):
        keep_taken(child, of)


def _taken(block: list[Any], of: frozenset[str]) -> Iterator[Any]:
    """What of a block runs, or of a list is made: a taken branch stands in its place."""
    for each in block:
        inner = [each]
        if isinstance(each, ast.If | ast.IfExp) and (known := _truth(each.test, of)) is not None:
            branch = each.body if known else each.orelse
            inner = list(_taken(branch if isinstance(branch, list) else [branch], of))
        yield from (one for one in inner if not (isinstance(one, ast.Call) and _is_other(one, of)))
        if inner and _leaves(inner[-1]):
            return


def _truth(test: ast.expr, of: frozenset[str]) -> bool | None:
    """Whether a condition holds; None where the release does not tell."""
    text = ast.unparse(test)
    if not any(name in text for name in FAMILIES):
        return None
    known = {f"IS_{name}": name in of for name in FAMILIES}
    known |= {name: SimpleNamespace(is_installed=name in of) for name in FAMILIES}
    try:
        return bool(eval(text, {"upstream": SimpleNamespace(**known)}, known))
    except NameError:  # it depends on something else, too
        return None


def _is_other(record: ast.Call, of: frozenset[str]) -> bool:
    given = [*record.args, *(keyword.value for keyword in record.keywords)]
    return any(ast.unparse(v).rpartition(".")[2] in {*FAMILIES} - of for v in given)


def _leaves(statement: ast.AST) -> bool:
    """Whether nothing behind a statement runs; a test may skip itself, or its module."""
    skips = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("pytest.skip(")
    return skips or isinstance(statement, ast.Return | ast.Raise)


def names(source: Source) -> Iterator[Use]:
    """Names that are imported, that stand in strings, or that are reached through a module."""
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = (f"{_module(node)}{alias.name}" for alias in node.names)
            yield from (source.use(path, node) for path in paths if _is_sglang(path))
        elif isinstance(node, ast.Attribute) and (path := source.sglang_name(node)):
            yield source.use(path, node)
        elif isinstance(node, ast.Constant) and _is_path(node.value):
            yield source.use(str(node.value), node)


def _is_path(value: object) -> bool:
    """Whether a string is a dotted name, of a module at least: as hooks and test doubles have."""
    return isinstance(value, str) and bool(re.fullmatch(rf"{PACKAGE}(\.[^\W\d]\w*){{2,}}", value))


def calls(source: Source) -> Iterator[Use]:
    """Calls of SGLang's functions and classes, by the names under which they were imported."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and (path := source.sglang_name(node.func)):
            yield source.use(path, node)


class Hook(NamedTuple):
    target: str
    place: str
    function: Any  # its syntax; None: not to be told
    relies_on: tuple[str, ...]  # files and lines of SGLang's


def hooks(source: Source) -> Iterator[Hook]:
    """What `@PATCHES.on(target, *lines, ...)` records, of functions and of anything else."""
    constants: dict[str, Any] = {}
    for node in source.body.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp):
            with suppress(NameError):  # texts and their sums name nothing but each other
                exec(ast.unparse(node), constants)
    functions = {id(d): f for f in _functions(source.body).values() for d in f.decorator_list}
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PATCHES.on":
            target, *lines = (eval(ast.unparse(argument), constants) for argument in node.args)
            relies_on = re.findall(r"[\w/]+\.py:\d+", " ".join(lines))
            place = source.use("", node).place
            yield Hook(target, place, functions.get(id(node)), tuple(relies_on))


def _functions(node: Any) -> dict[str, Any]:
    return {each.name: each for each in node.body if isinstance(each, Function)}


def attribute_reads(source: Source) -> Iterator[tuple[str, Use]]:
    """What is read or set of parameters that are annotated with a class of SGLang's."""
    for function in source.nodes:
        owners = dict(_annotated(function, source)) if isinstance(function, Function) else {}
        nodes = list(ast.walk(function)) if owners else []
        for call in nodes:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance":
                owners.pop(ast.unparse(call.args[0]), None)  # it may be of another class
        for node in (each for each in nodes if isinstance(each, ast.Attribute)):
            if isinstance(node.value, ast.Name) and node.value.id in owners:
                yield owners[node.value.id], source.use(node.attr, node)


def _annotated(function: Any, source: Source) -> Iterator[tuple[str, str]]:
    """Parameters of `X`, `"X"` and `X | None`, with SGLang's class; `list[X]` has others."""
    args = function.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        text = "" if arg.annotation is None else ast.unparse(arg.annotation).replace("'", "")
        kinds = [kind for kind in text.split(" | ") if re.fullmatch(r"[\w.]+", kind)]
        paths = {source.sglang_name(ast.parse(kind, mode="eval").body) for kind in kinds} - {None}
        if len(paths) == 1:
            yield arg.arg, str(paths.pop())


class Heir(NamedTuple):
    source: Source
    node: ast.ClassDef
    bases: list[str]  # SGLang's, those of our own bases too
    methods: dict[str, Any]


def heirs(sources: list[Source]) -> list[Heir]:
    """All of them; our classes are known by their names alone, which are no two times there."""
    tops = ((source, node) for source in sources for node in source.body.body)
    classes = {node.name: (s, node) for s, node in tops if isinstance(node, ast.ClassDef)}

    def bases_of(name: str) -> Iterator[str]:
        source, node = classes[name]
        for base in node.bases:
            if path := source.sglang_name(base):
                yield path
            elif ast.unparse(base) in classes:
                yield from bases_of(ast.unparse(base))

    found = (Heir(s, n, list(bases_of(n.name)), _functions(n)) for s, n in classes.values())
    return [heir for heir in found if heir.bases]


def super_calls(found: list[Heir]) -> Iterator[Use]:
    """`super().method(...)` in our classes with one base of SGLang's, where it is not ours."""
    own = {(heir.node.name, name) for heir in found for name in heir.methods}
    for heir in found:
        for call in ast.walk(heir.node) if len(heir.bases) == 1 else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super()."):
                name = ast.unparse(call.func).removeprefix("super().")
                if not any((ast.unparse(base), name) in own for base in heir.node.bases):
                    yield heir.source.use(f"{heir.bases[0]}.{name}", call)
