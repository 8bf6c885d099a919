"""The command for a GPU machine, without one: what it begins, leaves, keeps, asks and reports."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dummies
import pytest
from contract.upstream import release
from fake_cuda import fake_cuda
from gpu import engines, expected, layers, report, run, smoke, travel
from gpu.engines import LARGE, MORE, PROFILE, SPEED, SPEED_8B, SPEED_70B
from programs import printed
from speed import measure
from speed.conditions import EngineStart, compiled_since, conditions
from speed.grid import (
    AR,
    BLOCK,
    BLOCK_HEAD,
    EXACT,
    EXACT_HEAD,
    FUSED,
    HEAD,
    HOT_TOKENS,
    SpeedCell,
    System,
    launch_of,
    write_models,
)
from speed.measure import preset_of, sampled
from speed.remote import InvalidRequestError
from speed.runner import (
    LEAST_PATIENCE,
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
from study import PAIR, PUBLISHED, REPOSITORY, BenchError

from sglang_smc.options.policy import Budget, Curve, RoundCosts
from sglang_smc_tools.demo.serving import Launch

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


@pytest.mark.parametrize(("spent", "is_result"), [(120.0, True), (30.0, False)])
def test_a_case_that_hangs_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: float, is_result: bool
) -> None:
    """Red where what is slow, but comes, is given up: the first part takes as long."""
    now = [0.0]
    monkeypatch.setattr("speed.runner.time.monotonic", lambda: now[0])

    def hang(attempt: Attempt) -> None:
        attempt.started = True
        if "first" in attempt.missing:
            now[0] += 100
            attempt.add("first", {"seconds": 100})
        now[0] += spent
        raise TimeUpError

    runner = runner_of(tmp_path)
    runner.run(stage_of(a_case(hang, "first", "a")))
    found = runner.records.of("speed")
    assert found["first"]["seconds"] == 100
    assert ("nothing came for 120 s" in found["a"]["failed"]) if is_result else "a" not in found
    assert runner.left == ([] if is_result else ["speed case"])


@pytest.mark.parametrize(("seconds", "slower", "limit"), [(1, 1, 120), (200, 1, 300), (1, 5, 600)])
def test_patience_is_two_minutes_unless_a_case_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, slower: float, limit: float
) -> None:
    """Red where a first start that hangs costs a whole call."""
    limits: list[float] = []
    monkeypatch.setattr(Attempt, "failure", lambda _, limit: limits.append(limit))
    runner = runner_of(tmp_path)
    runner.slower = slower
    runner.run(stage_of(a_case(all_of_them, "a")._replace(seconds=seconds)))
    assert limits == [limit]


def test_a_result_renews_the_time_of_a_block() -> None:
    """Red where a case of many parts is interrupted after the time of one."""
    clock = Clock(1)
    with clock.at_most(0.4):
        for _ in range(3):
            time.sleep(0.2)
            clock.renew()
    clock.renew()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # nothing runs


def test_time_is_up_where_something_waits() -> None:
    """Red where the wait is not interrupted: it would last for ever."""
    with pytest.raises(TimeUpError), Clock(1).at_most(0.1):
        subprocess.run(["sleep", "infinity"], check=True)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # nothing rings later


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
        raise InvalidRequestError("refused: no")

    engine: Any = SimpleNamespace(generate=refuse)
    found = smoke.run_part(engine, "ar", "kinds", [[1]])
    assert found["kinds"] == len(smoke.STOCK) and "plain: refused: no" in found["wrong"]


def test_a_drafts_layers_are_timed_where_they_agree() -> None:
    """Red where what is timed is not the same, or a kind is the other's result."""
    found = layers.measure(3)
    assert found["wrong"] == [] and found["apart"]["overlapped"] == 0 < found["apart"]["int8"]
    assert {f"{kind}_ms" for kind in ("stock", "fused", "overlapped", "int8")} < found.keys()
    json.dumps(found)


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        ("overlapped", 2**-9, ["overlapped differs from fused"]),  # the last bit of one number
        ("fused", 0.5, ["fused differs from stock", "overlapped differs from fused"]),
        ("int8", 0.5, ["int8 differs from dequantized"]),
        ("int8", float("nan"), ["int8 differs from dequantized by inf"]),
    ],
)
def test_a_drafts_layers_that_differ_once_are_told(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: float, told: list[str]
) -> None:
    """In one of twenty replays, as a race would."""
    capture = layers.capture_kinds
    calls = [0]

    def broken(*given: Any) -> layers.Kinds:
        kinds = capture(*given)

        def replay() -> None:
            kinds[kind].replay()
            calls[0] += 1
            if calls[0] == 7:
                result = kinds[kind].result
                result[0] += error * (result.abs().max() if error > 0.1 else 1)

        return {**kinds, kind: kinds[kind]._replace(replay=replay)}

    monkeypatch.setattr(layers, "capture_kinds", broken)
    wrong = layers.measure(2)["wrong"]
    assert len(wrong) == len(told)
    assert all(one.startswith(start) for one, start in zip(wrong, told, strict=True))


def test_both_ways_to_compute_logits_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where what is timed is another product."""
    found = layers.measure_lm_heads()
    assert found["wrong"] == [] and [one[:2] for one in found["lm_heads"]] == list(layers.LM_HEADS)
    assert all(ms > 0 for one in found["lm_heads"] for ms in one[2:])
    monkeypatch.setattr(layers, "cast", lambda weight, x: x @ weight.T * 2)
    assert "logits of 8 rows differ by 1," in layers.measure_lm_heads()["wrong"][0]


def test_8_bits_are_compared_with_what_they_stand_for() -> None:
    import torch

    torch.manual_seed(0)
    layer = layers.make_layer()
    small = layers.in_8_bits(layer)
    for one, whole, eight in zip(
        layers.dequantized(small).matrices, layer.matrices, small.matrices, strict=True
    ):
        assert eight.dtype == torch.int8 and one.dtype == whole.dtype
        gap = (one - whole).abs().amax(1) / whole.abs().amax(1)
        assert 0 < gap.max() < 1 / 127


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
    product = "_skinny"
    attention = "_attend_spans"
    for num_rows in (8, 64):
        with fake_cuda(monkeypatch) as (_, account), account:
            one = [layers.make_layer()]
            attend = layers.attention_over(num_rows)
            x = one[0].norms[0].new_zeros(num_rows, layers.HIDDEN)
            account.calls.clear()
            layers.fused(skinny, one, attend, x)
            assert account.calls == [product, attention, product, product, product]
            account.calls.clear()
            assert layers.stock(one, attend, x).shape == x.shape
            assert (account.calls.count("mm"), account.calls.count(attention)) == (4, 1)


def test_cells_are_sampled_and_summed_up() -> None:
    cell = SpeedCell(System(AR), 2, 256)
    engine: Any = FakeEngine(cell.system, [], [-1])
    found = sampled(engine, cell, SPEED_8B)
    assert found["round_ms"] == pytest.approx(1000 * 0.1 * 1.3)
    assert found["decode_tokens_per_second"] == pytest.approx(2 / 0.13)
    assert len(found["samples"]) == SPEED_8B.repeats and found["beside"] == []
    json.dumps(found)


def test_what_is_new_fits_into_fifteen_minutes() -> None:
    """In two calls: of 8.8 minutes, 100 seconds of them to unpack, and of 4 on the same machine."""
    stages = run.stages(Path(), on_gpu=True)
    every = [(one.name, case) for one in stages for case in one.cases()]
    first = every[:8]
    second = every[8:12]
    assert [(name, case.slug) for name, case in first] == [
        ("kernels", "doctor"),
        ("smoke", "smc-graphs"),
        *(("profile", f"smc-{name}-n8-k8") for name in ("block", "exact", "exact-with-a-head")),
        *(("layers", name) for name in ("layers-m8", "layers-m64")),
        ("profile", "smc-fused-n8-k8"),
    ]
    assert [(name, case.slug) for name, case in second] == [
        ("kernels", "tests"),
        ("speed", "smc-exact-with-a-head-n4-k17"),
        ("layers", "layers-lm-head"),
        ("speed", "smc-with-chosen-layers-n8-k8"),
    ]
    assert [case.slug for _, case in every[12:15]] == [
        "smc-exact-adaptive-with-a-head-n4-k16",
        smoke.DEFAULT,
        "smc-block-n8-k8",
    ]
    assert sum(case.seconds for _, case in first) <= 8.8 * 60 - 100
    assert sum(case.seconds for _, case in second) <= 4 * 60
    # None of them may hang for longer, whatever compiles.
    assert max(case.seconds for _, case in first + second) <= LEAST_PATIENCE


def test_what_a_start_compiled_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files of Triton's cache, of which one was there before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, began, ended in (("old", 1, 5), ("a", 10, 13), ("b", 14, 15.5), ("half", 15, None)):
        (tmp_path / name).mkdir()
        for kind, at in (("source", began), ("cubin", ended), ("json", ended)):
            if at is not None:
                (tmp_path / name / f"verify.{kind}").touch()
                os.utime(tmp_path / name / f"verify.{kind}", (at, at))
    assert compiled_since(9.0) == (2, 4.5)
    state = {
        "startup_time": {"cuda_graph": {"smc_round": 7.0, "prefill": 1.0}},
        "smc": {"settings": {"draft_layers": "fused"}},
    }
    engine: Any = SimpleNamespace(internal_state=lambda: state)
    found = conditions(engine, EngineStart(9.0, 60.0))
    told = {"draft_layers": "fused", "start_seconds": 60.0, "capture_seconds": 8.0}
    assert found.items() >= {**told, "compiled_kernels": 2, "compile_seconds": 4.5}.items()
    engine = SimpleNamespace(internal_state=dict)
    assert conditions(engine, EngineStart(99.0, 1.0))["capture_seconds"] is None


@pytest.mark.parametrize(("kernel", "is_wrong"), [("_skinny", False), ("nvjet", True)])
def test_a_profile_of_fused_layers_has_their_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: str, is_wrong: bool
) -> None:
    """Red where a server that fell back to SGLang's layers passes for one that runs them fused."""
    cell = SpeedCell(System(FUSED, 8, 8), 1, 256)
    engine: Any = SimpleNamespace(post=lambda *_, **__: None, ask=lambda _: None)
    event = {"name": kernel, "ts": 0.0, "dur": 1.0}
    monkeypatch.setattr(engines, "events_in", lambda _: [event])
    found = engines.profile(engine, cell, engines.PROFILE_8B)
    assert ("_skinny" in "".join(found["wrong"])) == is_wrong
    monkeypatch.undo()
    assert "wrote nothing" in engines.profile(engine, cell, engines.PROFILE_8B)["wrong"][0]


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

    for name, told in (("", "nothing"), ("1-EXTEND.trace.json.gz", "1-EXTEND.trace.json.gz")):
        if name:
            (tmp_path / name).touch()
        with pytest.raises(BenchError, match=f"wrote {told}; needed: one"):
            engines.events_in(tmp_path)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    trace = tmp_path / "1-TP-0-DECODE.trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    (tmp_path / "v2").mkdir()
    other = shutil.copy(trace, tmp_path / "v2" / "1-TP-0-decode.trace.json.gz")
    with pytest.raises(BenchError, match=r"wrote 1-EXTEND.*1-TP-0-DECODE.*v2/1-TP-0-decode"):
        engines.events_in(tmp_path)
    assert engines.events_in(tmp_path / "v2") == []
    Path(other).unlink()
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
    block = System(BLOCK, 8, 8)
    exact = System(EXACT, 8, 8)
    for system, tokens in ((System(AR), 200.0), (block, 640.0), (exact, 510.0)):
        part = SpeedCell(system, 1, 256).slug
        records.add("speed", part, CODE, a_speed(tokens))
        records.add("70b", part, CODE, a_speed(tokens))
    records.add("more", "standalone-chain-b1-p256", CODE, {"failed": "it said\nno"})
    # Rounds of 10 ms, 8 of them in two kernels.
    kernels = [["nvjet | a", 64.0, 5.0], ["_attend_spans", 32.0, 3.0]]
    profile = a_speed(900.0) | {"kernels": kernels}
    took = {"triton": "3.6.0", "draft_layers": "fused", "clocks": {"clocks.sm": "1980 MHz"}}
    took |= {"start_seconds": 61.5, "capture_seconds": 12.34}
    took |= {"compiled_kernels": 14, "compile_seconds": 30.0}
    profile |= {"conditions": took, "wrong": ["its rounds do not launch _skinny"]}
    records.add("profile", "smc-block-n8-k8-b1-p256", CODE, profile)
    records.add("profile", "smc-exact-n8-k8-b1-p256", CODE, {"failed": "it died"})
    curve = Curve.of([(1, 0.0108), (8, 0.0226)])
    budget = Budget(4, 16)
    costs = {"costs": RoundCosts({budget: curve}, {budget: 1.5e-7}).as_dict()}
    records.add("speed", "smc-adaptive-n4-k16-b1-p256", CODE, a_speed(900.0) | costs)
    times = {f"{kind}_ms": ms for kind, ms in (("stock", 1.2), ("fused", 1.0), ("int8", 0.5))}
    records.add(
        "layers", "layers-m8", CODE, {"rows": 8, "overlapped_ms": 0.8, "wrong": [], **times}
    )
    heads = {"lm_heads": [[8, 2048, 0.13, 0.128]], "wrong": []}
    records.add("layers", "layers-lm-head", CODE, heads)
    records.add("smoke", "smc-graphs kinds", CODE, {"kinds": 3, "wrong": ["top-p: 0 of 3"]})
    told = report.write_report(tmp_path / "lines", tmp_path)
    for line in (
        "| SMC block N=8 K=8 | 1 | 256 | 79.8 | 640.0 | 3.20 [3.20, 3.20] |",
        "| SMC exact N=8 K=8 | 1 | 256 | 77.3 | 510.0 | 2.55 [2.55, 2.55] |  | 1000.0 | 9.00",
        "- standalone-chain-b1-p256: it said no",
        f"# {H200}",
        "| smc-adaptive-n4-k16-b1-p256 | N=4 K=16 | 1: 10.8, 8: 22.6 | 0.15 |",
        "- smc-graphs kinds: top-p: 0 of 3",
        "| 8 | 1.200 | 1.000 | 0.800 | 0.500 |",
        "| 8 x 2048 | 0.130 | 0.128 |",
        "**smc-block-n8-k8-b1-p256**: 10.00 ms a round, 2.00 of it no kernel's",
        "| `nvjet / a` | 64 | 5.000 |",
        "- smc-exact-n8-k8-b1-p256: it died",
        "- smc-block-n8-k8-b1-p256: its rounds do not launch _skinny",
        "| profile smc-block-n8-k8-b1-p256 | 62 | 12.3 | 14 | 30 | 3.6.0 | fused | 1980 MHz |",
    ):
        assert line in told, line


def test_the_page_has_what_the_command_expects_of_an_h200() -> None:
    """And what was measured takes the place of what is modelled."""
    machines, _ = read_results(run.RAW)
    every = (some for name, some in machines.items() if "H200" in name)
    found = ({**some.get("speed", {}), **some.get("more", {})} for some in every)
    *_, results = filter(expected.is_complete, found)
    lacking = System(EXACT_HEAD, 8, 8)
    parts = {part: one for part, one in results.items() if not part.startswith(lacking.slug)}
    assert not expected.is_complete(parts), "a page of it would have gaps"
    assert expected.table(results) in (REPOSITORY / "docs" / "expect.md").read_text()
    assert expected.page(results) == (PUBLISHED / "gpu" / "expected.md").read_text()
    shape = expected.ours(EXACT_HEAD, 4, 17)
    ms, is_measured = expected.milliseconds(results, shape, 1)
    # As much above its bound as N = K = 8, of as many rows.
    like = expected.ours(EXACT_HEAD, 8, 8)
    known, _ = expected.milliseconds(results, like, 1)
    assert not is_measured and ms / shape.bound(1) == pytest.approx(known / like.bound(1))
    cell = SpeedCell(System(EXACT_HEAD, 4, 17), 1, 256)
    found = {**results, cell.slug: {"round_ms": 10.0}}
    assert expected.milliseconds(found, shape, 1) == (10.0, True)


def test_estimates_add_what_default_servers_got_since_and_save_a_targets_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where what is planned counts, or the draft's bytes are halved too."""
    results = expected.published()
    name = expected.ON_HEAD
    measured, _ = expected.milliseconds(results, expected.SHAPES[name], 1)
    changes = tmp_path / "gpu" / "changes.csv"
    changes.parent.mkdir()
    lines = "change,state,model 1,head 1", "a,default,7,-0.5", "b,default,0,0.2", "c,planned,0,-3"
    changes.write_text("\n".join(lines))
    monkeypatch.setattr(expected, "PUBLISHED", tmp_path)
    expected.changes.cache_clear()
    now = expected.now(results, name, 1)
    assert now == pytest.approx(measured - 0.3)
    layers = SPEED_8B.pair.target.layer_parameters
    saved = 1000 * 1.3 * layers / 4.8e12  # a byte a weight
    assert now - expected.in_fp8(results, name, 1) == pytest.approx(saved)
    expected.changes.cache_clear()


class StoodIn(FakeEngine):
    """A server whose cells are `FakeEngine`'s; adaptive ones have measured their rounds."""

    url = "none"

    def internal_state(self) -> dict[str, Any]:
        measured = RoundCosts({Budget(8, 8): Curve.of([(1, 0.0108)])}, {Budget(8, 8): 1e-7})
        memory = {"pool_bytes": 1 << 30, "pool_slots": 1000, "beside": {"states": 1 << 30}}
        smc = {"costs": measured.as_dict(), "memory": memory, "settings": {"draft_layers": "-"}}
        return {"smc": smc, "startup_time": {"cuda_graph": {"smc_round": 1.5}}}


def test_a_dry_run_takes_every_stage_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for servers and commands, whose results are of the same form."""
    started: list[str] = []

    @contextlib.contextmanager
    def running(launch: Launch, log: Path) -> Iterator[StoodIn]:
        started.append(log.stem)
        system = System(AR if log.stem.endswith("ar") else BLOCK, 8, 8)
        yield StoodIn(system, [], [-1])

    for module in (measure, smoke):
        monkeypatch.setattr(module, "running", running)
        monkeypatch.setattr(module, "write_models", lambda *_, **__: None)
    monkeypatch.setattr(smoke, "prompt_ids", lambda _: [1])
    monkeypatch.setattr(smoke, "run_part", lambda *_, **__: {"wrong": []})
    words = ("-c", f"print({json.dumps({'rows': 8, 'wrong': []})!r})")
    monkeypatch.setattr(smoke, "DOCTOR", words)
    monkeypatch.setattr(smoke, "TESTS", dict.fromkeys(smoke.TESTS, words))
    monkeypatch.setattr(smoke, "LAYERS", words)
    for variable in travel.CACHES.values():  # kernels that tests have compiled: minutes to archive
        monkeypatch.delenv(variable, raising=False)
    folders = ("--out", str(tmp_path / "out"), "--state", str(tmp_path / "state"))
    assert run.main(["--dry-run", *folders]) == 0
    told = capsys.readouterr().out
    assert "FAILED" not in told and "left for another call" not in told
    (stages,) = read_results(tmp_path / "out" / "dry-run")[0].values()
    assert stages.keys() == set(run.STAGES)
    every = run.stages(tmp_path, on_gpu=False)
    asked = {(one.name, part) for one in every for case in one.cases() for part in case.parts}
    assert asked == {(stage, part) for stage, parts in stages.items() for part in parts}
    for line in (
        "## Speed: 8B + 1B, stood in for",
        "## Speed: 70B in FP8 + 1B, stood in for",
        "| smc-adaptive-n8-k8-b2-p32 | N=8 K=8 | 1: 10.8 | 0.1 |",
        "## A server with default settings",
        "## Starts",
        "What a GPU machine would start:",
    ):
        assert line in told, line
    assert not any("fused" in name for name in started), "which a CPU refuses"
    assert run.main(["--dry-run", *folders]) == 0
    assert " s left" not in capsys.readouterr().out  # nothing was begun


@pytest.mark.nightly
@pytest.mark.engine
def test_a_dry_run_walks_through_engines_on_a_cpu(tmp_path: Path) -> None:
    """As a user calls it, in a copy for the machine: no stage reads what that leaves out."""
    tree = tmp_path / "tree"
    travel.pack(tree)
    command = ["bash", "bench/gpu/run.sh", "--dry-run", "--minutes", "600"]
    command += ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tree)}
    told = printed(*command, cwd=tree, env=environment, timeout=None)
    assert "What a GPU machine would start" in told and "all done" in told
    (stages,) = read_results(tmp_path / "out" / "dry-run")[0].values()
    assert stages.keys() == set(run.STAGES)
    assert set(smoke.ON_A_CPU.values()) == {"smc-torch"}
    for part, one in (pair for parts in stages.values() for pair in parts.items()):
        assert "failed" not in one and not one.get("wrong"), (part, one)
