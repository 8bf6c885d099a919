"""A release of SGLang as files: what a dotted name stands for, without importing anything."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "sglang"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One file."""

    name: str
    path: Path
    body: ast.AST


class Found(NamedTuple):
    """What a name stands for: a module's body, a definition, an assignment, or an import."""

    module: Module
    node: ast.AST

    @property
    def is_elsewhere(self) -> bool:
        """Whether it comes from another package, so that nothing is known of it."""
        return isinstance(self.node, ast.Import | ast.ImportFrom)


class Tree:
    """Args: root: the folder that holds `sglang/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._names: dict[str, dict[str, list[ast.AST]]] = {}

    def module(self, name: str) -> Module | None:
        """A module or package, read once; None where there is no such file."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            paths = [base.with_name(base.name + ".py"), base / "__init__.py"]
            path = next((path for path in paths if path.is_file()), None)
            if path is not None:
                self._modules[name] = Module(name, path, ast.parse(path.read_text("utf-8")))
            elif base.is_dir():  # a namespace package
                self._modules[name] = Module(name, base, ast.Module([], []))
            else:
                self._modules[name] = None
        return self._modules[name]

    def place(self, found: Found) -> str:
        """File and line, as one opens them."""
        path = found.module.path.relative_to(self.root)
        return f"{path}:{getattr(found.node, 'lineno', 1)}"

    def find(self, path: str) -> Found | None:
        """What a dotted name stands for; the nearest thing known, if that is another package's."""
        found: Found | None = None
        for name in path.split("."):
            found = self._root(name) if found is None else self.step(found, name)
            if found is None or found.is_elsewhere:
                return found
        return found

    def nearest(self, path: str) -> Found | None:
        """Of a name that is gone, the innermost thing around it that is there."""
        while path and (found := self.find(path)) is None:
            path = path.rpartition(".")[0]
        return found if path else None

    def step(self, found: Found, name: str) -> Found | None:
        """An attribute of a module or class."""
        if isinstance(found.node, ast.Module):
            return self.resolve(found.module, name)
        if isinstance(found.node, ast.ClassDef):
            return self.member(found, name)
        return None

    def _root(self, name: str) -> Found | None:
        module = self.module(name)
        return None if module is None else Found(module, module.body)

    def resolve(
        self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Found | None:
        """A name in a module: defined there, imported there (star imports too), or a submodule."""
        key = module.name, name
        if key in seen:
            return None
        names = self.names(module)
        for node in names.get(name, ()):
            found = self._follow(module, node, name, seen | {key})
            if found is not None:
                return found
        for star in names.get("*", ()):
            found = self._follow(module, star, name, seen | {key})
            if found is not None:
                return found
        inner = self.module(f"{module.name}.{name}")
        if inner is not None:
            return Found(inner, inner.body)
        lazy = names.get("__getattr__")
        return Found(module, ast.Import([])) if lazy else None

    def _follow(
        self, module: Module, node: ast.AST, name: str, seen: frozenset[tuple[str, str]]
    ) -> Found | None:
        if isinstance(node, ast.ImportFrom):
            source = absolute(node, module)
            alias = next((a.name for a in node.names if (a.asname or a.name) == name), name)
            if source.partition(".")[0] != PACKAGE:
                return None if node.names[0].name == "*" else Found(module, node)
            inner = self.module(source)
            return None if inner is None else self.resolve(inner, alias, seen)
        if isinstance(node, ast.Import):
            path = next((a.name for a in node.names if a.asname == name), name)
            return self.find(path) if path.partition(".")[0] == PACKAGE else Found(module, node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return self.resolve(module, node.value.id, seen) or Found(module, node)
        return Found(module, node)

    def names(self, module: Module) -> dict[str, list[ast.AST]]:
        """What binds each name of a module, definitions first; star imports under `*`."""
        if module.name not in self._names:
            bound: dict[str, list[ast.AST]] = {}
            for node in statements(module.body):
                for name in _bound(node):
                    bound.setdefault(name, []).append(node)
            for nodes in bound.values():
                nodes.sort(key=_rank)
            self._names[module.name] = bound
        return self._names[module.name]

    def bases(self, found: Found) -> Iterator[Found | None]:
        """The classes that a class names as its bases; None for what is not SGLang's."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            parent = self.evaluate(found.module, base)
            is_class = parent is not None and isinstance(parent.node, ast.ClassDef)
            yield parent if is_class else None

    def evaluate(self, module: Module, node: ast.AST) -> Found | None:
        """What `a.b.c` stands for in a module."""
        if isinstance(node, ast.Name):
            return self.resolve(module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.evaluate(module, node.value)
            return None if owner is None else self.step(owner, node.attr)
        return None

    def lineage(self, found: Found) -> list[Found]:
        """A class and those that it inherits from, the nearest first."""
        classes = [found]
        for base in self.bases(found):
            classes += [] if base is None else self.lineage(base)
        return list({owner.node: owner for owner in classes}.values())

    def member(self, found: Found, name: str) -> Found | None:
        """What a class or one it inherits from declares."""
        for owner in self.lineage(found):
            for node in statements(owner.node):
                if name in _bound(node):
                    return Found(owner.module, node)
        return None


def absolute(node: ast.ImportFrom, module: Module) -> str:
    """The module that `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    is_package = module.path.name == "__init__.py"
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a module or class, also under `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With | ast.For | ast.While | ast.ExceptHandler):
            yield from statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = (name for target in targets for name in ast.walk(target))
        yield from (n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _rank(node: ast.AST) -> int:
    if isinstance(node, Function | ast.ClassDef):
        return 0
    return 1 if isinstance(node, ast.Import | ast.ImportFrom) else 2
