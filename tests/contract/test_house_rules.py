"""Rules of CONTRIBUTING.md that a machine can check."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sglang_smc", "kernels", "patches", "tests", "bench")
# rglob does not follow the links sglang_smc/kernels and sglang_smc/patches, so no file comes twice.
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PURE = [path for path in FILES if path.parent.name in ("smc", "tokens")]
NO_SGLANG = [
    *PURE,
    ROOT / "sglang_smc" / "options" / "server.py",
    *(path for path in FILES if path.is_relative_to(ROOT / "kernels")),
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_lengths(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= 100, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", NO_SGLANG, ids=name_of)
def test_no_sglang_below_the_worker(path: Path) -> None:
    assert [name for name in imported(path) if name.partition(".")[0] == "sglang"] == []


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_mathematics_imports_only_mathematics(path: Path) -> None:
    ours = [name for name in imported(path) if name.startswith(("sglang_smc", ".."))]
    pure = "sglang_smc.smc", "sglang_smc.tokens"
    assert [name for name in ours if not name.startswith(pure)] == []
