"""Which release a folder holds, which are supported, and what of our files runs on it.

`sglang_smc/upstream.py` alone knows releases: its `SUPPORTED`, `IS_NEWER` and `IS_NEWEST` are read
here, and code behind these names counts only on the releases where Python would come to it.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = Path("sglang_smc", "upstream.py")

OLDER, NEWER, NEWEST = "OLDER", "NEWER", "NEWEST"


def version_of(root: Path) -> str:
    """The version of the SGLang that stands below a folder.

    Raises:
        SystemExit: where nothing tells it, as in a checkout that was never built.
    """
    path = root / "sglang" / "_version.py"
    value = _assigned(path, "__version__") if path.is_file() else None
    if value is None:
        raise SystemExit(f"{path} does not say which release this is; a wheel or a build has it")
    return str(ast.literal_eval(value)).partition("+")[0]


def supported(root: Path = ROOT) -> tuple[str, ...]:
    """The releases that this package runs on, oldest first."""
    value = _assigned(root / UPSTREAM, "SUPPORTED")
    assert value is not None, f"{UPSTREAM} has SUPPORTED"
    return ast.literal_eval(value)


def is_newer(version: str, root: Path = ROOT) -> bool:
    """What `IS_NEWER` is on a release, by its own expression."""
    return _holds("IS_NEWER", version, root)


def is_newest(version: str, root: Path = ROOT) -> bool:
    """What `IS_NEWEST` is on a release, by its own expression."""
    return _holds("IS_NEWEST", version, root)


def _holds(name: str, version: str, root: Path) -> bool:
    value = _assigned(root / UPSTREAM, name)
    assert value is not None, f"{UPSTREAM} has {name}"
    code = compile(ast.Expression(value), str(UPSTREAM), "eval")
    names = {"version": SimpleNamespace(__version__=version), "Version": _numbers}
    return bool(eval(code, names))


def installed() -> Path | None:
    """The folder that holds this interpreter's SGLang, which is not imported."""
    spec = find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("."))


def _assigned(path: Path, name: str) -> ast.expr | None:
    """The value of a module's variable."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return node.value
    return None


def as_run(text: str, newer: bool, newest: bool = False) -> ast.Module:
    """A file of ours as it runs: of a branch on `IS_NEWER` the one that is taken, and of records
    that name a `Family`, as `Patch(...)` and `Requirement(...)` may, those that are for this one.
    """
    body = ast.parse(text)
    known = any(name in text for name in (OLDER, NEWER, NEWEST))
    return _Branches(newer, newest).visit(body) if known else body


def _leaves(statement: ast.stmt) -> bool:
    """Whether nothing behind a statement runs; a test may skip itself, or its module."""
    skips = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("pytest.skip(")
    return skips or isinstance(statement, ast.Return | ast.Raise)


class _Branches(ast.NodeTransformer):
    def __init__(self, newer: bool, newest: bool) -> None:
        families = {OLDER: not newer, NEWER: newer, NEWEST: newest}
        self._others = {name for name, is_installed in families.items() if not is_installed}
        self._values = {
            "IS_NEWER": newer,
            "IS_NEWEST": newest,
            **{f"{name}.is_installed": value for name, value in families.items()},
        }

    def generic_visit(self, node: ast.AST) -> Any:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                taken = self._taken(value)
                setattr(node, name, taken or ([ast.Pass()] if name == "body" else []))
            elif isinstance(node, ast.Tuple | ast.List) and name == "elts":
                node.elts = [element for element in node.elts if not self._is_for_other(element)]
        return super().generic_visit(node)

    def _is_for_other(self, node: ast.expr) -> bool:
        """Whether it is a record of a family that this release is not of."""
        if not isinstance(node, ast.Call):
            return False
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        return any(ast.unparse(value).rpartition(".")[2] in self._others for value in given)

    def _taken(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Statements without the branches that are not taken, nor what is behind a return."""
        kept: list[ast.stmt] = []
        for statement in statements:
            known = self._truth(statement.test) if isinstance(statement, ast.If) else None
            if not isinstance(statement, ast.If) or known is None:
                kept.append(statement)
                continue
            kept += self._taken(statement.body if known else statement.orelse)
            if kept and _leaves(kept[-1]):
                break
        return kept

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        known = self._truth(node.test)
        if known is None:
            return self.generic_visit(node)
        return self.visit(node.body if known else node.orelse)

    def _truth(self, test: ast.expr) -> bool | None:
        """Whether a condition holds; None where the release does not tell."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            each = [self._truth(value) for value in test.values]
            decides = isinstance(test.op, ast.Or)  # `or` ends with what is true, `and` with false
            if decides in each:
                return decides
            return None if None in each else not decides
        return self._values.get(ast.unparse(test).removeprefix("upstream."))
