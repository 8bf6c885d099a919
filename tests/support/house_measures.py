"""Measure how far a reader has to go, and how much there is, for a test and for people.

python tests/support/house_measures.py      prints the measures
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_smc"
TOOLS = ROOT / "tools" / "sglang_smc_tools"
OWN = ("sglang_smc", "kernels", "patches")  # folders of the plugin


def measured() -> dict[str, int | list[str]]:
    """The first three are of one round of mode smc with K = 3, by its calls."""
    from sglang_smc.round.batch import RoundShape

    codes = calls_of_a_round()
    shape = RoundShape.__annotations__
    files = [code.co_filename for code in codes]
    functions = list(functions_of(set(codes)))
    package = lines_in("sglang_smc")
    beside = sum(lines_in(f"sglang_smc/{room}") for room in ("command", "cpu", "guard"))
    return {
        "round_lines": sum((one.end_lineno or 0) - one.lineno + 1 for one in functions),
        # Calls whose function stands in another file than the one called before.
        "file_changes": sum(here != there for here, there in pairwise(files)),
        "types": sorted(types_named(functions)),
        "shape_fields": len(shape),
        "shape_booleans": list(shape.values()).count(bool),
        "wide_functions": wide_functions(),
        "worker_imports": sorted(set(own_imports(PACKAGE / "worker.py"))),
        "grammar_files": [
            str(path.relative_to(ROOT))
            for path in sources()
            if "grammar" in path.read_text().lower()
        ],
        "package_lines": package,
        "core_lines": package - beside,
        "kernel_and_hook_lines": lines_in("kernels") + lines_in("patches"),
        "tools_lines": lines_in("tools/sglang_smc_tools"),
        "bench_lines": lines_in("bench"),
        "test_lines": lines_in("tests"),
        "tools_test_lines": lines_in("tools/tests"),
        "glossary": glossary(),
    }


def lines_in(folder: str) -> int:
    """Count lines of Python, links not followed."""
    files = (path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())
    return sum(len(path.read_text().splitlines()) for path in files)


def glossary() -> list[str]:
    """Return the words that docs/words.md explains."""
    return re.findall(r"^### (.*)", (ROOT / "docs" / "words.md").read_text(), re.M)


def sources() -> Iterator[Path]:
    """The files of both packages; kernels and hooks are linked into the plugin's."""
    for folder in (*OWN, TOOLS):
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def own_imports(path: Path) -> Iterator[str]:
    """Modules of both packages that a file imports, as it is loaded or later or for its types."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_smc"):
            for alias in node.names:
                above = TOOLS.parent if (node.module or "").startswith(TOOLS.name) else ROOT
                inner = (above / f"{node.module}.{alias.name}".replace(".", "/")).with_suffix(".py")
                yield f"{node.module}.{alias.name}" if inner.exists() else node.module or ""


def calls_of_a_round() -> list[CodeType]:
    """The functions of the package that one default round of two requests calls, in order."""
    from toy_laws import toy

    from sglang_smc.ops import TORCH
    from sglang_smc.round.batch import RoundInputs, shape_of

    own = toy(2, limit=60, num_particles=8, num_steps=3, ops=TORCH)
    reqs: Any = own.begin([1, 2])
    own.reserve(reqs)
    inputs = RoundInputs.of(own.batch(reqs), own.device)
    shape = shape_of(reqs)
    calls: list[CodeType] = []
    folders = tuple(f"{ROOT / folder}/" for folder in OWN)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            calls.append(frame.f_code)

    sys.setprofile(note)
    try:
        own.worker._round.play(inputs, shape, reqs)
    finally:
        sys.setprofile(None)
    return calls


def functions_of(codes: set[CodeType]) -> Iterator[ast.FunctionDef]:
    called = {(code.co_filename, code.co_firstlineno) for code in codes}
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if (str(path), first) in called:
                    yield node


def wide_functions() -> list[str]:
    """Functions of eight parameters or more, beside self and cls."""
    nodes = (node for path in sources() for node in ast.walk(tree_of(path)))
    every = (one for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    each = ((one.name, [*(of := one.args).posonlyargs, *of.args, *of.kwonlyargs]) for one in every)
    return [name for name, args in each if len({a.arg for a in args} - {"self", "cls"}) >= 8]


def packed_assignments(paths: Iterable[Path]) -> list[str]:
    """Return assignments of several values to several names, `a, b = x, y`, but for swaps."""
    found = []
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                packed = [target for target in node.targets if isinstance(target, ast.Tuple)]
                values = sorted(map(ast.unparse, node.value.elts))
                if any(sorted(map(ast.unparse, target.elts)) != values for target in packed):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(f"{place} {ast.unparse(node)}")
    return found


def functions_of_many_names(most: int) -> list[str]:
    """Return functions with more local names, those of nested functions among them."""
    found = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (one for one in ast.walk(node) if isinstance(one, ast.Name))
                names = {one.id for one in inner if isinstance(one.ctx, ast.Store)}
                if len(names) > most:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(f"{place} {node.name}: {len(names)}")
    return found


def types_named(functions: list[ast.FunctionDef]) -> set[str]:
    """Return classes of the package that functions name, in signatures and in code."""
    nodes = (node for path in sources() for node in ast.walk(tree_of(path)))
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    named = [node for function in functions for node in ast.walk(function)]
    names = {node.id for node in named if isinstance(node, ast.Name)}
    return classes & (names | {node.attr for node in named if isinstance(node, ast.Attribute)})


def main() -> None:
    for name, value in measured().items():
        shown = value if isinstance(value, int) else f"{len(value)}: {', '.join(value)}"
        print(f"{name:22} {shown}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
