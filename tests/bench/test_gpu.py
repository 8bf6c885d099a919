"""The command for a GPU machine, without one: what it unpacks, begins, leaves and keeps."""

import json
import signal
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from gpu import kernel_tests, machine, pack, unpack
from gpu.clock import Clock, TimeUpError
from gpu.records import RESULTS, Records, read_results
from gpu.stages import Attempt, Case, Places, Runner, Stage
from speed.remote import EngineError
from study import REPOSITORY, BenchError

from sglang_smc.command.machine import ENTRY_POINTS

CALL = {
    "id": "1",
    "date": "2026-01-01T00:00",
    "git_sha": "abc",
    "hardware": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "gpu": {"driver_version": "580"},
}
CODE = {"code": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


def records_in(*folders: Path, name: str = "1", reads: Sequence[Path] = ()) -> Records:
    return Records(folders, reads, {**CALL, "id": name})


# --- Results


def test_a_result_is_known_as_long_as_what_it_depends_on(folder: Path) -> None:
    """And half a line is none."""
    records = records_in(folder)
    assert not records.has("speed", "ar", CODE)
    records.add("speed", "ar", CODE, {"seconds": 1.5})
    with (folder / RESULTS).open("a") as file:
        file.write('{"stage": "speed", "part": "sm')
    for later in (records, records_in(folder, name="2")):
        assert later.has("speed", "ar", CODE)
        assert not later.has("speed", "ar", {"code": 2})
        assert not later.has("smoke", "ar", CODE)
    assert records.is_of_this_call("speed", "ar")
    assert not records_in(folder, name="3").is_of_this_call("speed", "ar")
    assert all(json.loads(line) for line in (folder / RESULTS).open())


def test_results_of_other_calls_are_carried_along(folder: Path, tmp_path: Path) -> None:
    """An output folder that was emptied, and another machine's results, make one file."""
    other, state = tmp_path / "other", tmp_path / "state"
    records_in(other).add("speed", "ar", CODE, {"seconds": 1})
    records_in(state, name="2").add("speed", "smc", CODE, {"seconds": 2})
    again = records_in(folder, state, name="3", reads=[other])
    again.add("speed", "exact", CODE, {"seconds": 3})
    stages, calls = read_results(folder)
    assert (list(stages["speed"]), list(calls)) == (["ar", "smc", "exact"], ["1", "2", "3"])
    assert (folder / RESULTS).read_text() == (state / RESULTS).read_text()


# --- Time, failures, resumption


Work = Callable[[Sequence[str], Attempt], None]


def a_case(work: Work, *parts: str, seconds: float = 1.0, slug: str = "case") -> Case:
    return Case(slug, dict.fromkeys(parts, CODE), seconds, work)


def stage_of(*found: Case, minutes: float = 9.0) -> Stage:
    return Stage("speed", minutes, "a test", lambda: list(found))


def all_of_them(missing: Sequence[str], attempt: Attempt) -> None:
    attempt.started = True
    for part in missing:
        attempt.add(part, {"seconds": 1.0})


def runner_of(folder: Path, minutes: float = 9.0, name: str = "1", **more: Any) -> Runner:
    return Runner(records_in(folder, name=name), Clock(minutes), say=lambda _: None, **more)


def test_what_has_a_result_is_not_done_again(folder: Path) -> None:
    asked: list[list[str]] = []

    def work(missing: Sequence[str], attempt: Attempt) -> None:
        asked.append(list(missing))
        all_of_them(missing[:1] if len(asked) == 1 else missing, attempt)
        if len(asked) == 1:
            raise KeyboardInterrupt

    case = a_case(work, "a", "b")
    with pytest.raises(KeyboardInterrupt):
        runner_of(folder).run(stage_of(case))
    for name in ("2", "3"):
        runner_of(folder, name=name).run(stage_of(case))
    assert asked == [["a", "b"], ["b"]]
    runner_of(folder, name="4", fresh=True).run(stage_of(case))
    assert asked[-1] == ["a", "b"] and len(asked) == 3


def test_what_does_not_fit_into_the_time_is_left(folder: Path) -> None:
    runner = runner_of(folder, minutes=0.5)
    small = a_case(all_of_them, "small")
    large = a_case(all_of_them, "large", seconds=100.0, slug="large")
    runner.run(stage_of(large, small))
    assert runner.left == ["speed large"]
    assert list(runner.records.of("speed")) == ["small"]
    runner = runner_of(folder, name="2")
    runner.run(stage_of(large, minutes=0.5))  # the stage's own limit
    assert runner.left == ["speed large"]


@pytest.mark.parametrize(
    ("slug", "error", "at", "failed"),
    [
        ("one part", EngineError("OutOfMemoryError: too large"), "b", {"b"}),
        ("no start", EngineError("ValueError: no such backend"), None, {"a", "b", "c"}),
        ("any error", KeyError("x"), None, {"a", "b", "c"}),
    ],
)
def test_a_failure_is_a_result_and_costs_no_other_part_or_case(
    folder: Path, slug: str, error: Exception, at: str | None, failed: set[str]
) -> None:
    starts: list[list[str]] = []

    def work(missing: Sequence[str], attempt: Attempt) -> None:
        starts.append(list(missing))
        attempt.started = at is not None
        for part in missing:
            if part == (at or part):
                raise error
            attempt.add(part, {})

    cases = a_case(work, "a", "b", "c"), a_case(all_of_them, "next", slug="next")
    for name in ("1", "2"):  # what has failed is not asked again
        runner = runner_of(folder, name=name)
        runner.run(stage_of(*cases))
        found = runner.records.of("speed")
        assert {part for part, one in found.items() if "failed" in one} == failed
        assert set(found) == {"a", "b", "c", "next"} and runner.left == []
        assert all(str(error) in found[part]["failed"] for part in failed)
    assert starts == ([["a", "b", "c"], ["c"]] if at else [["a", "b", "c"]])


@pytest.mark.parametrize(("spent", "is_result"), [(240.0, True), (30.0, False)])
def test_a_case_that_hangs_is_a_result_and_a_call_that_is_over_blames_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spent: float, is_result: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr("gpu.clock.time.monotonic", lambda: now[0])

    def hang(missing: Sequence[str], attempt: Attempt) -> None:
        attempt.started = True
        now[0] += spent
        raise TimeUpError

    runner = runner_of(folder)
    runner.run(stage_of(a_case(hang, "a")))
    found = runner.records.of("speed")
    assert ("took more than 240" in found["a"]["failed"]) if is_result else found == {}
    assert runner.left == ([] if is_result else ["speed case"])


def test_a_part_that_would_not_fit_is_not_begun(folder: Path) -> None:
    def work(missing: Sequence[str], attempt: Attempt) -> None:
        attempt.started = True
        attempt.add(missing[0], {})
        attempt.require(1000.0)

    runner = runner_of(folder, only=["ca*"])
    runner.run(stage_of(a_case(work, "a", "b"), a_case(all_of_them, "c", slug="not asked for")))
    assert runner.left == ["speed case"] and list(runner.records.of("speed")) == ["a"]


def test_time_is_up_where_something_waits() -> None:
    """Red where the wait is not interrupted: it would last for ever."""
    with pytest.raises(TimeUpError), Clock(1).at_most(0.1):
        subprocess.run(["sleep", "infinity"], check=True)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # nothing rings later


# --- Unpacking


ASSEMBLE = """
import pathlib, sys
site = pathlib.Path(sys.argv[sys.argv.index("--site") + 1])
site.mkdir(exist_ok=True)
with (site / "calls").open("a") as file: file.write("x")
(site / "env.sh").write_text("export FROM_PAYLOAD=1\\n")
"""


def make_wheel(folder: Path, name: str, content: Mapping[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in content.items():
            archive.writestr(inside, text)
    return path


def make_tree(folder: Path, version: str = "1.0") -> Path:
    package = folder / "sglang_smc"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "pyproject.toml").write_text((REPOSITORY / "pyproject.toml").read_text())
    return folder


def test_unpacking_is_done_once(tmp_path: Path) -> None:
    site, payload, tree = tmp_path / "site", tmp_path / "payload", make_tree(tmp_path / "tree")
    payload.mkdir()
    (payload / "assemble.py").write_text(ASSEMBLE)
    (payload / "part-00").write_bytes(b"1")
    make_wheel(payload, "pytest-9.0", {"pytest/__init__.py": "", "pytest-9.0.data/scripts/x": ""})
    for commit in ("a", "b"):
        (payload / pack.COMMIT).write_text(commit)
        unpack.unpack(site, payload, tree)
    assert (site / "calls").read_text() == "x"
    assert (site / "env.sh").read_text() == "export FROM_PAYLOAD=1\n"
    assert (site / "pytest" / "__init__.py").exists() and not (site / "pytest-9.0.data").exists()


def test_the_plugin_runs_from_the_tree(tmp_path: Path) -> None:
    """Whichever was there before; and SGLang finds its entry points."""
    site, payload = tmp_path / "site", tmp_path / "nothing"
    (site / "sglang_smc").mkdir(parents=True)
    (site / "sglang_smc" / "__init__.py").write_text("")
    for version in ("1.0", "1.1"):
        unpack.unpack(site, payload, make_tree(tmp_path / version, version))
    assert (site / "sglang_smc").resolve() == tmp_path / "1.1" / "sglang_smc"
    assert str(site) in (site / "env.sh").read_text()
    (found,) = (one for one in distributions(path=[str(site)]) if one.name == "sglang-smc")
    assert found.version == "1.1"
    points = {(point.group, point.name): point.value for point in found.entry_points}
    assert set(points) == {(group, name) for group, name, _ in ENTRY_POINTS}
    assert points["sglang.srt.plugins", "smc"] == "sglang_smc.plugin:register"


def test_another_plugin_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.preflight(on_gpu=False)
    spec = type("Spec", (), {"origin": str(make_tree(tmp_path) / "sglang_smc" / "__init__.py")})
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(BenchError, match="not this tree's"):
        machine.preflight(on_gpu=False)


# --- Packing

#: Of the payload that is there: SGLang 0.5.17, trimmed.
PAYLOAD_BYTES = 42_850_000


def test_what_travels_is_within_the_limit(tmp_path: Path) -> None:
    """Red where the tree grows beyond what such a machine is sent at a time."""
    unread = {REPOSITORY / path.lstrip("/") for path in pack.UNREAD}
    tree = set(pack.tracked())
    assert unread <= tree
    assert pack.summed(pack.size_of(tree - unread), PAYLOAD_BYTES).endswith(" of 60 MiB")
    with pytest.raises(BenchError, match=r"git sparse-checkout set .*eagle3"):
        pack.summed(pack.size_of(tree), PAYLOAD_BYTES)


def test_packing_fetches_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else but what the plugin imports, and what an earlier call fetched goes."""
    payload, asked = tmp_path / ".sg", list[str]()
    make_wheel(payload, "pytest-9.0", {})
    monkeypatch.setattr(pack, "tracked", list)
    monkeypatch.setattr(pack, "_pip", lambda *words: asked.extend(words))
    assert "tracked files 0.0 MB" in pack.pack((), payload)
    assert asked[-1:] == [*pack.RUN_WHEELS] and asked.count("download") == 1
    assert [path.name for path in payload.iterdir()] == [pack.COMMIT]
    (payload / "part-00").open("wb").truncate(pack.LIMIT)
    with pytest.raises(BenchError, match="of 60 MiB: too much"):
        pack.pack((), payload)


# --- Kernels


def test_files_of_tests_run_side_by_side(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {
        "test_one.py": "def test_a(): pass\ndef test_b(): assert 1 == 2\n",
        "test_two.py": "import pytest\n@pytest.mark.skip\ndef test_c(): pass\n",
        "test_three.py": "import os\nos._exit(7)\n",
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(body)
    monkeypatch.setattr(kernel_tests, "REPOSITORY", tmp_path)
    monkeypatch.setattr(kernel_tests, "code_fingerprint", dict)
    monkeypatch.setattr(kernel_tests, "test_files", lambda: list(bodies))
    runner = runner_of(folder)
    runner.run(Stage("kernels", 5, "", lambda: kernel_tests.kernel_cases(Places(folder, tmp_path))))
    found = runner.records.of("kernels")
    one, two, three = (found[name] for name in bodies)
    assert (one["passed"], one["broken"], one["skipped"]) == (1, 1, 0)
    assert len(one["wrong"]) == 1 and "test_b: assert 1 == 2" in one["wrong"][0]
    assert (two["passed"], two["skipped"]) == (0, 1)
    assert three["failed"].startswith("pytest ended with 7")


def test_what_tests_of_kernels_need_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("import json, nowhere.deep\nfrom elsewhere import x\nfrom toy_laws import y\n")
    assert kernel_tests.missing_for(path) == ["elsewhere", "nowhere"]
    files = kernel_tests.test_files()
    assert "tests/kernels/test_sample.py" in files
    assert not {path for path in files if Path(path).name in kernel_tests.NO_GPU}
    assert all((REPOSITORY / kernel_tests.FOLDER / name).exists() for name in kernel_tests.NO_GPU)
    assert all(kernel_tests.missing_for(REPOSITORY / file) == [] for file in files)
