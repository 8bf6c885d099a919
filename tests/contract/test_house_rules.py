"""Rules of CONTRIBUTING.md that a machine can check, and how far a reader has to go."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from house_measures import (
    PACKAGE,
    ROOT,
    TOOLS,
    functions_of_many_names,
    measured,
    own_imports,
    packed_assignments,
    sources,
    tree_of,
)

# From the ground up; folders of one level import none of each other.
LEVELS = (
    "dtype operator_code printable upstream, potentials, smc, library options, drafts, "
    "guard models, kv, ops, state, process, rules, proposers, round, worker, server, cpu, patches, "
    "plugin, command"
)
# Rooms of the other package, which the plugin never imports: of the plugin they import settings,
# arithmetic, records and what commands share.
APART = (
    *(
        "tools.commands",
        "tools.convert",
        "tools.demo",
        "tools.distill",
        "tools.pair",
        "tools.plan",
        "tools.published",
        "tools.real",
    ),
    *("tools.speculators_format", "tools.testing", "tools.view", "tools.watch"),
)
KNOWN = {"dtype", "printable", "drafts", "options", "kv", "state", "potentials", "command"}
#: They judge a pair by SGLang's and the server's own rules.
JUDGES = {
    "tools.pair_check": {"models", "cpu"},
    "tools.start_check": {"upstream", "models", "server"},
}
KERNELS = "kernels"  # between the mathematics and `ops`, which alone imports them
MAY: dict[str, set[str]] = {"smc": set(), KERNELS: {"smc"}}

MOST_MODULES = 17
MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 100
MOST_LOCAL_NAMES = 25
#: Assignments `a, b = x, y` of unrelated values in 1,000 lines.
MOST_PACKED = 3.0


def room_of(module: str) -> str:
    """Return `round` of `sglang_smc.round.play`, `tools.plan` of `sglang_smc_tools.plan.cli`."""
    package, _, inner = module.partition(".")
    room = inner.partition(".")[0]
    return f"tools.{room}" if package == TOOLS.name else room


def module_of(path: Path) -> str:
    inner = path.relative_to(TOOLS.parent if TOOLS in path.parents else ROOT).with_suffix("")
    parts = inner.parts if inner.parts[0].startswith("sglang_smc") else ("sglang_smc", *inner.parts)
    return ".".join(parts).removesuffix(".__init__")


SOURCES = list(sources())
IMPORTS = {path: set(own_imports(path)) for path in SOURCES}
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS.split(", ")) for room in rooms.split()}


def test_files_and_functions_are_short() -> None:
    folders = ("tests", "bench", "tools/tests")
    others = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    long: list[str] = []
    for path in [*SOURCES, *others]:
        text = path.read_text()
        if (lines := len(text.splitlines())) > MOST_LINES:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long


def test_a_function_has_few_local_names() -> None:
    assert functions_of_many_names(MOST_LOCAL_NAMES) == []


@pytest.mark.parametrize("room", ["", "bench", "tests", "tools/tests", "examples"])
def test_one_statement_assigns_one_value(room: str) -> None:
    """Swaps and the unpacking of one value are none of these; "" is both packages."""
    paths = [*(ROOT / room).rglob("*.py")] if room else SOURCES
    found = packed_assignments(paths)
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    assert 1000 * len(found) / lines <= MOST_PACKED, "\n".join(found)


def test_a_name_of_a_class_means_one_thing() -> None:
    """Searched for, it is found once; benchmarks count, private classes do not."""
    found: dict[str, list[Path]] = {}
    for path in [*SOURCES, *(ROOT / "bench").rglob("*.py")]:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.relative_to(ROOT))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_sglang_below_the_worker() -> None:
    pure = [*(PACKAGE / "smc").rglob("*.py")]
    pure += [PACKAGE / "options" / "server.py", *(ROOT / "kernels").rglob("*.py")]
    leans = re.compile(r"^\s*(import|from) sglang\b", re.M)
    assert [path for path in pure if leans.search(path.read_text())] == []


def test_the_mathematics_imports_torch_and_the_standard_library_alone() -> None:
    """And knows no device: `ops` has what one of them does otherwise."""
    for path in (PACKAGE / "smc").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            others = [name for name in names if not name.startswith("sglang_smc.smc")]
            roots = {name.partition(".")[0] for name in others}
            assert roots <= {"torch", *sys.stdlib_module_names}, path
        assert '"cpu"' not in path.read_text(), path


def test_no_room_imports_one_above_it() -> None:
    offenders = {module_of(path): found for path in SOURCES if (found := imported_above(path))}
    assert not offenders


def imported_above(path: Path) -> set[str]:
    here = room_of(module_of(path))
    found = {room_of(module) for module in IMPORTS[path]} - {here, ""}
    if not here:  # SGLang loads the package in every process
        return found
    if here in MAY:
        return found - MAY[here]
    if here == "tools.":  # the package itself, where a notebook finds what it asks for
        return found - {"tools.view"}
    if here in (*APART, *JUDGES):
        return found - KNOWN - {*APART, *JUDGES} - JUDGES.get(here, set())
    on_call = {"algorithm.py": {"worker"}, "hooks.py": {"patches"}, "plugin.py": set()}
    return {
        room
        for room in found - {KERNELS} - on_call.get(path.name, set())
        if room.startswith("tools.") or LEVEL_OF[room] >= LEVEL_OF[here]
    }


def test_no_import_circle() -> None:
    """Within a room, too; types that are only named count."""
    graph = {module_of(path): found for path, found in IMPORTS.items()}
    # `python -m` imports a module by its real name.
    own = {module: found & graph.keys() - {module} for module, found in graph.items()}
    TopologicalSorter(own).prepare()  # raises CycleError, with the circle


def test_a_room_is_small_and_says_what_it_is_for() -> None:
    rooms = [*PACKAGE.iterdir(), *TOOLS.iterdir()]
    for folder in sorted(path for path in rooms if path.is_dir()):
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, folder.name
        if not folder.is_symlink() and modules:
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder.name


#: Limits of structure. Lines and words are not limited: a limit teaches code and pages to pack.
MOST = {
    "file_changes": 67,
    "types": 25,
    "shape_fields": 9,
    "shape_booleans": 0,
    "wide_functions": 21,
    "worker_imports": 13,
    "grammar_files": 11,
    "glossary": 30,
}


def test_a_reader_has_not_far_to_go() -> None:
    found = measured().items()
    sizes = {name: value if isinstance(value, int) else len(value) for name, value in found}
    print(sizes)
    assert {name: size for name, size in sizes.items() if size > MOST.get(name, size)} == {}
