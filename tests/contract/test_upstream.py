"""`make upstream` sees what breaks on another SGLang, and nothing on the one that is installed."""

import ast
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from contract.planted import (
    NEWER,
    OLDER,
    OWNER,
    PROJECT,
    RELEASES,
    SYMBOLS,
    UPSTREAM,
    found_in,
    write,
)
from contract.shape import Symbol
from contract.symbol_check import problems
from contract.upstream import __main__ as command
from contract.upstream import ours, release, wheel
from contract.upstream.__main__ import report
from contract.upstream.asked import everything
from contract.upstream.check import Asked, Finding, findings
from contract.upstream.tree import Tree

from sglang_smc import upstream
from sglang_smc.server import hooks
from sglang_smc.server.requirements import REQUIREMENTS


def test_installed_sglang_has_all_that_is_asked() -> None:
    root = release.installed()
    assert root is not None
    found = findings(Tree(root), everything(upstream.release()))
    assert found == [], "\n".join(report(found))


def by_import(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(root)
    for name in ("planted", "planted.owner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    try:
        return [line for symbol in SYMBOLS for line in problems(symbol)]
    finally:
        for name in ("planted", "planted.owner"):
            sys.modules.pop(name, None)


def by_source(root: Path) -> list[str]:
    paths = [symbol._replace(path=f"sglang.{symbol.path}") for symbol in SYMBOLS]
    write(root / "sglang", {"__init__.py": "", "planted/__init__.py": ""})
    (root / "sglang/planted/owner.py").write_text((root / "planted/owner.py").read_text())
    found = findings(Tree(root), Asked(tuple(paths), [], (), ()))
    return [finding.what.replace("sglang.planted", "planted") for finding in found]


def test_hooks_and_requirements_are_read_as_they_are() -> None:
    sources = ours.sources(upstream.IS_NEWER, newest=upstream.IS_NEWEST)
    own = [source for source in sources if source.is_product]
    fields = [use.path for source in own for use in ours.requirement_fields(source)]
    assert sorted(fields) == sorted(requirement.field for requirement in REQUIREMENTS)
    read = [hook for source in own for hook in ours.hooks(source)]
    patches = hooks.collect(*hooks.GROUPS)
    assert {hook.target for hook in read} == {patch.target for patch in patches}
    functions = {patch.target for patch in patches if not isinstance(patch.function, type)}
    assert {hook.target for hook in read if hook.takes is not None} == functions


def test_releases_are_read_as_they_are() -> None:
    root = release.installed()
    assert root is not None
    version = release.version_of(root)
    assert version == upstream.release()
    assert release.is_newer(version) == upstream.IS_NEWER
    assert release.is_newest(version) == upstream.IS_NEWEST
    assert release.supported() == upstream.SUPPORTED
    assert {release.is_newer(version) for version in upstream.SUPPORTED} == {True, False}


SHAPE_BREAKS = {
    "renamed": ("def build(", "def build_it(", "build is missing"),
    "class renamed": ("class Info", "class Information", "Info is missing"),
    "parameter gone": ("size, *, device", "size, *, place", "takes no keyword device"),
    "other order": ("(size, device", "(device, size", "not first (size)"),
    "keyword alone": ("wait(self, obj)", "wait(self, *, obj)", "not first (self obj)"),
    "coroutine": ("def plain", "async def plain", "is now of kind coroutine, not plain"),
    "no coroutine": ("async def wait", "def wait", "is now of kind plain, not coroutine"),
    "returns": ("yield obj", "return obj", "is now of kind coroutine, not async generator"),
    "moved to an inner object": ("self.held, self.rank", "self.kv.held, self.rank", "has no held"),
    "never None": ("self.kv = None", "self.kv = Info(0)", "never sets kv to None"),
    "field never None": ("str | None = None", 'str = ""', "never sets name to None"),
    "field gone": ("length: int", "size: int", "Info has no length"),
    "no dataclass": ("@dataclass(slots=True)", "", "Info has no __dataclass_fields__"),
    "calls another": ("self.worker.update", "self.runner.update", "does not call worker.update"),
    "hands on another": ("(obj.update", "(obj.load", "does not hand on obj.update"),
    "passes more": ("dict(size=1", "dict(rank=0, size=1", "passes not just these keywords"),
    "passes less": ("size=1, ", "", "passes not just these keywords"),
    "no function": ("def build(size, device", "build = 0\ndef other(size, device", "no function"),
}


@pytest.mark.parametrize(("old", "new", "expected"), SHAPE_BREAKS.values(), ids=SHAPE_BREAKS.keys())
def test_both_ways_see_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: str
) -> None:
    assert OWNER.count(old) == 1
    write(tmp_path, {"planted/__init__.py": "", "planted/owner.py": OWNER.replace(old, new)})
    imported, read = by_import(tmp_path, monkeypatch), by_source(tmp_path)
    assert any(expected in line for line in imported)
    assert any(expected in line for line in read)
    assert len(imported) == len(read)


def test_neither_way_sees_one_where_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added behind what we count on is no break."""
    more = OWNER.replace("obj, *, flag", "obj, more=0, *, flag").replace("self.kv =", "self.x =")
    more = more.replace("self.x = None", "self.kv = None\n        self.kv.extra = 1")
    write(tmp_path, {"planted/__init__.py": "", "planted/owner.py": more})
    assert by_import(tmp_path, monkeypatch) == by_source(tmp_path) == []


@pytest.mark.parametrize("sglang", RELEASES.values(), ids=RELEASES.keys())
def test_nothing_differs(tmp_path: Path, sglang: dict[str, str]) -> None:
    assert found_in(tmp_path, sglang, PROJECT) == []


PARALLEL = "srt/fields/parallel.py"  # or else where the arguments are a dataclass
BREAKS = {
    "module moved": ("srt/pool.py", None, "", "names", "sglang.srt.pool.Pool is gone"),
    "no longer exported": ("api.py", "*", "Base", "names", "sglang.api.Owner is gone"),
    "gone from a module": ("srt/pool.py", "class Pool", "class Rows", "names", "sglang.api.pool"),
    "hook's target": ("owner.py", "def wait", "def wait_for", "hooks", "sglang.owner.Owner.wait"),
    "hook's parameters": ("owner.py", "wait(self, obj)", "wait(self, obj, x)", "hooks", "only ("),
    "keyword": ("owner.py", "*, device", "*, place", "calls", "takes no keyword device"),
    "left out": ("owner.py", "size, *,", "size, rank, *,", "calls", "wants rank"),
    "one too many": ("owner.py", "def made(cls, size)", "def made(cls)", "calls", "by position"),
    "super's keyword": ("srt/pool.py", "keep=0", "held=0", "calls", "takes no keyword keep"),
    "override": ("srt/pool.py", "rows, keep=0", "rows, keep=0, x=0", "overrides", "our method"),
    "override's name": ("srt/pool.py", "rows, keep=0", "slots, keep=0", "overrides", "our method"),
    "attribute": ("owner.py", "self.held", "self.kv.held", "attributes", "Owner has no held"),
    "setting": (PARALLEL, "tp_size", "tensors", "requirements", "no field tp_size"),
    "new setting": (PARALLEL, "tp_size", "x: int; tp_size", "to judge", "new field ServerArgs.x"),
    "setting dropped": (PARALLEL, "tp_size", "x", "to judge", "no field ServerArgs.tp_size"),
    "new method": ("srt/pool.py", "def free", "def keep", "to judge", "new method Pool.keep"),
    "method dropped": ("srt/pool.py", "def free", "def keep", "to judge", "no method Pool.free"),
    "table kept": ("srt/pool.py", "...", "self.t = x.req_to_token", "req_to_token", "srt.pool"),
}


@pytest.mark.parametrize("sglang", RELEASES.values(), ids=RELEASES.keys())
@pytest.mark.parametrize(
    ("file", "old", "new", "group", "expected"), BREAKS.values(), ids=BREAKS.keys()
)
def test_break_is_found(
    tmp_path: Path,
    sglang: dict[str, str],
    file: str,
    old: str | None,
    new: str,
    group: str,
    expected: str,
) -> None:
    broken = dict(sglang)
    file = file if file in broken else "srt/server_args.py"
    text = broken.pop(file)
    if old is not None:
        assert old in text
        broken[file] = text.replace(old, new)
    found = found_in(tmp_path, broken, PROJECT)
    assert any(line.group == group and expected in line.what for line in found), found


# In the branches on the release: what is broken there on the one, the other does not hear of.
BRANCH_BREAKS = {
    "older's attribute": ("request.row\n", "request.line\n", "Request has no line", None),
    "newer's attribute": ("request.slots", "request.line", None, "Request has no line"),
    "newer's keyword": ("key=0", "name=0", None, "takes no keyword name"),
    "newer's import": ("import row_of", "import rows", None, "request.rows is gone"),
    "no branch": ("if not IS_NEWER", "if request", "has no slots", "has no row"),
    "wrong way round": ("not IS_NEWER", "IS_NEWER", "has no slots", "has no row"),
}


@pytest.mark.parametrize(
    ("old", "new", "older", "newer"), BRANCH_BREAKS.values(), ids=BRANCH_BREAKS.keys()
)
def test_break_in_a_branch_is_found_on_its_release(
    tmp_path: Path, old: str, new: str, older: str | None, newer: str | None
) -> None:
    assert UPSTREAM.count(old) == 1
    project = {**PROJECT, "sglang_smc/upstream.py": UPSTREAM.replace(old, new)}
    for name, expected in (("older", older), ("newer", newer)):
        found = found_in(tmp_path / name, RELEASES[name], project)
        if expected is None:
            assert found == []
        assert expected is None or any(expected in line.what for line in found)


def test_record_of_one_family_is_asked_of_no_other(tmp_path: Path) -> None:
    gone = {**OLDER, "srt/request.py": OLDER["srt/request.py"].replace("leave", "go")}
    found = found_in(tmp_path / "hook", gone, PROJECT)
    gone_target = "sglang.srt.request.Retired.leave is gone"
    assert [(f.group, f.what) for f in found] == [("hooks", gone_target), ("names", gone_target)]
    gone = {**NEWER, PARALLEL: NEWER[PARALLEL].replace("cp_size", "size")}
    found = found_in(tmp_path / "requirement", gone, PROJECT)
    assert "ServerArgs has no field cp_size" in [line.what for line in found]


BRANCHES = {
    "x = 1 if IS_NEWER else 2": ("x = 2", "x = 1"),
    "x = 1 if not upstream.IS_NEWER else 2": ("x = 1", "x = 2"),
    "if IS_NEWER and y: f()\nelse: g()": ("g()", "if y: f()\nelse: g()"),
    "if IS_NEWER or y: f()\nelse: g()": ("if y: f()\nelse: g()", "f()"),
    "if y: f()\nelif NEWER.is_installed: g()": ("if y: f()", "if y: f()\nelse: g()"),
    "if upstream.OLDER.is_installed:\n import a": ("import a", "pass"),
    "def f():\n if IS_NEWER: return 1\n g()": ("def f(): g()", "def f(): return 1"),
    "def f():\n if IS_NEWER: g()\n h()": ("def f(): h()", "def f():\n g()\n h()"),
    "for x in y:\n if not IS_NEWER: g(x)": ("for x in y: g(x)", "for x in y: pass"),
    "if IS_LATER: f()": ("if IS_LATER: f()", "if IS_LATER: f()"),
    "x = (P(a), P(b, OLDER), P(c, family=u.NEWER))": (
        "x = (P(a), P(b, OLDER))",
        "x = (P(a), P(c, family=u.NEWER))",
    ),
    "if not IS_NEWER: pytest.skip('no')\nimport a": ("pytest.skip('no')", "import a"),
    "if y: return\nf()": ("if y: return\nf()", "if y: return\nf()"),
}


@pytest.mark.parametrize("newer", [False, True], ids=RELEASES.keys())
@pytest.mark.parametrize("code", BRANCHES)
def test_a_file_is_read_as_it_runs(code: str, newer: bool) -> None:
    expected = BRANCHES[code][newer]
    read = ast.unparse(release.as_run(code, newer))
    assert re.sub(r"IS_NEWER (and|or) ", "", read) == ast.unparse(ast.parse(expected))


def test_struct_takes_no_hook_on_its_init(tmp_path: Path) -> None:
    """A dataclass's constructor can be hooked, though it stands in no file."""
    hook = 'def init(original, args): ...\nPATCHES = Patch(target="{}", function=init)\n'
    target = "sglang.srt.server_args.ServerArgs.__init__"
    project = {**PROJECT, "patches/args.py": hook.format(target)}
    assert found_in(tmp_path / "17", OLDER, project) == []
    (found,) = found_in(tmp_path / "20", NEWER, project)
    assert (found.group, found.what) == ("hooks", f"{target} is gone")


def test_finding_says_where(tmp_path: Path) -> None:
    renamed = OWNER.replace("self.held", "self.kv.held")
    (found,) = found_in(tmp_path, {**OLDER, "owner.py": renamed}, PROJECT)
    assert found.upstream == "sglang/owner.py:11" and found.ours == "sglang_smc/worker.py:9"
    shown = "\n".join(report([found, found._replace(ours="sglang_smc/other.py:1")]))
    assert "Attributes that our files read: 2" in shown
    assert "sglang/owner.py:11 <- sglang_smc/other.py:1, sglang_smc/worker.py:9" in shown
    assert shown.endswith("2 differences")


def test_wheel_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    downloaded: list[str] = []

    def download(version: str, folder: Path) -> Path:
        downloaded.append(version)
        with zipfile.ZipFile(folder / "it.whl", "w") as archive:
            archive.writestr("sglang/__init__.py", "")
            archive.writestr("sglang/kernel.so", "")
        return folder / "it.whl"

    monkeypatch.setattr(wheel, "_download", download)
    for _ in range(2):
        folder = wheel.unpacked("0.0.1")
        assert [path.name for path in (folder / "sglang").iterdir()] == ["__init__.py"]
    assert downloaded == ["0.0.1"]
    assert [path.name for path in wheel.cache().iterdir()] == ["0.0.1"]


def test_all_supported_releases_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installed one where it is; one that cannot be had is told, and not passed over."""
    write(tmp_path / "sglang", {"__init__.py": "", **OLDER})
    compared: list[tuple[Path, str]] = []

    def compare(tree: Tree, asked: str) -> list[Finding]:
        compared.append((tree.root, asked))
        return []

    monkeypatch.setattr(command, "findings", compare)
    monkeypatch.setattr(command, "everything", lambda version: version)
    monkeypatch.setattr(release, "installed", lambda: tmp_path)
    monkeypatch.setattr(release, "supported", lambda: ("0.1.0", "0.5.99"))
    monkeypatch.setattr(sys, "argv", ["upstream"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], returncode=1)
    monkeypatch.setattr(wheel.subprocess, "run", lambda *_, **__: failed)
    assert command.main() == 1
    assert compared == [(tmp_path, "0.1.0")]
    said = capsys.readouterr().out
    assert f"SGLang 0.1.0, in {tmp_path}" in said
    assert "SGLang 0.5.99 was not compared: pip could not download sglang==0.5.99" in said
    monkeypatch.setattr(release, "supported", lambda: ("0.1.0",))
    assert command.main() == 0


def test_every_kind_of_finding_is_shown() -> None:
    groups = {group for *_, group, _ in BREAKS.values()} | {"contract"}
    for group in groups:
        assert any("it broke" in line for line in report([Finding(group, "it broke")]))


def test_symbol_of_a_generated_constructor(tmp_path: Path) -> None:
    write(tmp_path / "sglang", {"__init__.py": "", **NEWER})
    path = "sglang.srt.server_args.ServerArgs.__init__"
    asked = Asked((Symbol(path, "self * model_path tp_size gone"),), [], (), ("sglang.",))
    (found,) = findings(Tree(tmp_path), asked)
    assert found.what == f"{path} takes no keyword gone"
