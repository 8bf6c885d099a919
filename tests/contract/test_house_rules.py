"""Rules of CONTRIBUTING.md that a machine can check."""

import ast
from collections.abc import Iterator
from pathlib import Path

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


MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 100


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_files_and_functions_are_short() -> None:
    long: list[str] = []
    for path in FILES:
        text = path.read_text()
        if (lines := len(text.splitlines())) > MOST_LINES:
            long.append(f"{name_of(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{name_of(path)}: {node.name} has {lines} lines")
    assert not long


def test_no_sglang_below_the_worker() -> None:
    leaning = {
        name_of(path): found
        for path in NO_SGLANG
        if (found := [name for name in imported(path) if name.partition(".")[0] == "sglang"])
    }
    assert not leaning


def test_mathematics_imports_only_mathematics() -> None:
    pure = "sglang_smc.smc", "sglang_smc.tokens"
    leaning = {
        name_of(path): found
        for path in PURE
        if (
            found := [
                name
                for name in imported(path)
                if name.startswith(("sglang_smc", "..")) and not name.startswith(pure)
            ]
        )
    }
    assert not leaning
