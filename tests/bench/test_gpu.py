"""The command for a GPU machine, without one: what it begins, leaves, keeps, asks and reports."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dummies
import pytest
from contract.upstream import release
from fake_cuda import fake_cuda
from gpu import engines, expected, layers, report, run, smoke
from gpu.engines import LARGE, MORE, PROFILE, SPEED, SPEED_8B, SPEED_70B
from programs import printed
from speed.grid import (
    AR,
    BLOCK,
    BLOCK_HEAD,
    EXACT,
    EXACT_HEAD,
    HEAD,
    HOT_TOKENS,
    Cell,
    System,
    launch_of,
    write_models,
)
from speed.measure import preset_of, sampled
from speed.remote import RefusedError
from speed.runner import (
    RESULTS,
    Attempt,
    Case,
    Clock,
    Records,
    Runner,
    Stage,
    TimeUpError,
    read_results,
)
from speed_stand_ins import ORIGIN, FakeEngine
from study import PAIR, REPOSITORY, BenchError

from sglang_smc import __version__
from sglang_smc.tools.command.machine import ENTRY_POINTS

CODE = {"code": 1}
OF_BLOCK = {"architectures", "model_type", "dtype"}
VERSIONS = {"sglang": "0.5.17"}
ON_H200 = {**ORIGIN, "hardware": "H200", "gpu": {"driver_version": "580"}, "versions": VERSIONS}
H200 = "H200, driver 580, SGLang 0.5.17"


def records_in(*folders: Path, reads: Sequence[Path] = ()) -> Records:
    return Records(folders, reads, ON_H200)


# --- Results


def test_results_of_other_calls_are_carried_along(tmp_path: Path) -> None:
    """An emptied output folder, another machine's results and half a line make one file."""
    folder, other, state = (tmp_path / name for name in ("out", "other", "state"))
    records_in(other).add("speed", "ar", CODE, {"seconds": 1})
    with (other / RESULTS).open("a") as file:
        file.write('{"stage": "speed", "part": "sm')
    records_in(state).add("speed", "smc", CODE, {"seconds": 2})
    again = records_in(folder, state, reads=[other])
    again.add("speed", "exact", CODE, {"seconds": 3})
    machines, calls = read_results(folder)
    assert (list(machines[H200]["speed"]), len(calls)) == (["ar", "smc", "exact"], 3)
    assert (folder / RESULTS).read_text() == (state / RESULTS).read_text()
    assert again.lacks("speed", "ar", {"code": 2}) and again.lacks("smoke", "ar", CODE)


@pytest.mark.parametrize(
    "other",
    [{"hardware": "H100"}, {"gpu": {"driver_version": "590"}}, {"versions": {"sglang": "0.5.23"}}],
)
def test_results_of_two_machines_are_never_mixed(tmp_path: Path, other: dict[str, Any]) -> None:
    """Nor do any get lost; those of older files have their machine from their call."""
    records_in(tmp_path).add("speed", "ar", CODE, {"seconds": 1})
    lines = [json.loads(line) for line in (tmp_path / RESULTS).open()]
    lines[1]["identity"] = CODE | {"engine": {"log_level": "error"}}  # as files of old have it
    (tmp_path / RESULTS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    records = Records([tmp_path], [], {**ON_H200, **other})
    identity = CODE | {"engine": {}}
    assert records.of("speed") == {} and records.lacks("speed", "ar", identity)
    records.add("speed", "ar", identity, {"seconds": 2})
    assert not records.lacks("speed", "ar", identity)
    assert not records_in(tmp_path).lacks("speed", "ar", identity)
    machines, _ = read_results(tmp_path)
    assert [stages["speed"]["ar"]["seconds"] for stages in machines.values()] == [1, 2]


# --- Time, failures, resumption


def a_case(work: Callable[[Attempt], None], *parts: str, slug: str = "case") -> Case:
    return Case(slug, dict.fromkeys(parts, CODE), 1.0, work)


def stage_of(*found: Case) -> Stage:
    return Stage("speed", "a test", lambda: list(found))


def all_of_them(attempt: Attempt) -> None:
    attempt.started = True
    for part in attempt.missing:
        attempt.add(part, {"seconds": 1.0})


def runner_of(folder: Path) -> Runner:
    return Runner(records_in(folder), Clock(9.0), say=lambda _: None)


def test_any_failure_is_a_result_and_costs_no_other_case(tmp_path: Path) -> None:
    """As of engines that do not start or die of a cell, in test_speed.py; Ctrl-C is none."""
    starts: list[Sequence[str]] = []

    def work(attempt: Attempt) -> None:
        starts.append(attempt.missing)
        raise KeyError("x") if len(starts) > 1 else KeyboardInterrupt

    cases = a_case(work, "a", "b"), a_case(all_of_them, "next", slug="next")
    with pytest.raises(KeyboardInterrupt):
        runner_of(tmp_path).run(stage_of(*cases))
    for _ in range(2):  # what has failed is not asked again
        runner = runner_of(tmp_path)
        runner.run(stage_of(*cases))
        found = runner.records.of("speed")
        assert [part for part, one in found.items() if "failed" in one] == ["a", "b"]
        assert set(found) == {"a", "b", "next"} and runner.left == []
        assert found["b"]["failed"] == "KeyError: 'x'"
    assert starts == [["a", "b"]] * 2


@pytest.mark.parametrize(("spent", "is_result"), [(240.0, True), (30.0, False)])
def test_a_case_that_hangs_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: float, is_result: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr("speed.runner.time.monotonic", lambda: now[0])

    def hang(attempt: Attempt) -> None:
        attempt.started = True
        now[0] += spent
        raise TimeUpError

    runner = runner_of(tmp_path)
    runner.run(stage_of(a_case(hang, "a")))
    found = runner.records.of("speed")
    assert ("took more than 240" in found["a"]["failed"]) if is_result else found == {}
    assert runner.left == ([] if is_result else ["speed case"])


def test_time_is_up_where_something_waits() -> None:
    """Red where the wait is not interrupted: it would last for ever."""
    with pytest.raises(TimeUpError), Clock(1).at_most(0.1):
        subprocess.run(["sleep", "infinity"], check=True)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # nothing rings later


# --- What travels


def test_the_plugin_runs_from_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds its entry points, and another plugin is told."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $PYTHONPATH $@\n")  # in place of an engine
    python.chmod(0o755)
    site = tmp_path / "site"
    variables = {**os.environ, "PYTHON": str(python), "SG_SITE": str(site), "PYTHONPATH": ""}
    for _ in range(2):
        told = printed("bash", REPOSITORY / "bench" / "gpu" / "run.sh", "smoke", env=variables)
        assert told.startswith(f"{REPOSITORY}:{site} bench/gpu --state {site}/state --spent ")
    (found,) = (one for one in distributions(path=[str(site)]) if one.name == "sglang-smc")
    assert found.version == __version__
    points = {(point.group, point.name) for point in found.entry_points}
    assert points == {(group, name) for group, name, _ in ENTRY_POINTS}
    run.preflight(on_gpu=False)
    spec = type("Spec", (), {"origin": str(site / "sglang_smc" / "__init__.py")})
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(BenchError, match="not this tree's"):
        run.preflight(on_gpu=False)


def test_kernels_compiled_on_one_machine_come_back_to_the_next(tmp_path: Path) -> None:
    """As 0.5.23's payload compiles them, in `.jit` of its site; 0.5.17's has no such folder."""
    tree, folder = tmp_path / "tree", REPOSITORY / "bench" / "gpu"
    (tree / "bench" / "gpu").mkdir(parents=True)
    shutil.copy(folder / "run.sh", tree / "bench" / "gpu")
    for name in ("pyproject.toml", "sglang_smc"):
        (tree / name).symlink_to(REPOSITORY / name)
    (tree / ".sg").mkdir()
    (tree / ".sg" / "assemble.py").write_text(
        "import pathlib, sys\njit = pathlib.Path(sys.argv[3]) / '.jit'\n"
        "print(sys.argv[1:3], jit.is_dir())\njit.mkdir(exist_ok=True)\n(jit / 'rope.so').touch()\n"
    )
    (tmp_path / "python").write_text(f"#!/bin/sh\n[ $1 = bench/gpu ] || {sys.executable} $@\n")
    (tmp_path / "python").chmod(0o755)
    for call, is_back in (("first", False), ("second", True)):
        out = tmp_path / call
        out.mkdir()
        machine = {"PYTHON": str(tmp_path / "python"), "SG_SITE": str(out / "site")}
        environment = {**os.environ, **machine, "OUT": str(out)}
        told = printed("bash", tree / "bench" / "gpu" / "run.sh", "smoke", env=environment)
        assert told.strip() == f"['.sg', '--site'] {is_back}"
        assert (out / "jit.tar.xz").exists() is not is_back
        if not is_back:
            shutil.copy(out / "jit.tar.xz", tree / ".sg")


# --- Engines


def answer(**info: Any) -> dict[str, Any]:
    told = {"completion_tokens": 8, "finish_reason": {"type": "length"}, **info}
    return {"meta_info": told, "text": "", "output_ids": []}


ROUNDS = {"spec_smc_rounds_ct": 3, "spec_smc_replayed_ct": 3}


@pytest.mark.parametrize(
    ("kind", "info", "fault"),
    [
        (smoke.Kind("a"), ROUNDS, ""),
        (smoke.Kind("a"), ROUNDS | {"spec_smc_replayed_ct": 2}, "2 of 3 rounds"),
        (smoke.Kind("a", replays=False), {"spec_smc_rounds_ct": 3}, ""),
        (smoke.Kind("a"), {"finish_reason": {"type": "abort"}}, "it ended with"),
        (smoke.Kind("a"), {"completion_tokens": 0}, "it has 0 tokens"),
        (smoke.Kind("a"), {"spec_smc_nan_ct": 1}, "not numbers"),
        (smoke.Kind("a", asks=smoke.LOGPROBS), {"output_token_logprobs": []}, "no log-prob"),
    ],
)
def test_faults_of_an_answer(kind: smoke.Kind, info: dict[str, Any], fault: str) -> None:
    (*found,) = smoke.judged(kind, answer(**info), graphs=True)["wrong"]
    assert len(found) == bool(fault) and fault in "".join(found)


def test_log_probabilities_are_compared_while_texts_agree() -> None:
    reference = [[[1, -0.5], [2, -0.25], [3, -1.0]], [[7, -1.0]]]
    found = [[[1, -0.5], [2, -0.75], [4, -9.0]], [[8, -5.0]]]
    wrong = ["log-probabilities differ by 0.5, more than 0.15"]
    assert smoke.against(found, reference) == {
        "largest_difference": 0.5,
        "compared_tokens": 2,
        "wrong": wrong,
    }
    assert smoke.against(reference, reference)["wrong"] == []
    assert smoke.against([[[9, 0.0]], [[9, 0.0]]], reference)["wrong"] != []
    assert smoke.against(found, None) == {}


def test_a_refused_request_is_a_fault_of_its_kind() -> None:
    def refuse(**_: Any) -> None:
        raise RefusedError("refused: no")

    engine: Any = SimpleNamespace(generate=refuse)
    found = smoke.run_part(engine, "ar", "kinds", [[1]])
    assert found["kinds"] == len(smoke.STOCK) and "plain: refused: no" in found["wrong"]


def test_a_drafts_layers_are_timed_where_they_agree() -> None:
    """Red where what is timed is not the same, or a kind is the other's result."""
    found = layers.measure(3)
    assert found["wrong"] == [] and found["apart"]["stock"] == 0 < found["apart"]["int8"]
    assert {f"{kind}_ms" for kind in ("stock", "overlapped", "int8")} < found.keys()
    json.dumps(found)


def test_a_drafts_layers_on_a_gpu_are_those_that_servers_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a GPU that is not there."""
    from sglang_smc.kernels.attention import work
    from sglang_smc.kernels.skinny import skinny

    own: Any = SimpleNamespace(
        fused_add_rmsnorm=lambda *_: None, silu_and_mul=lambda rows: rows[:, : layers.MLP]
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", own)
    monkeypatch.setattr(work, "chip_of", lambda _: work.H100)
    monkeypatch.setattr(layers, "DEVICE", "cuda")
    product, attention = "_skinny", "_attend_spans"
    for num_rows in (8, 64):
        with fake_cuda(monkeypatch) as (_, account), account:
            one, attend = [layers.make_layer()], layers.attention_over(num_rows)
            x = one[0].norms[0].new_zeros(num_rows, layers.HIDDEN)
            account.calls.clear()
            layers.fused(skinny, one, attend, x)
            assert account.calls == [product, attention, product, product, product]
            account.calls.clear()
            assert layers.stock(one, attend, x).shape == x.shape
            assert (account.calls.count("mm"), account.calls.count(attention)) == (4, 1)


def test_cells_are_sampled_and_summed_up() -> None:
    cell = Cell(System(AR), 2, 256)
    engine: Any = FakeEngine(cell.system, [], [-1])
    found = sampled(engine, cell, SPEED_8B)
    assert found["round_ms"] == pytest.approx(1000 * 0.1 * 1.3)
    assert found["decode_tokens_per_second"] == pytest.approx(2 / 0.13)
    assert len(found["samples"]) == SPEED_8B.repeats and found["beside"] == []
    json.dumps(found)


def test_what_is_new_fits_into_fifteen_minutes() -> None:
    """In two calls: of 9 minutes, one of them to unpack, and of 4, with 90 seconds to start."""
    seconds = [sum(case.seconds for case in one.cases()) for one in run.stages(Path(), on_gpu=True)]
    assert sum(seconds[:6]) <= 8 * 60 and sum(seconds[:8]) <= 12 * 60


@pytest.mark.nightly
def test_an_h200_accepts_every_engine(tmp_path: Path) -> None:
    """SGLang's own reading of all keywords, with torch told of a GPU that is not there."""
    lists = ((SPEED + MORE, SPEED_8B), (PROFILE, engines.PROFILE_8B), (LARGE, SPEED_70B))
    for pair in (SPEED_8B.pair, SPEED_70B.pair):
        write_models(pair, tmp_path / "models")
        head = dummies.llama_config(replace(pair.target, num_layers=1))  # as `new_head` writes it
        head |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": HOT_TOKENS}
        dummies.write_model(tmp_path / "models" / pair.name / HEAD, head)
        sizes = dummies.llama_config(replace(pair.target, num_layers=5))
        blocks = json.loads((PAIR / BLOCK_HEAD / "config.json").read_text())
        blocks |= {name: sizes[name] for name in blocks.keys() & sizes.keys() - OF_BLOCK}
        layers = {"layer_types": ["full_attention"] * 5}
        blocks |= layers | {"num_target_layers": pair.target.num_layers}
        dummies.write_model(tmp_path / "models" / pair.name / BLOCK_HEAD, blocks)
    every = ((case, preset) for found, preset in lists for case in found)
    models = tmp_path / "models"
    asked = [launch_of(c.system, preset_of(c, preset), models).arguments for c, preset in every]
    asked += [smoke.launch_of(name, "cuda").arguments for name in smoke.ENGINES]
    script = REPOSITORY / "tests" / "support" / "pretended_gpu.py"
    told = printed(
        *(sys.executable, "-W", "ignore", script),
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert len(lines) == len(asked)
    for arguments, line in zip(asked, lines, strict=True):
        assert "refused" not in line, (arguments, line)
        assert line["algorithm"] == arguments.get("speculative_algorithm")
        assert line["sizes"] == arguments["cuda_graph_bs_decode"]
        assert line["prefill_graphs"] == "disabled"
        assert line["float32_logits"] == (line["algorithm"] == "SMC")


def test_a_trace_of_torchs_profiler_is_read(tmp_path: Path) -> None:
    """Red where torch or SGLang renames it: the kernels of rounds would not be found."""
    import torch

    with pytest.raises(BenchError, match="wrote 0 traces"):
        engines.events_in(tmp_path)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    trace = tmp_path / "1-TP-0-DECODE.trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    assert engines.events_in(tmp_path) == engines.round_of([]) == []
    with gzip.open(trace) as file:
        content = json.load(file)
    timed = [one for one in content["traceEvents"] if one.get("ph") == "X" and "cat" in one]
    one = max(timed, key=lambda event: event["dur"])
    begin = {**one, "cat": "kernel", "name": "begin"}
    for at in range(0, 200, 10):  # twenty rounds of three kernels
        content["traceEvents"] += [begin | {"ts": at, "dur": 2}] + [
            begin | {"ts": at + more, "dur": 3, "name": "twice"} for more in (6, 3)
        ]
    with gzip.open(trace, "wt") as file:
        json.dump(content, file)
    events = engines.events_in(tmp_path)
    assert engines.kernels_of(events) == [("twice", 2, 0.006), ("begin", 1, 0.002)]
    in_order = [("begin", 0.0, 2), ("twice", 1, 3), ("twice", 0, 3)]  # microseconds
    assert engines.round_of(events) == in_order
    root = release.installed()
    assert root is not None
    managers = root / "sglang" / "srt" / "managers"
    asked = (managers / "io_struct.py").read_text().partition("class ProfileReq(")[2]
    options = engines.PROFILE_OPTIONS
    assert all(f"    {name}: " in asked.partition("\nclass ")[0] for name in options)
    profiler_of_stages = (managers / "scheduler_components" / "profiler_manager.py").read_text()
    assert "_stop_profile(stage=ForwardMode.DECODE)" in profiler_of_stages


# --- The report


def a_speed(tokens: float) -> dict[str, Any]:
    """Nine tokens a round of one request."""
    info = {"completion_tokens": 91, "spec_verify_ct": 10}
    return {
        "decode_tokens_per_second": tokens,
        "round_ms": 9000 / tokens,
        "samples": [{"first": [1.0], "end": [1.0 + 90 / tokens], "infos": [info]}] * 2,
        "beside": [],
        "replayed_share": 1.0,
    }


def test_the_report_of_canned_lines(tmp_path: Path) -> None:
    """Lines as a GPU machine would write them."""
    records = records_in(tmp_path / "lines")
    block, exact = System(BLOCK, 8, 8), System(EXACT, 8, 8)
    for system, tokens in ((System(AR), 200.0), (block, 640.0), (exact, 510.0)):
        part = Cell(system, 1, 256).slug
        records.add("speed", part, CODE, a_speed(tokens))
        records.add("70b", part, CODE, a_speed(tokens))
    records.add("more", "standalone-chain-b1-p256", CODE, {"failed": "it said\nno"})
    # Rounds of 10 ms, 8 of them in two kernels.
    kernels = [["nvjet | a", 64.0, 5.0], ["_attend_spans", 32.0, 3.0]]
    profile = a_speed(900.0) | {"kernels": kernels}
    records.add("profile", "smc-block-n8-k8-b1-p256", CODE, profile)
    records.add("profile", "smc-exact-n8-k8-b1-p256", CODE, {"failed": "it died"})
    costs = {"costs": {"N=4 K=16": [[1, 0.0108], [8, 0.0226]]}}
    records.add("speed", "smc-adaptive-n4-k16-b1-p256", CODE, a_speed(900.0) | costs)
    times = {f"{kind}_ms": ms for kind, ms in (("stock", 1.2), ("fused", 1.0), ("int8", 0.5))}
    records.add(
        "layers", "layers-m8", CODE, {"rows": 8, "overlapped_ms": 0.8, "wrong": [], **times}
    )
    records.add("smoke", "smc-graphs kinds", CODE, {"kinds": 3, "wrong": ["top-p: 0 of 3"]})
    told = report.write_report(tmp_path / "lines", tmp_path)
    for line in (
        "| SMC block N=8 K=8 | 1 | 256 | 79.8 | 640.0 | 3.20 [3.20, 3.20] |",
        "| SMC exact N=8 K=8 | 1 | 256 | 77.3 | 510.0 | 2.55 [2.55, 2.55] |  | 1000.0 | 9.00",
        "- standalone-chain-b1-p256: it said no",
        f"# {H200}",
        "| smc-adaptive-n4-k16-b1-p256 | N=4 K=16 | 1: 10.8, 8: 22.6 |",
        "- smc-graphs kinds: top-p: 0 of 3",
        "| 8 | 1.200 | 1.000 | 0.800 | 0.500 |",
        "**smc-block-n8-k8-b1-p256**: 10.00 ms a round, 2.00 of it no kernel's",
        "| `nvjet / a` | 64 | 5.000 |",
        "- smc-exact-n8-k8-b1-p256: it died",
    ):
        assert line in told, line


def test_the_page_has_what_the_command_expects_of_an_h200() -> None:
    """And what was measured takes the place of what is modelled."""
    machines, _ = read_results(run.RAW)
    (stages,) = (some for name, some in machines.items() if "H200" in name)
    results = {**stages["speed"], **stages["more"]}
    assert expected.table(results) in (REPOSITORY / "docs" / "performance.md").read_text()
    shape = expected.ours(EXACT_HEAD, 4, 17)
    ms, is_measured = expected.milliseconds(results, shape, 1)
    # As much above its bound as N = K = 8, of as many rows.
    like = expected.ours(EXACT_HEAD, 8, 8)
    known, _ = expected.milliseconds(results, like, 1)
    assert not is_measured and ms / shape.bound(1) == pytest.approx(known / like.bound(1))
    cell = Cell(System(EXACT_HEAD, 4, 17), 1, 256)
    found = {**results, cell.slug: {"round_ms": 10.0}}
    assert expected.milliseconds(found, shape, 1) == (10.0, True)


@pytest.mark.nightly
@pytest.mark.engine
def test_a_dry_run_walks_through_engines_on_a_cpu(tmp_path: Path) -> None:
    """As a user calls it; a second call has nothing left to do."""
    command = ["bash", "bench/gpu/run.sh", "--dry-run", "--minutes", "600"]
    command += ["--only", "ar", "doctor", "layers-m8", "smc-torch", "smc-block*", "smc-exact-with*"]
    command += ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    environment = {**os.environ, "PYTHON": sys.executable}
    how: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "timeout": None}
    told = [printed(*command, **how) for _ in range(2)]
    assert "What a GPU machine would start" in told[0] and "all done" in told[0]
    (stages,) = read_results(tmp_path / "out" / "dry-run")[0].values()
    found = {stage: set(parts) for stage, parts in stages.items()}
    assert {"ar-b1-p32", "smc-block-n8-k8-b2-p32"} <= found["speed"]
    assert found["profile"] >= {f"smc-block-n8-k8-b{batch}-p32" for batch in (1, 2)}
    assert set(smoke.ON_A_CPU.values()) == {"smc-torch"}
    parts = "answers", smoke.SAME, smoke.CLIENT, smoke.AUDIT
    assert {"ar kinds", *(f"smc-torch {part}" for part in parts)} <= found["smoke"]
    assert found.keys() == set(run.STAGES) - {"more"}
    for part, one in (pair for parts in stages.values() for pair in parts.items()):
        assert "failed" not in one and not one.get("wrong"), (part, one)
    assert "s left" not in told[1]  # nothing was begun
