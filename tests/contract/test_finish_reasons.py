"""Which records of an abort SGLang makes: they have different keys, and all reach our routes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.upstream import release
from finish_reasons import PRODUCERS

from sglang_smc import upstream

MANAGERS = "srt.managers."
#: These make none that our hooks see: a frontend that SMC does not start, and entries of a log.
ELSEWHERE = ("srt.rust_server.server.", "srt.observability.trace_async.")

Made = tuple[str, frozenset[str]]  # the function, and the keys of a record


def aborts_made(root: Path) -> Iterator[Made]:
    """Yield the dictionary displays of a package whose type is an abort."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8")
        if '"abort"' in text:
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            yield from _made_in(ast.parse(text), name)


def _made_in(node: ast.AST, name: str) -> Iterator[Made]:
    for inner in ast.iter_child_nodes(node):
        is_named = isinstance(inner, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(inner, ast.Dict):
            record = {
                key.value: value
                for key, value in zip(inner.keys, inner.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            kind = record.get("type")
            if isinstance(kind, ast.Constant) and kind.value == "abort":
                yield name, frozenset(map(str, record))
        yield from _made_in(inner, f"{name}.{inner.name}" if is_named else name)


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="the records are those of the newest release")
def test_each_producer_of_aborts_is_known() -> None:
    """Red where SGLang makes one elsewhere, or with other keys: see how our routes read it."""
    root = release.installed()
    assert root is not None
    found = {made for made in aborts_made(root / "sglang" / "srt") if is_seen(made)}
    known = {(MANAGERS + name, frozenset(record)) for name, record in PRODUCERS.items()}
    assert found == known


def is_seen(made: Made) -> bool:
    return not made[0].startswith(ELSEWHERE)
