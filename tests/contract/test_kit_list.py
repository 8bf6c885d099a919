"""Each test of SGLang's kits runs on an SMC server, or tests/kits/left_out.toml says why not.

Both are read, not imported.
"""

import ast
from collections.abc import Iterator

import pytest
import tomllib
from contract.upstream import ours, release
from contract.upstream.sglang import Tree

from sglang_smc.upstream import IS_NEWEST

pytestmark = pytest.mark.skipif(
    not IS_NEWEST, reason="the kits of SGLang 0.5.23 are listed; older ones differ"
)
INSTALLED = release.installed()
assert INSTALLED is not None
KITS = INSTALLED / "sglang" / "test" / "kits"
LEFT_OUT = release.ROOT / "tests" / "kits" / "left_out.toml"
#: Where kits are put to use.
MODULES = "tests/kits/test_kits.py", "tests/disaggregation/test_decode_server.py"


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
    tree = Tree(KITS.parents[2])
    of = frozenset({"NEWER", "NEWEST"})
    sources = [ours.read(name, (release.ROOT / name).read_text(), of) for name in MODULES]
    found = {name for name in kit_tests() if any(name in source.imported for source in sources)}
    for heir in ours.heirs(sources):
        nothing = (node for node in heir.node.body if isinstance(node, ast.Assign))
        off = {ast.unparse(t) for n in nothing if ast.unparse(n.value) == "None" for t in n.targets}
        bases = filter(None, map(tree.find, heir.bases))
        for owner in (each for base in bases for each in tree.lineage(base)):
            if owner.path.startswith("sglang.test.kits."):
                tests = {name for name in tree.names(owner) if name.startswith("test_")} - off
                found |= {f"{owner.path.removeprefix('sglang.test.kits.')}.{n}" for n in tests}
    return found


def test_every_kit_test_runs_or_is_listed_with_a_reason() -> None:
    """A class in the list stands for all of its tests, a kit for all of its classes."""
    listed = set()
    known = kit_tests()
    for reason, names in tomllib.loads(LEFT_OUT.read_text()).items():
        assert reason
        for name in names:
            some = {test for test in known if f"{test}.".startswith(f"{name}.")}
            assert some, f"no kit has {name}"
            listed |= some
    assert listed == known - run_tests()
