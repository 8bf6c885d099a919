"""`make upstream` sees what breaks on another SGLang, and nothing on the one that is installed."""

import ast
import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from baselines import cpu_speculation
from contract import planted
from contract.planted import NEWER, OLDER, PROJECT, broken, found_in, write
from contract.upstream import __main__ as command
from contract.upstream import ours, release, speculators
from contract.upstream.__main__ import everything, report
from contract.upstream.check import SERVER_ARGS, findings
from contract.upstream.sglang import Tree
from resolved_args import field_names

from sglang_smc import upstream
from sglang_smc.patches.server_args import FLAG_FIELDS
from sglang_smc.server import hooks

PAGE = re.sub(
    r"```.*?```", "", (release.ROOT / "patches" / "README.md").read_text(), flags=re.DOTALL
)


@pytest.fixture(scope="module")
def installed() -> Tree:
    root = release.installed()
    assert root is not None
    return Tree(root)


def test_installed_sglang_has_all_that_is_asked(installed: Tree) -> None:
    found = findings(installed, everything(upstream.release()))
    assert found == [], "\n".join(report(found))


def test_what_is_read_is_what_python_sees(installed: Tree) -> None:
    """Releases, hooks, and the fields that the installed SGLang takes."""
    version = release.version_of(installed.root)
    assert version == upstream.release() and release.supported() == upstream.SUPPORTED
    families = {name: getattr(upstream, name).is_installed for name in release.FAMILIES}
    assert release.families(version) == {name for name, is_of in families.items() if is_of}
    own = [source for source in ours.sources(release.families(version)) if source.is_product]
    patches = hooks.collect(*hooks.GROUPS, cpu_speculation.HOOKS)
    takes = {hook.target: hook.function for source in own for hook in ours.hooks(source)}
    assert takes.keys() == {patch.target for patch in patches}
    functions = {patch.target for patch in patches if not isinstance(patch.function, type)}
    assert {target for target, known in takes.items() if known is not None} == functions
    fields = set(installed.fields(installed.find(SERVER_ARGS)))
    assert fields == set(field_names()) - set(FLAG_FIELDS)


@pytest.mark.parametrize("sglang", planted.RELEASES.values(), ids=planted.RELEASES)
def test_nothing_differs(tmp_path: Path, sglang: dict[str, str]) -> None:
    """Nor where parameters come behind those that we count on."""
    assert found_in(tmp_path / "same", sglang, PROJECT) == []
    more = planted.OWNER.replace("plain(self, obj,", "plain(self, obj, more=0,")
    more = more.replace("self.kv = None", "self.kv = None\n        self.kv.extra = 1")
    assert found_in(tmp_path / "more", {**sglang, "owner.py": more}, PROJECT) == []


@pytest.mark.parametrize("file, old, new, group, expected", planted.BREAKS)
def test_break_is_found(
    tmp_path: Path, file: str, old: str | None, new: str, group: str, expected: Any
) -> None:
    for which, (name, sglang) in enumerate(planted.RELEASES.items()):
        if isinstance(expected, str):
            wanted = expected
            project = PROJECT
            sglang = broken(sglang, file, old, new)
        else:
            wanted = expected[which]
            project = broken(PROJECT, file, old, new)
        found = found_in(tmp_path / name, sglang, project)
        said = [finding.what for finding in found if finding.group == group]
        assert any(wanted in what for what in said) if wanted else found == [], found


@pytest.mark.parametrize("file, old, new, group, expected", planted.CHANGES)
def test_change_since_the_newest_release_is_found(
    tmp_path: Path, file: str, old: str, new: str, group: str, expected: str
) -> None:
    later = {**NEWER, "_version.py": "__version__ = version = '0.3.0'\n"}
    assert found_in(tmp_path / "same", later, PROJECT, known=True) == []
    found = found_in(tmp_path / "later", broken(later, file, old, new), PROJECT, known=True)
    places = [(f.ours, f.upstream) for f in found if f.group == group and expected in f.what]
    ours_of = {"to judge": ("",)}.get(group, ("patches/wait", "sglang_smc/w"))
    assert places and all(here[:12] in ours_of and there for here, there in places)


@pytest.mark.parametrize("code", planted.BRANCHES)
def test_a_file_is_read_as_it_runs(code: str) -> None:
    for family, expected in zip(("OLDER", "NEWER"), planted.BRANCHES[code], strict=True):
        nodes = ours.read("", code, frozenset({family})).nodes
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert "".join(sorted(name for name in used if len(name) == 1)) == expected


def test_struct_takes_no_hook_on_its_init(tmp_path: Path) -> None:
    """A dataclass's constructor can be hooked, though it stands in no file."""
    hook = '@PATCHES.on("{}")\ndef init(original, args): ...\n'
    project = {**PROJECT, "patches/args.py": hook.format(f"{SERVER_ARGS}.__init__")}
    assert found_in(tmp_path / "17", OLDER, project) == []
    (found,) = found_in(tmp_path / "20", NEWER, project)
    assert (found.group, found.what) == ("hooks", f"{SERVER_ARGS}.__init__ is gone")


def test_finding_says_where_and_what_to_do(tmp_path: Path) -> None:
    renamed = broken(OLDER, "owner.py", "self.held", "self.kv.held")
    found = next(f for f in found_in(tmp_path, renamed, PROJECT) if f.group == "attributes")
    assert found.upstream == "sglang/owner.py:11" and found.ours == "sglang_smc/worker.py:9"
    shown = "\n".join(report([found, found._replace(ours="sglang_smc/other.py:1")]))
    assert "Attributes that our files read: find where they are now: 2" in shown
    assert "sglang/owner.py:11 <- sglang_smc/other.py:1, sglang_smc/worker.py:9" in shown
    groups = {group for *_, group, _ in [*planted.BREAKS, *planted.CHANGES]}
    assert groups == command.HEADINGS.keys()


def test_all_supported_releases_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installed one where it is, others from a wheel, once; one that is missing is told."""
    write(tmp_path / "sglang", {"__init__.py": "", **OLDER})
    roots = list[Path]()
    downloads = list[str]()

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        downloads.append(command[-1])
        if downloads[-1] == "sglang==0.5.99":
            return subprocess.CompletedProcess(command, returncode=1)
        newer = {"__init__.py": "", "_version.py": "__version__ = version = '0.2.0'"}
        write(Path(command[-2], "sglang"), newer)
        return subprocess.CompletedProcess(command, returncode=0)

    asked = everything(upstream.release())
    monkeypatch.setattr(command, "findings", lambda tree, *_: roots.append(tree.root) or [])
    monkeypatch.setattr(command, "everything", lambda version: asked)
    monkeypatch.setattr(speculators, "RELEASES", ())
    monkeypatch.setattr(release, "installed", lambda: tmp_path)
    monkeypatch.setattr(release.subprocess, "run", pip)
    monkeypatch.setattr(sys, "argv", ["upstream"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = release.cache() / "0.2.0"
    for versions, status in ((("0.1.0", "0.2.0", "0.5.99"), 1), (("0.1.0", "0.2.0"), 0)):
        monkeypatch.setattr(release, "supported", lambda versions=versions: versions)
        assert command.main() == status
    assert roots == [tmp_path, wheel] * 2
    assert downloads == ["sglang==0.2.0", "sglang==0.5.99"]
    assert list(release.cache().iterdir()) == [wheel]
    said = capsys.readouterr().out
    assert f"SGLang 0.1.0, in {tmp_path}" in said
    assert "SGLang 0.5.99 was not compared: pip could not download sglang==0.5.99" in said
    assert gc.isenabled()  # the command alone stops collections, at the end of its process


HEADS = """
    class VerifierConfig:
        name_or_path: str
    class SpeculatorsConfig:
        algorithm: str
    class GreedyTokenProposalConfig:
        proposal_type: str
    @SpeculatorModelConfig.register("eagle3")
    class Eagle3SpeculatorConfig(SpeculatorModelConfig):
        draft_vocab_size: int = 32000
    @SpeculatorModelConfig.register("dflash")
    class DFlashSpeculatorConfig(SpeculatorModelConfig):
        max_anchors: int = 256
        model_type: ClassVar[str] = ""
    @SpeculatorModelConfig.register("dspark")
    class DSparkSpeculatorConfig(DFlashSpeculatorConfig):
        markov_rank: int
"""
MARKOV = "markov_rank: int"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (MARKOV, MARKOV, None),
        (MARKOV, "markov_size: int", "DSparkSpeculatorConfig.markov_size: read it, or say"),
        ("model_type: ClassVar[str]", "kind: str", "DSparkSpeculatorConfig.kind: read it"),
        ("algorithm: str", "rule: str", "SpeculatorsConfig.rule: read it"),
        ('"dspark"', '"dspark9"', "say in REFUSED what heads of dspark9 are"),
        ("VerifierConfig", "TargetConfig", "VerifierConfig is in no class"),
        ('register("dflash")', 'enter("dflash")', "dflash is in no class"),
    ],
)
def test_each_field_of_a_head_is_judged(
    tmp_path: Path, old: str, new: str, expected: str | None
) -> None:
    """Red where a release has a key, inherited or within another, that nobody has looked at."""
    write(tmp_path / "speculators", {"config.py": HEADS.replace(old, new)})
    found = speculators.findings(tmp_path)
    assert any(expected in line for line in found) if expected else found == []


def test_an_offline_machine_is_told_what_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failed = subprocess.CompletedProcess([], returncode=1)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert speculators.differs("0.0.9")
    assert "speculators 0.0.9 was not compared: pip could not" in capsys.readouterr().out


def test_every_hook_has_a_text_for_sglang() -> None:
    retired = re.findall(r"\*\*Retires here:\*\*(.*?)(?:\n\n|\Z)", PAGE, re.DOTALL)
    named = {name for text in retired for name in re.findall(r"`([\w.]+)`", text)}
    files = {
        f"patches/{name}.py"
        for group in (hooks.FLAGS, hooks.DRAFTS, hooks.SMC, hooks.ROUTES)
        for name in group.modules
    }
    sources = ours.sources(frozenset({"NEWER", "NEWEST"}))
    targets = [h.target for source in sources if source.path in files for h in ours.hooks(source)]
    assert len(targets) > 15
    assert [t for t in targets if not any(t.endswith(f".{name}") for name in named)] == []


@pytest.mark.skipif(not upstream.IS_NEWER, reason="the texts are about the newer releases")
def test_places_that_texts_for_sglang_name_are_there(installed: Tree) -> None:
    place = re.compile(r"`(srt/[\w/]+)\.py`((?:(?:,|\s+and)\s+`[\w.]+`)+)")
    places = [
        f"sglang.{path.replace('/', '.')}.{name}"
        for path, names in place.findall(PAGE)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    assert len(places) > 20
    assert [name for name in places if installed.find(name) is None] == []
