"""The command for a GPU machine, without one: its engines, what they are asked, and the report."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu import cases, cli, default_server, goals, kinds, report, smoke
from gpu.cases import LARGE, MORE, PROFILE, SPEED, SPEED_8B, SPEED_70B
from gpu.clock import Clock
from gpu.records import Records, read_results
from gpu.speed_stage import engine_cases, sampled
from gpu.stages import Places, Runner, Stage
from speed import presets
from speed.engines import Launch
from speed.grid import AR, BLOCK, EXACT, Cell, System
from speed.remote import EngineError, Sample, Work
from speed_stand_ins import FakeEngine
from study import REPOSITORY

CALL = {"id": "1", "date": "2026-01-01T00:00", "git_sha": "abc", "hardware": "NVIDIA H200"}
CALL |= {"versions": {"torch": "2.11.0"}, "gpu": {"driver_version": "580"}}
CODE = {"code": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


# --- Engines


def answer(**info: Any) -> dict[str, Any]:
    told = {"completion_tokens": 8, "finish_reason": {"type": "length"}, **info}
    return {"meta_info": told, "text": "", "output_ids": []}


def test_a_question_has_one_request_of_each_kind() -> None:
    asked = [*kinds.STOCK, *kinds.OURS]
    found = kinds.question(asked, [[5], [6, 7]])
    assert {len(value) for value in found.values()} == {len(asked)}
    at = next(i for i, kind in enumerate(asked) if kind.asks)
    assert (found["return_logprob"][at], found["top_logprobs_num"][at]) == (True, 3)
    assert (found["return_logprob"][0], found["top_logprobs_num"][0]) == (False, 0)


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

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        told = {"output_token_logprobs": [[-1.0, 5, None]] * 8}
        return {"answers": [answer(**told)] * len(question["generate"]["input_ids"])}


def test_an_engine_is_asked_for_all_of_its_parts() -> None:
    for one in smoke.ENGINES:
        engine: Any = FakeSmokeEngine()
        asked = (smoke.answers, smoke.each_kind, smoke.all_kinds, smoke.logprobs, smoke.known_kinds)
        found = [ask(engine, one, [[1, 2]] * 4) for ask in asked]
        assert f"{'smc' if one.is_smc else 'plain'}: 0 of 4 are right" in found[0]["wrong"]
        assert found[1]["kinds"] == found[2]["kinds"] == len(smoke.kinds_of(one))
        assert 0 < found[4]["kinds"] < found[2]["kinds"] or not one.is_smc
        assert found[3]["lines"] == [[[5, -1.0]] * 8] * 4


TINY_HEADS = cases.TINY_PAIR._replace(target=replace(cases.TINY_PAIR.target, num_layers=5))


class FakeServer:
    """A default server of 16 rounds, which says what it has."""

    def __init__(self, replayed: int, memory: dict[str, Any] | None) -> None:
        self.replayed, self.memory = replayed, memory

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        assert question == {"info": True}
        return {"info": [{"smc": {"memory": self.memory}}]}

    def ask(self, work: Work) -> Sample:
        rounds = {"spec_smc_rounds_ct": 16, "spec_smc_replayed_ct": self.replayed}
        return Sample([0.5], [2.1], [{"completion_tokens": 128, "spec_verify_ct": 16, **rounds}])


@pytest.mark.parametrize(
    ("replayed", "memory", "wrong"),
    [(16, {"pool_slots": 1}, 0), (15, {"pool_slots": 1}, 1), (0, None, 2)],
)
def test_a_default_server_is_looked_at(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    replayed: int,
    memory: dict[str, Any] | None,
    wrong: int,
) -> None:
    """Its keywords are the two models and the algorithm, and dummies of them."""
    started: list[Launch] = []

    @contextlib.contextmanager
    def running(launch: Launch, *_: Any) -> Iterator[FakeServer]:
        started.append(launch)
        yield FakeServer(replayed, memory)

    monkeypatch.setattr(default_server, "running", running)
    monkeypatch.setattr(default_server, "write_models", lambda *_: None)
    records = Records([folder], [], CALL)
    case = default_server.default_case(Places(folder, folder), "cuda")
    Runner(records, Clock(9), say=lambda _: None).run(Stage("smoke", 9, "", lambda: [case]))
    found = records.of("smoke")["default"]
    assert (found["first_ms"], found["round_ms"]) == (500.0, pytest.approx(100.0))
    assert len(found["wrong"]) == wrong and found["start_seconds"] >= 0
    models = {"model_path", "speculative_draft_model_path", "load_format"}
    assert set(started[0].arguments) == {*models, "speculative_algorithm"}


def test_the_head_has_what_both_who_draft_with_it_ask_for(tmp_path: Path) -> None:
    """SGLang's EAGLE-3 and mode exact start with one folder, whose weights are real files."""
    cases.write_models(TINY_HEADS, tmp_path, cases.HEAD)
    head = tmp_path / TINY_HEADS.name / cases.HEAD
    config = json.loads((head / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 1024 and config["hidden_size"] == 64
    assert (head / "model.safetensors").exists()
    folders = {
        launch.arguments["speculative_draft_model_path"]
        for launch in (cases.launch_of(case, SPEED_8B, tmp_path) for case in cases.HEADS)
    }
    assert len(folders) == 1


def test_a_refused_request_is_a_fault_of_its_kind() -> None:
    engine: Any = type("Refusing", (), {"exchange": lambda *_: {"refused": "no"}})()
    found = smoke.judged_alone(engine, kinds.Kind("a"), [[1]], graphs=True)
    assert found["wrong"] == ["refused: no"]
    with pytest.raises(EngineError, match="refused: no"):
        smoke.ask(engine, {})


def test_cells_are_sampled_and_summed_up(folder: Path) -> None:
    cell = Cell(System(AR), 2, 256)
    found = sampled(FakeEngine(cell.system, [], [-1]), cell, SPEED_8B)
    assert found["round_ms"] == pytest.approx(1000 * 0.1 * 1.3)
    assert found["decode_tokens_per_second"] == pytest.approx(2 / 0.13)
    assert found["tokens_per_round"] == 1 and len(found["samples"]) == SPEED_8B.repeats
    json.dumps(found)


def test_only_engines_of_the_plugin_depend_on_its_code(folder: Path) -> None:
    found = {c.slug: c for c in engine_cases(SPEED, SPEED_8B, Places(folder, folder))}
    plain, smc = (next(iter(found[slug].parts.values())) for slug in ("ar", "smc-block-n8-k8"))
    assert "plugin" in smc and "plugin" not in plain
    assert "model_path" not in smc["engine"] and str(folder) not in json.dumps(smc)


def test_the_list_fits_into_the_time_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, and the first four stages within three calls, with a minute each to unpack."""
    assert cli.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert float(told.split()[1]) <= 28
    first = cli.stages(Places(Path(), Path()), on_gpu=True)[:4]
    assert [stage.name for stage in first] == ["smoke", "speed", "kernels", "profile"]
    assert sum(case.seconds for stage in first for case in stage.cases()) <= 3 * 8 * 60
    assert "speculative_algorithm='SMC'" in told and "-m pytest" in told


@pytest.mark.slow
def test_an_h200_accepts_every_engine(tmp_path: Path) -> None:
    """SGLang's own reading of all keywords, with torch told of a GPU that is not there."""
    lists = ((SPEED + MORE, SPEED_8B), (PROFILE, cases.PROFILE_8B), (LARGE, SPEED_70B))
    for pair in (SPEED_8B.pair, SPEED_70B.pair):
        cases.write_models(pair, tmp_path)
        head = presets.config(replace(pair.target, num_layers=1))  # as `new_eagle3` writes it
        head |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": cases.HOT_TOKENS}
        presets.write_model(tmp_path / pair.name / cases.HEAD, head)
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
        assert line["float32_logits"] == (line["algorithm"] == "SMC")


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


A_DEFAULT_SERVER = {
    "start_seconds": 140.2,
    "first_ms": 20.0,
    "round_ms": 14.5,
    "free_mib": 5120,
    "memory": {"pool_bytes": 50 << 30, "pool_slots": 345_000, "beside": {"round graphs": 6 << 30}},
    "wrong": [],
}


def canned(folder: Path) -> None:
    """Lines as a GPU machine would write them, of which nobody measured any."""
    records = Records([folder], [], CALL)
    block, exact = System(BLOCK, 8, 8), System(EXACT, 8, 8)
    for system, tokens in ((System(AR), 200.0), (block, 640.0), (exact, 510.0)):
        part = Cell(system, 1, 256).slug
        records.add("speed", part, CODE, a_speed(tokens, system=system.name))
        records.add("70b", part, CODE, a_speed(tokens, system=system.name))
    records.add("speed", Cell(block, 1, 4096).slug, CODE, a_speed(600.0, prompt=4096))
    records.add("speed", "eagle-3-b1-p256", CODE, a_speed(400.0, system="EAGLE-3"))
    records.add("more", "standalone-tree-b1-p256", CODE, {"failed": "it said\nno"})
    records.add("smoke", "default", CODE, A_DEFAULT_SERVER)
    records.add("smoke", "smc-graphs kinds", CODE, {"kinds": 3, "wrong": ["top-p: 0 of 3"]})


def test_the_report_of_canned_lines(folder: Path, tmp_path: Path) -> None:
    canned(folder)
    told = report.write_report(folder, tmp_path)
    for line in (
        "commit abc: NVIDIA H200, driver 580; torch 2.11.0",
        "| smc, whole blocks, batch 1, prompt 256: tokens/s | 617 | 640 | as expected |",
        "| SGLang's EAGLE-3 with the same head, batch 1, prompt 256: ms a round | 7.4 | 22.5 |",
        "| 70B FP8 + 1B, smc, batch 1: times AR | 5.20 | 3.20 | worse |",
        "| adaptive, batch 64: times AR | 1.00 |  | not measured |",
        "One request of a chat: 20 ms to the first token, 14.5 ms a round.",
        "- standalone-tree-b1-p256: it said no",
        "- smc-graphs kinds: top-p: 0 of 3",
        "nearly all of these weights are zeros",
    ):
        assert line in told, line
    assert (tmp_path / "gpu.md").read_text() == told
    assert (tmp_path / "speed.png").stat().st_size > 0
    assert "8B+1B,ar-b1-p256,200.0" in (tmp_path / "speed.csv").read_text()


def a_profile() -> dict[str, Any]:
    """Rounds of 10 ms, 8 of them in two kernels, as `bench/speed --rounds` keeps them."""
    sums = [
        ["draft", "GEMMs", "nvjet | a", 64.0, 0.005],
        ["target", "attention", "_attend_spans", 32.0, 0.003],
    ]
    replayed = {"rounds": 20, "sums": sums, "forwards": [0.008] * 20, "busy": [0.008] * 20}
    one = {"batch": 1, "recorded": False, "round": 0.01, "forwards": {}, "alone": None, "parts": {}}
    steps = [[0.0, 1], [0.011, 1], [0.022, 1]]
    burst = {"steps": steps, "rounds": [one] * 3, "replays": replayed}
    return {"entries": [{"bursts": [burst], "tokens_per_round": 9.0}]}


def test_the_report_says_where_a_round_goes(folder: Path, tmp_path: Path) -> None:
    records = Records([folder], [], CALL)
    records.add("profile", "smc-block-n8-k8-b1-p256", CODE, a_profile())
    records.add("profile", "smc-exact-n8-k8-b1-p256", CODE, {"failed": "it died"})
    told = report.write_report(folder, tmp_path)
    assert "| SMC block N=8 K=8 | 1 | 256 | 10.00 | 8.00 | 1.25 [1.25, 1.25] | 5.00 |" in told
    assert "| `nvjet / a` | draft | GEMMs | 64 | 5.000 |" in told
    assert "- smc-exact-n8-k8-b1-p256: it died" in told
    assert (tmp_path / "rounds.png").stat().st_size > 0
    assert "gaps_seconds" in (tmp_path / "rounds.csv").read_text()


def test_every_goal_is_of_something_that_is_measured() -> None:
    """Red where a goal names a cell that no stage has."""
    speeds = {
        "speed": {cell.slug: a_speed(900.0) for case in SPEED for cell in case.cells},
        "70b": {cell.slug: a_speed(900.0) for case in LARGE for cell in case.cells},
    }
    assert "not measured" not in {line[-1] for line in goals.lines(speeds)}


def test_a_result_is_held_against_its_estimate() -> None:
    speed = goals.Goal("", "speed", 100.0, "", lambda _: None)
    by_speed = {100.0: "as expected", 81: "as expected", 126: "better", 79: "worse"}
    assert {value: goals.verdict(speed, value) for value in by_speed} == by_speed
    time = speed._replace(is_time=True)
    assert [goals.verdict(time, value) for value in (126, 79)] == ["worse", "better"]
    least = speed._replace(slack=1.0)
    assert [goals.verdict(least, value) for value in (99, 100)] == ["worse", "as expected"]
    part = Cell(System(cases.AR_DRAFT), 1, 256).slug
    assert goals.draft_floor({part: a_speed(9000.0)}) == pytest.approx(8.0)
    assert goals.draft_floor({}) is None


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
            assert "failed" not in one and not one.get("wrong"), (
                part,
                one.get("failed"),
                one.get("wrong"),
            )
    assert "s left" not in told[1]  # nothing was begun
