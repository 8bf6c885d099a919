"""How far a reader has to go: measures of the package as a whole, for a test and for people.

    python tests/house_measures.py      prints them

Files that one default round changes between, types that its functions name, what the worker
imports, what mentions a grammar.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sglang_smc"
OWN = ("sglang_smc", "kernels", "patches")  # folders of the package


class Measures(NamedTuple):
    """What is counted; the first two over one round of mode smc with K = 3, by its calls."""

    file_changes: int  # calls whose function stands in another file than the one called before
    types: tuple[str, ...]  # of the package, that the called functions name
    worker_imports: tuple[str, ...]  # modules of the package
    grammar_files: tuple[str, ...]  # of the package and its hooks


def measured() -> Measures:
    codes = calls_of_a_round()
    files = [code.co_filename for code in codes]
    return Measures(
        file_changes=sum(here != there for here, there in pairwise(files)),
        types=tuple(sorted(types_named(set(codes)))),
        worker_imports=tuple(sorted(set(own_imports(PACKAGE / "worker.py")))),
        grammar_files=tuple(sorted(mentions("grammar"))),
    )


def sources() -> Iterator[Path]:
    """The package's files and its hooks; kernels and hooks are linked into it."""
    for folder in OWN:
        yield from sorted((ROOT / folder).rglob("*.py"))


def own_imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports as it is loaded or for its types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_smc"):
            for alias in node.names:
                inner = (ROOT / f"{node.module}.{alias.name}".replace(".", "/")).with_suffix(".py")
                yield f"{node.module}.{alias.name}" if inner.exists() else node.module or ""


def mentions(word: str) -> Iterator[str]:
    for path in sources():
        if word in path.read_text().lower():
            yield str(path.relative_to(ROOT))


def calls_of_a_round() -> list[CodeType]:
    """The functions of the package that one default round of two requests calls, in order."""
    from toy_laws import EOS, languages
    from toy_worker import ToyWorker

    from sglang_smc.options.server import SMCConfig
    from sglang_smc.round.batch import RoundInputs, shape_of

    config = SMCConfig(num_particles=8, num_steps=3)
    toy = ToyWorker(config, *languages(), num_requests=2, max_new_tokens=60, eos=EOS)
    reqs: Any = toy.begin([1, 2])
    toy.reserve(reqs)
    inputs, shape = RoundInputs.of(toy.batch(reqs), toy.device), shape_of(reqs)
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_own(frame.f_code):
            calls.append(frame.f_code)

    sys.setprofile(note)
    try:
        toy.worker._round.play(inputs, shape, reqs)
    finally:
        sys.setprofile(None)
    return calls


def _is_own(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return any(path.is_relative_to(ROOT / folder) for folder in OWN)


def types_named(codes: set[CodeType]) -> set[str]:
    """Classes of the package that functions name, in signatures and in code."""
    called = {(code.co_filename, code.co_firstlineno) for code in codes}
    classes, named = set(), set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if (str(path), first) in called:
                    named |= set(_names(node))
    return classes & named


def _names(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr


def main() -> None:
    found = measured()
    for name, value in found._asdict().items():
        shown = value if isinstance(value, int) else f"{len(value)}: {', '.join(value)}"
        print(f"{name:15} {shown}")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    main()
