"""``sglang-smc doctor``: what it finds of a machine, and that each fault is found."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest

from sglang_smc import __version__
from sglang_smc.command import doctor, extensions, machine
from sglang_smc.command.machine import FAIL, OK, WARNING, Finding


def test_faults_of_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SGLang, on another release, with a hook that does not land, without bfloat16."""
    from sglang_smc import dtype, plugin
    from sglang_smc.server import hooks

    refuses = mock.Mock(side_effect=RuntimeError("it did not land: x.y"))
    for name in ("install", "verify_installed"):
        monkeypatch.setattr(hooks, name, refuses)
    found = machine._hooks()
    assert found.level == FAIL and "x.y" in found.found and found.do
    for number_format, level in (("float32", WARNING), ("bfloat16", OK)):
        monkeypatch.setattr(dtype, "default_dtype", mock.Mock(return_value=number_format))
        assert machine._cpu().level == level
    monkeypatch.delenv(plugin.SKIP_VERSION_ENV, raising=False)
    monkeypatch.setattr(plugin, "release", lambda: "0.5.19")
    version = machine.installed("sglang") or ""
    assert machine._release() == machine.fail("sglang", version, plugin.problem() or "")
    monkeypatch.setattr(machine, "installed", lambda name: None if name == "sglang" else "1")
    *_, last = machine.findings()
    assert (last.level, last.about) == (FAIL, "packages")
    assert "sglang not installed" in last.found and "pip install" in last.do


@pytest.mark.parametrize(
    ("points", "listed", "level", "says"),
    [
        ([], "", FAIL, "no smc"),
        (["a:b"], "other,more", FAIL, "keeps smc out"),
        (["a:b", "c:d"], "", WARNING, "again c:d"),
        (["a:b"], "other, smc", OK, "smc = a:b"),
    ],
)
def test_entry_points(
    points: list[str], listed: str, level: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [SimpleNamespace(name="smc", value=value) for value in points]
    monkeypatch.setattr(machine, "entry_points", lambda group: given)
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    found = machine._entry_point(*machine.ENTRY_POINTS[0])
    assert found.level == level and says in found.found


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [(__version__, OK, __version__), ("9.9", FAIL, "9.9, with"), (None, OK, "not installed")],
)
def test_tools_are_of_the_same_version(
    found: str | None, level: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: found)
    told = machine._tools()
    assert told.level == level and says in told.found and bool(told.do) == (found != __version__)


def test_it_fails_where_something_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a pair is not looked at on an installation that fails."""
    checked = SimpleNamespace(check=lambda options: None)
    monkeypatch.setattr(extensions, "loaded", lambda group, name: checked)
    for level, status in ((OK, 0), (WARNING, 0), (FAIL, 1)):
        one = Finding(level, "it", "found", "mend it" if level != OK else "")
        monkeypatch.setattr(machine, "findings", mock.Mock(return_value=[one]))
        assert doctor.main([]) == status
        assert capsys.readouterr().out.startswith(level)
        assert doctor.main(["--json"]) == status
        assert json.loads(capsys.readouterr().out) == [doctor.as_dict(one)]
    asked = doctor.parser().parse_args(["--target", "t"])
    assert [one.about for one in doctor.examine(asked)] == ["it", "pair"]
