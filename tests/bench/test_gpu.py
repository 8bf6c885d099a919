"""The command for a GPU machine, without one: what it unpacks, begins, leaves and reports."""

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu import cases, cli, goals, kernel_tests, kinds, machine, report, smoke, unpack
from gpu.cases import LARGE, MORE, PROFILE, SPEED, SPEED_8B, SPEED_70B
from gpu.clock import Clock, TimeUpError
from gpu.records import RESULTS, Records, read_results
from gpu.speed_stage import engine_cases, sampled
from gpu.stages import Attempt, Case, Places, Runner, Stage
from speed.grid import AR, BLOCK, EXACT, Cell, System
from speed.remote import EngineError
from speed_stand_ins import FakeEngine
from study import REPOSITORY

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
    records = records_in(folder)
    assert not records.has("speed", "ar", CODE)
    records.add("speed", "ar", CODE, {"seconds": 1.5})
    for later in (records, records_in(folder, name="2")):
        assert later.has("speed", "ar", CODE)
        assert not later.has("speed", "ar", {"code": 2})
        assert not later.has("smoke", "ar", CODE)
    assert records.is_of_this_call("speed", "ar")
    assert not records_in(folder, name="3").is_of_this_call("speed", "ar")


def test_results_of_other_calls_are_carried_along(folder: Path, tmp_path: Path) -> None:
    """An output folder that was emptied, and another machine's results, make one file."""
    other, state = tmp_path / "other", tmp_path / "state"
    records_in(other).add("speed", "ar", CODE, {"seconds": 1})
    records_in(state, name="2").add("speed", "smc", CODE, {"seconds": 2})
    again = records_in(folder, state, name="3", reads=[other])
    again.add("speed", "exact", CODE, {"seconds": 3})
    stages, calls = read_results(folder)
    assert list(stages["speed"]) == ["ar", "smc", "exact"]
    assert list(calls) == ["1", "2", "3"]
    assert (folder / RESULTS).read_text() == (state / RESULTS).read_text()


def test_half_a_line_is_not_a_result(folder: Path) -> None:
    records_in(folder).add("speed", "ar", CODE, {"seconds": 1})
    with (folder / RESULTS).open("a") as file:
        file.write('{"stage": "speed", "part": "sm')
    assert records_in(folder, name="2").has("speed", "ar", CODE)
    assert all(json.loads(line) for line in (folder / RESULTS).open())


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


def test_only_what_is_asked_for_runs(folder: Path) -> None:
    runner = runner_of(folder, only=["smc-*"])
    smc, plain = (a_case(all_of_them, slug, slug=slug) for slug in ("smc-block", "ar"))
    runner.run(stage_of(plain, smc))
    assert list(runner.records.of("speed")) == ["smc-block"]


def test_a_part_that_brings_its_engine_down_costs_itself_alone(folder: Path) -> None:
    starts = []

    def work(missing: Sequence[str], attempt: Attempt) -> None:
        starts.append(list(missing))
        attempt.started = True
        for part in missing:
            if part == "bad":
                raise EngineError("OutOfMemoryError: too large")
            attempt.add(part, {})

    runner = runner_of(folder)
    runner.run(stage_of(a_case(work, "good", "bad", "late")))
    found = runner.records.of("speed")
    assert starts == [["good", "bad", "late"], ["late"]]
    assert found["bad"]["failed"] == "OutOfMemoryError: too large"
    assert "failed" not in found["good"] and "failed" not in found["late"]


def test_an_engine_that_does_not_start_is_not_asked_again(folder: Path) -> None:
    starts = []

    def work(missing: Sequence[str], attempt: Attempt) -> None:
        starts.append(missing)
        raise EngineError("ValueError: no such backend")

    for name in ("1", "2"):
        runner = runner_of(folder, name=name)
        runner.run(stage_of(a_case(work, "a", "b")))
    assert len(starts) == 1
    assert [one["failed"] for one in runner.records.of("speed").values()] == [
        "ValueError: no such backend"
    ] * 2


def sleeps(missing: Sequence[str], attempt: Attempt) -> None:
    attempt.started = True
    time.sleep(20)


def test_a_case_that_hangs_is_a_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.stages.LEAST_PATIENCE", 0.2)
    runner = runner_of(folder)
    runner.run(stage_of(a_case(sleeps, "a", seconds=0.01)))
    assert "took more than" in runner.records.of("speed")["a"]["failed"]


def test_a_call_that_is_over_blames_nobody(folder: Path) -> None:
    runner = runner_of(folder, minutes=0.5 / 60)
    runner.run(stage_of(a_case(sleeps, "a", seconds=0.1)))
    assert runner.left == ["speed case"] and runner.records.of("speed") == {}


def test_time_is_up_where_something_waits() -> None:
    began = time.monotonic()
    with pytest.raises(TimeUpError), Clock(1).at_most(0.1):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(20)"], check=True)
    assert time.monotonic() - began < 10
    with Clock(1).at_most(0.1):
        pass
    time.sleep(0.2)  # nothing rings later


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


def test_unpacking_is_done_once(tmp_path: Path) -> None:
    site, payload, dist = (tmp_path / name for name in ("site", "payload", "dist"))
    payload.mkdir()
    (payload / "assemble.py").write_text(ASSEMBLE)
    (payload / "part-00").write_bytes(b"1")
    make_wheel(payload, "pytest-9.0", {"pytest/__init__.py": "", "pytest-9.0.data/scripts/x": ""})
    own = {"sglang_smc/__init__.py": "", "sglang_smc/kernels/a.py": "1"}
    entries = "sglang_smc-1.0.dist-info/entry_points.txt"
    make_wheel(dist, "sglang_smc-1.0", {**own, "sglang_smc/old.py": "", entries: "[x]"})
    for _ in range(2):
        unpack.unpack(site, payload, dist)
    assert (site / "calls").read_text() == "x"
    assert (site / "env.sh").read_text() == "export FROM_PAYLOAD=1\n"
    assert (site / "pytest" / "__init__.py").exists() and not (site / "pytest-9.0.data").exists()
    assert (site / entries).read_text() == "[x]" and (site / "sglang_smc" / "old.py").exists()
    make_wheel(dist, "sglang_smc-1.0", own)  # another tree's
    unpack.unpack(site, payload, dist)
    assert not (site / "sglang_smc" / "old.py").exists() and not (site / entries).exists()
    assert (site / "calls").read_text() == "x"


def test_where_sglang_is_installed_only_the_plugin_is_unpacked(tmp_path: Path) -> None:
    make_wheel(tmp_path / "dist", "sglang_smc-1.0", {"sglang_smc/__init__.py": ""})
    site = tmp_path / "site"
    unpack.unpack(site, tmp_path / "nothing", tmp_path / "dist")
    assert str(site) in (site / "env.sh").read_text()
    make_wheel(tmp_path / "dist", "sglang_smc-1.1", {})
    with pytest.raises(SystemExit, match="2 wheels"):
        unpack.unpack(site, tmp_path / "nothing", tmp_path / "dist")


def test_a_wheel_of_another_tree_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.stale_files() == []
    package = tmp_path / "sglang_smc"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    spec = type("Spec", (), {"origin": str(package / "__init__.py")})
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: spec)
    assert "sglang_smc/__init__.py" in machine.stale_files()
    assert "kernels/sample.py" in machine.stale_files()


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
    told = report.kernels(found)
    assert "| test_one.py | 1 | 1 |" in told and "test_b" in told and "ended with 7" in told


def test_what_tests_of_kernels_need_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("import json, nowhere.deep\nfrom elsewhere import x\nfrom toy_laws import y\n")
    assert kernel_tests.missing_for(path) == ["elsewhere", "nowhere"]
    files = kernel_tests.test_files()
    assert {"tests/kernels/test_sample.py", "tests/unit/test_host_sync.py"} <= set(files)
    assert all(kernel_tests.missing_for(REPOSITORY / file) == [] for file in files)


# --- Engines


def answer(**info: Any) -> dict[str, Any]:
    told = {"completion_tokens": 8, "finish_reason": {"type": "length"}, **info}
    return {"meta_info": told, "text": "", "output_ids": []}


def test_a_question_has_one_request_of_each_kind() -> None:
    asked = [*kinds.STOCK, *kinds.OURS]
    found = kinds.question(asked, [[5], [6, 7]])
    lengths = {len(value) for value in found.values()}
    assert lengths == {len(asked)} and found["input_ids"][:3] == [[5], [6, 7], [5]]
    at = next(i for i, kind in enumerate(asked) if kind.asks)
    assert (found["return_logprob"][at], found["top_logprobs_num"][at]) == (True, 3)
    assert (found["return_logprob"][0], found["top_logprobs_num"][0]) == (False, 0)
    modes = [
        p.get("custom_params", {}).get("smc", {}).get("mode") for p in found["sampling_params"]
    ]
    assert {"smc", "exact", "mixed", "auto"} <= set(modes)


@pytest.mark.parametrize(
    ("kind", "info", "fault"),
    [
        (kinds.Kind("a"), {"spec_smc_rounds_ct": 3, "spec_smc_replayed_ct": 3}, ""),
        (kinds.Kind("a"), {"spec_smc_rounds_ct": 3, "spec_smc_replayed_ct": 2}, "2 of 3 rounds"),
        (kinds.Kind("a"), {"spec_smc_rounds_ct": 3}, "None of 3 rounds"),
        (kinds.Kind("a", replays=False), {"spec_smc_rounds_ct": 3}, ""),
        (kinds.Kind("a"), {"finish_reason": {"type": "abort"}}, "it ended with"),
        (kinds.Kind("a"), {"completion_tokens": 0}, "it has 0 tokens"),
        (kinds.Kind("a"), {"spec_smc_nan_ct": 1}, "not numbers"),
        (kinds.Kind("a", asks=kinds.LOGPROBS), {"output_token_logprobs": []}, "0 log-prob"),
    ],
)
def test_an_answer_is_judged(kind: kinds.Kind, info: dict[str, Any], fault: str) -> None:
    (*found,) = kinds.judged(kind, answer(**info), graphs=True)["wrong"]
    assert len(found) == bool(fault) and fault in "".join(found)


def test_log_probabilities_are_compared_while_texts_agree() -> None:
    reference = [[[1, -0.5], [2, -0.25], [3, -1.0]], [[7, -1.0]]]
    found = [[[1, -0.5], [2, -0.75], [4, -9.0]], [[8, -5.0]]]
    assert smoke.compared(reference, found) == (0.5, 2)
    known = {f"{smoke.REFERENCE} {smoke.SAME}": {"lines": reference}}
    (wrong,) = smoke.against({"lines": found}, known)["wrong"]
    assert "differ by 0.5" in wrong
    assert smoke.against({"lines": reference}, known)["wrong"] == []
    assert smoke.against({"lines": [[[9, 0.0]], [[9, 0.0]]]}, known)["wrong"] != []
    assert smoke.against({"lines": found}, {}) == {}


class FakeSmokeEngine:
    """Answers every request with eight tokens of log-probability -1."""

    def __init__(self) -> None:
        self.asked = 0

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        number = len(question["generate"]["input_ids"])
        self.asked += number
        told = {"output_token_logprobs": [[-1.0, 5, None]] * 8}
        return {"answers": [answer(**told)] * number}


@pytest.mark.parametrize("one", smoke.ENGINES, ids=lambda one: one.slug)
def test_an_engine_is_asked_for_all_of_its_parts(one: smoke.SmokeEngine) -> None:
    engine: Any = FakeSmokeEngine()
    prompts = [[1, 2]] * 4
    asked = (smoke.answers, smoke.each_kind, smoke.all_kinds, smoke.logprobs, smoke.known_kinds)
    found = [ask(engine, one, prompts) for ask in asked]
    assert f"{'smc' if one.is_smc else 'plain'}: 0 of 4 are right" in found[0]["wrong"]
    assert found[1]["kinds"] == found[2]["kinds"] == len(smoke.kinds_of(one))
    assert 0 < found[4]["kinds"] < found[2]["kinds"] or not one.is_smc
    assert found[3]["lines"] == [[[5, -1.0]] * 8] * 4


def test_a_refused_request_is_a_fault_of_its_kind() -> None:
    engine: Any = type("Refusing", (), {"exchange": lambda *_: {"refused": "no"}})()
    found = smoke.judged_alone(engine, kinds.Kind("a"), [[1]], graphs=True)
    assert found["wrong"] == ["refused: no"]
    with pytest.raises(EngineError, match="refused: no"):
        smoke.ask(engine, {})


def test_cells_are_sampled_and_summed_up(folder: Path) -> None:
    asked: list[Any] = []
    cell = Cell(System(AR), 2, 256)
    found = sampled(FakeEngine(cell.system, asked, [-1]), cell, SPEED_8B)
    assert len(asked) == 1 + SPEED_8B.repeats
    assert found["round_ms"] == pytest.approx(1000 * 0.1 * 1.3)
    assert found["decode_tokens_per_second"] == pytest.approx(2 / 0.13)
    assert found["tokens_per_round"] == 1 and "replayed_share" not in found
    assert len(found["samples"]) == SPEED_8B.repeats
    json.dumps(found)


def test_only_engines_of_the_plugin_depend_on_its_code(folder: Path) -> None:
    found = {c.slug: c for c in engine_cases(SPEED, SPEED_8B, Places(folder, folder))}
    plain, smc = (next(iter(found[slug].parts.values())) for slug in ("ar", "smc-block-n8-k8"))
    assert "plugin" in smc and "plugin" not in plain
    assert "model_path" not in smc["engine"] and str(folder) not in json.dumps(smc)


def test_the_list_fits_into_the_time_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Less what the payload brings along, which is at the end of its stage."""
    assert cli.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert float(told.split()[1]) <= 28
    for word in ("speculative_algorithm='SMC'", "SGLANG_SIMULATE_ACC_LEN=4.47", "-m pytest"):
        assert word in told


@pytest.mark.slow
def test_an_h200_accepts_every_engine(tmp_path: Path) -> None:
    """SGLang's own reading of all keywords, with torch told of a GPU that is not there."""
    lists = ((SPEED + MORE, SPEED_8B), (PROFILE, cases.PROFILE_8B), (LARGE, SPEED_70B))
    for preset in (SPEED_8B, SPEED_70B):
        cases.write_models(preset.pair, tmp_path)
    asked = [
        cases.launch_of(case, preset, tmp_path).arguments
        for found, preset in lists
        for case in found
    ]
    asked += [smoke.launch_of(one, "cuda").arguments for one in smoke.ENGINES]
    script = REPOSITORY / "tests" / "pretended_gpu.py"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    lines = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(asked)
    for arguments, line in zip(asked, lines, strict=True):
        assert "refused" not in line, (arguments, line)
        assert line["algorithm"] == arguments.get("speculative_algorithm")
        assert line["sizes"] == arguments["cuda_graph_bs_decode"]
        assert line["prefill_graphs"] == "disabled"


# --- The report


def a_speed(tokens: float, batch: int = 1, prompt: int = 256, system: str = AR) -> dict[str, Any]:
    return {
        "system": system,
        "batch": batch,
        "prompt": prompt,
        "decode_tokens_per_second": tokens,
        "tokens_per_second": tokens,
        "round_ms": 9000 / tokens,
        "first_ms": 20.0,
        "tokens_per_round": 9.0,
        "simulated": None,
        "replayed_share": 1.0,
    }


def canned(folder: Path) -> None:
    """Lines as a GPU machine would write them, of which nobody measured any."""
    records = records_in(folder)
    block, exact = System(BLOCK, 8, 8), System(EXACT, 8, 8)
    for system, tokens in ((System(AR), 200.0), (block, 640.0), (exact, 510.0)):
        part = Cell(system, 1, 256).slug
        records.add("speed", part, CODE, a_speed(tokens, system=system.name))
        records.add("70b", part, CODE, a_speed(tokens, system=system.name))
    records.add("speed", Cell(block, 1, 4096).slug, CODE, a_speed(600.0, prompt=4096))
    records.add("more", "eagle-shape-b1-p256", CODE, {"failed": "it said\nno"})
    records.add("smoke", "smc-graphs kinds", CODE, {"kinds": 3, "wrong": ["top-p: 0 of 3"]})
    records.add("smoke", "payload 1b-fa3", CODE, {"tok_s_bs1": 700.5})


def test_the_report_of_canned_lines(folder: Path, tmp_path: Path) -> None:
    canned(folder)
    told = report.write_report(folder, tmp_path)
    for line in (
        "commit abc: NVIDIA H200, driver 580; torch 2.11.0",
        "| 8B + 1B, smc, batch 1, prompt 256: tokens/s | 650 | 640 | missed |",
        "| 8B + 1B, exact, batch 1, prompt 256: tokens/s | 500 | 510 | met |",
        "| smc: speed at prompt 4096 over that at 256 | 0.88 | 0.94 | met |",
        "| 70B FP8 + 1B, smc, batch 1: times AR | 5.20 | 3.20 | missed |",
        "| adaptive, batch 64: times AR | 1.00 |  | not measured |",
        "| SMC block N=8 K=8 | 1 | 256 | 640 | 3.20 | 14.06 | 9.00 |",
        "- eagle-shape-b1-p256: it said no",
        "| smc-graphs kinds | 1 |",
        "- smc-graphs kinds: top-p: 0 of 3",
        "| payload 1b-fa3 | tok_s_bs1 700.5 |",
        "nearly all of these weights are zeros",
    ):
        assert line in told, line
    assert (tmp_path / "gpu.md").read_text() == told
    assert (tmp_path / "speed.png").stat().st_size > 0
    assert "8B+1B,ar-b1-p256,200.0" in (tmp_path / "speed.csv").read_text()


def test_every_goal_is_of_something_that_is_measured() -> None:
    """Red where a goal names a cell that no stage has."""
    speeds = {
        "speed": {cell.slug: a_speed(900.0) for case in SPEED for cell in case.cells},
        "70b": {cell.slug: a_speed(900.0) for case in LARGE for cell in case.cells},
    }
    assert {line[-1] for line in goals.lines(speeds)} == {"met", "missed"}


def test_without_results_there_is_no_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--out", str(folder)]) == 1
    assert "holds no results" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.engine
def test_a_dry_run_walks_through_engines_on_a_cpu(tmp_path: Path) -> None:
    """As a user calls it; a second call has nothing left to do."""
    command = ["bash", "bench/gpu/run.sh", "speed", "profile", "smoke", "--dry-run"]
    command += ["--only", "machine", "ar", "smc-block*", "smc-torch", "--minutes", "20"]
    command += ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    environment = {**os.environ, "PYTHON": sys.executable}
    told = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
        )
        told.append(done.stdout)
    assert "What a GPU machine would start" in told[0] and "all done" in told[0]
    stages, _ = read_results(tmp_path / "out" / "dry-run")
    found = {stage: set(parts) for stage, parts in stages.items()}
    assert {"ar-b1-p32", "smc-block-n8-k8-b2-p32", "machine"} <= found["speed"]
    assert found["profile"] == {"smc-block-n8-k8-b1-p32"}
    assert {"smc-torch answers", "smc-torch log-probabilities", "ar kinds"} <= found["smoke"]
    for parts in stages.values():
        for part, one in parts.items():
            assert "failed" not in one and not one.get("wrong"), (part, one)
    assert "s left" not in told[1]  # nothing was begun
