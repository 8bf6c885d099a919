"""The house as a whole: which folder may import which, and how far a reader has to go."""

import ast
from pathlib import Path

import pytest
from house_measures import OWN, ROOT, Measures, measured, own_imports

PACKAGE = ROOT / "sglang_smc"

# From the ground up; folders of one level import none of each other.
LEVELS = (
    ("dtype", "printable", "upstream"),
    ("potentials", "view"),
    ("tokens",),
    ("smc",),
    ("options",),
    ("memory", "models"),
    ("recording",),
    ("ops",),
    ("state",),
    ("process", "requests"),
    ("drafts",),
    ("round",),
    ("worker",),
    ("server",),
    ("cpu",),
    ("patches",),
    ("plugin",),
    ("demo",),
    ("command",),
)
# Tools: they import nothing of the server but settings, arithmetic and modules of the ground level;
# the commands alone import them.
APART = ("distill", "plan", "testing", "watch")
COMMANDS = ("demo", "command")
MOST_MODULES = 14
MATHEMATICS = {"tokens", "smc"}
PAIR = "pair"  # data, and the task that goes with them
KERNELS = "kernels"  # between the mathematics and `ops`, which alone imports them


def room_of(module: str) -> str:
    """`sglang_smc.round.steps` is in `round`, `sglang_smc.worker` in `worker`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path) -> str:
    inner = path.relative_to(ROOT).with_suffix("")
    parts = inner.parts if inner.parts[0] == "sglang_smc" else ("sglang_smc", *inner.parts)
    return ".".join(parts).removesuffix(".__init__")


SOURCES = [path for folder in OWN for path in sorted((ROOT / folder).rglob("*.py"))]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def test_no_room_imports_one_above_it() -> None:
    offenders = {module_of(path): found for path in SOURCES if (found := imported_above(path))}
    assert not offenders


def imported_above(path: Path) -> set[str]:
    """Rooms that a file imports and may not."""
    here = room_of(module_of(path))
    found = {room_of(module) for module in own_imports(path)} - {here, ""}
    if not here:  # the package itself, where a notebook finds what it asks for
        return found - {"view"}
    if here in APART:
        known = {"dtype", "printable", "options", "memory", "potentials"} | set(APART)
        return found - known
    if here in COMMANDS:
        found -= set(APART)
    if here == KERNELS:
        return found - MATHEMATICS
    on_call = {"algorithm.py": {"worker"}, "hooks.py": {"patches"}, "plugin.py": set()}
    return {
        room
        for room in found - {KERNELS, PAIR} - on_call.get(path.name, set())
        if room in APART or LEVEL_OF[room] >= LEVEL_OF[here]
    }


def test_no_import_circle() -> None:
    """Within a room, too; types that are only named count."""
    graph = {module_of(path): set(own_imports(path)) for path in SOURCES}
    for module, targets in graph.items():  # `python -m` imports a module by its real name
        graph[module] = targets & graph.keys() - {module}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_a_room_is_small_and_says_what_it_is_for() -> None:
    for folder in sorted(path for path in PACKAGE.iterdir() if path.is_dir()):
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, folder.name
        if not folder.is_symlink() and modules:
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder.name


@pytest.fixture(scope="module")
def found() -> Measures:
    return measured()


def test_a_round_is_read_in_few_files(found: Measures) -> None:
    print("file changes in a round:", found.file_changes)
    assert found.file_changes <= 79


def test_a_round_needs_few_types(found: Measures) -> None:
    print("types in a round:", len(found.types), found.types)
    assert len(found.types) <= 30


def test_the_worker_leans_on_few_modules(found: Measures) -> None:
    print("modules that the worker imports:", len(found.worker_imports))
    assert len(found.worker_imports) <= 15


def test_a_rule_of_texts_is_known_in_few_files(found: Measures) -> None:
    print("files that mention a grammar:", len(found.grammar_files), found.grammar_files)
    assert len(found.grammar_files) <= 10
