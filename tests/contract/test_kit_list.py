"""Each test of SGLang's kits runs on an SMC server, or docs/test-kits.md says why not."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang.test.kits

from sglang_smc.upstream import IS_NEWEST

pytestmark = pytest.mark.skipif(
    not IS_NEWEST, reason="docs/test-kits.md lists the kits of SGLang 0.5.23; older ones differ"
)
KITS = Path(next(iter(sglang.test.kits.__path__)))
DOCS = Path(__file__).parents[2] / "docs" / "test-kits.md"
#: Where kits are put to use.
MODULES = ("kits.test_kits",)
ROW = re.compile(r"^\| `(?P<kit>\w+)` \| (?P<tests>.*?) \| (?P<note>.*?) \|$", re.M)


def kit_tests() -> set[str]:
    """`kit.Class.test` of all that is installed; `kit` alone where there is no such class."""
    found = set()
    for path in KITS.glob("*.py"):
        tests = {f"{path.stem}.{name}" for name in methods_of(ast.parse(path.read_text()))}
        found |= tests or {path.stem}
    return found | {path.name for path in KITS.iterdir() if path.is_dir() and path.name[0] != "_"}


def methods_of(module: ast.Module) -> Iterator[str]:
    for owner in module.body:
        if isinstance(owner, ast.ClassDef):
            for member in owner.body:
                if isinstance(member, ast.FunctionDef) and member.name.startswith("test_"):
                    yield f"{owner.name}.{member.name}"


def run_tests() -> set[str]:
    """What our classes inherit from kits and have not switched off, and the kits of functions."""
    found = set()
    for module in map(importlib.import_module, MODULES):
        found |= {name for name in kit_tests() if "." not in name and hasattr(module, name)}
        for case in vars(module).values():
            if isinstance(case, type) and case.__module__ == module.__name__:
                found |= set(inherited(case))
    return found


def inherited(case: type) -> Iterator[str]:
    for owner in case.__mro__:
        package, _, kit = owner.__module__.rpartition(".")
        if package == "sglang.test.kits":
            names = [name for name in vars(owner) if name.startswith("test_")]
            yield from (f"{kit}.{owner.__name__}.{name}" for name in names if getattr(case, name))


def listed(heading: str) -> set[str]:
    """The tests in the rows below a heading; a class stands for all of its tests."""
    section = DOCS.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = set()
    for row in ROW.finditer(section):
        assert row["note"], f"{row['kit']}: no word on why or how"
        names = re.findall(r"`([\w.]+)`", row["tests"])
        wanted = {f"{row['kit']}.{name}" for name in names} or {row["kit"]}
        for name in wanted:
            some = {test for test in kit_tests() if f"{test}.".startswith(f"{name}.")}
            assert some, f"no kit has {name}"
            found |= some
    return found


def test_every_kit_test_runs_or_is_listed_with_a_reason() -> None:
    assert listed("Not run") == kit_tests() - run_tests()


def test_what_is_said_to_run_runs() -> None:
    assert listed("Run") == run_tests()
