"""Which releases there are, where the source of one is, and our files as they run on it.

`sglang_smc/upstream.py` alone knows releases: its `SUPPORTED`, `IS_NEWER` and `IS_NEWEST` are read
here, and code behind these names counts only on the releases where Python would come to it.
"""

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = Path("sglang_smc", "upstream.py")
FAMILIES = ("OLDER", "NEWER", "NEWEST")

# Of the wheels of a release always the same one, on whatever machine this runs.
_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"),
    *("--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
)


class NoWheelError(Exception):
    """A release that is not to be had; says what to do."""


def version_of(root: Path) -> str:
    """The version of the SGLang that stands below a folder; a checkout never built tells none."""
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


def families(version: str, root: Path = ROOT) -> frozenset[str]:
    """Which of `FAMILIES` a release is of, by the expressions of `upstream.py`."""
    newer, newest = (_holds(name, version, root) for name in ("IS_NEWER", "IS_NEWEST"))
    of = {"OLDER": not newer, "NEWER": newer, "NEWEST": newest}
    return frozenset(name for name, is_of in of.items() if is_of)


def _holds(name: str, version: str, root: Path) -> bool:
    value = _assigned(root / UPSTREAM, name)
    if value is None:
        return False
    code = compile(ast.Expression(value), str(UPSTREAM), "eval")
    names = {"version": SimpleNamespace(__version__=version), "Version": _numbers}
    return bool(eval(code, names))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("."))


def _assigned(path: Path, name: str) -> ast.expr | None:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return node.value
    return None


def root_of(name: str) -> Path:
    """The folder that holds a release's `sglang/`: given, installed, or else an unpacked wheel."""
    if Path(name, "sglang").is_dir():
        return Path(name)
    present = installed()
    if present is not None and version_of(present) == name:
        return present
    return unpacked(name)


def installed() -> Path | None:
    """The folder that holds this interpreter's SGLang, which is not imported."""
    spec = find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def unpacked(version: str) -> Path:
    """The folder that holds a release's `sglang/`, downloaded the first time, or NoWheelError."""
    folder = cache() / version
    if not folder.is_dir():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            print(f"downloading sglang {version} (20 to 40 MB) to {folder}", file=sys.stderr)
            whole = Path(scratch, "whole")  # what is interrupted leaves no half of a release
            with zipfile.ZipFile(_download(version, Path(scratch))) as wheel:
                names = [n for n in wheel.namelist() if n.startswith("sglang/")]
                wheel.extractall(whole, [name for name in names if name.endswith(".py")])
            whole.rename(folder)
    return folder


def cache() -> Path:
    """Outside the project: the user's, as the system has it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "sglang-smc", "upstream")


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, "--dest", str(folder)]
    done = subprocess.run([*command, f"sglang=={version}"], stdout=sys.stderr)
    if done.returncode:
        raise NoWheelError(
            f"pip could not download sglang=={version}. Is there such a release, and a network? "
            f"A wheel that is unpacked in {cache() / version} will do as well."
        )
    return next(folder.glob("*.whl"))


def as_run(text: str, of: frozenset[str]) -> ast.Module:
    """A file of ours as it runs on a release of some families.

    Of a branch on a release the one that is taken stays, and of records that name a family, as
    `Patch(...)` and `Requirement(...)` may, those that are for this release.
    """
    body = ast.parse(text)
    return _Branches(of).visit(body) if any(name in text for name in FAMILIES) else body


class _Branches(ast.NodeTransformer):
    def __init__(self, of: frozenset[str]) -> None:
        self._others = set(FAMILIES) - of
        self._values = {f"{name}.is_installed": name in of for name in FAMILIES}
        self._values |= {f"IS_{name}": name in of for name in ("NEWER", "NEWEST")}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                ends = [i for i, statement in enumerate(block) if _leaves(statement)]
                taken = block[: ends[0] + 1] if ends else block
                setattr(node, name, taken or ([ast.Pass()] if name == "body" else []))
        if isinstance(node, ast.Tuple | ast.List):
            node.elts = [element for element in node.elts if not self._is_for_other(element)]
        return node

    def visit_If(self, node: ast.If) -> Any:
        known = self._truth(node.test)
        if known is None:
            return self.generic_visit(node)
        visited = [self.visit(statement) for statement in (node.body if known else node.orelse)]
        each = (v if isinstance(v, list) else [v] for v in visited)
        return [statement for statements in each for statement in statements]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        known = self._truth(node.test)
        if known is None:
            return self.generic_visit(node)
        return self.visit(node.body if known else node.orelse)

    def _is_for_other(self, node: ast.expr) -> bool:
        given = (
            [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
        )
        return any(ast.unparse(value).rpartition(".")[2] in self._others for value in given)

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


def _leaves(statement: ast.stmt) -> bool:
    """Whether nothing behind a statement runs; a test may skip itself, or its module."""
    skips = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("pytest.skip(")
    return skips or isinstance(statement, ast.Return | ast.Raise)
