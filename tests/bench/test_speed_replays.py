"""Rounds that are replayed from CUDA graphs: whose the kernels are, and what a round is made of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from speed import probing, replays, rounds
from speed.engines import launch
from speed.grid import BLOCK, Cell, System
from speed.plugin import kernel_recorder
from speed.plugin.kernel_recorder import SKIPPED, KernelRecorder, kernels_of
from speed.presets import CPU, PRESETS
from speed.probing import FORWARDS_EVERY, FORWARDS_ONCE, probed
from study import BenchError

CELL = Cell(System(BLOCK, 8, 8), 1, 256)
GEMM_NAME, NORM_NAME = "nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "void FusedAddRMSNormKernel<8u>"
COPY = "void at::native::vectorized_elementwise_kernel<4>"
#: A round of two drafted tokens: names and microseconds, in the order in which they run.
DRAFTED = [(GEMM_NAME, 10), (NORM_NAME, 2), ("_attend_spans", 3), ("_join_spans", 1)]
SCORED = [(GEMM_NAME, 40), ("_attend_spans", 5), ("_join_spans", 2), (GEMM_NAME, 30)]
ROUND = [
    ("_reserve", 1),
    (COPY, 1),
    *DRAFTED,
    ("_sum_tile", 4),
    ("_draw", 2),
    *DRAFTED,
    ("_draw", 2),
    *SCORED,
    ("_score", 3),
    (COPY, 1),
    ("_place", 6),
]
BUSY = sum(duration for _, duration in ROUND) * 1e-6


def recorded(num_rounds: int) -> dict[str, Any]:
    """Replays with other kernels around them, in no order."""
    names = sorted({name for name, _ in ROUND} | {"flash_fwd"})
    events, now = [], 0
    for launch_number in range(1, num_rounds + 1):
        for name, duration in ROUND:
            events.append([names.index(name), now, 1000 * duration, launch_number])
            now += 1000 * duration + 100
    events.append([names.index("flash_fwd"), now, 9, 77])
    events.append([names.index("_draw"), now, 9, 78])  # of a prefill, by itself
    return {"names": names, "events": events[::-1]}


def test_kernels_are_known_by_name() -> None:
    kinds = {name: replays.kind_of(name) for name, _ in ROUND}
    assert kinds == {
        GEMM_NAME: replays.GEMM,
        NORM_NAME: replays.LAYERS,
        COPY: replays.OTHER,
        "_attend_spans": replays.ATTENTION,
        "_join_spans": replays.JOIN,
        **dict.fromkeys(("_reserve", "_sum_tile", "_draw", "_score", "_place"), replays.OURS),
    }
    # FlashAttention is made with CUTLASS.
    assert replays.kind_of("void cutlass::device_kernel<flash::FwdSm90>") == replays.ATTENTION


def test_every_kernel_of_ours_is_known() -> None:
    """Red where a file of kernels is written so that its names are not found."""
    files = set(replays.own_kernels().values())
    assert {"attention/particle_attention", "sample", "lineage", "reweight"} <= files
    assert {replays.kind_of(name) for name in replays.own_kernels()} == {
        replays.OURS,
        replays.ATTENTION,
        replays.JOIN,
    }


def test_a_round_is_what_one_launch_replays_and_the_last_that_attends_is_the_target() -> None:
    found = replays.replays_of(recorded(3))
    assert [[kernel.name for kernel in replay] for replay in found] == [[n for n, _ in ROUND]] * 3
    here, draft, target = [replays.ROUND], [replays.DRAFT] * 4, [replays.TARGET] * 4
    wanted = [*here * 2, *draft, *here * 2, *draft, *here, *target, *here * 3]
    assert [phase for phase, _ in replays.phases(found[0])] == wanted


def test_sums_of_kernels() -> None:
    found = replays.summed(recorded(3))
    assert found is not None and found["rounds"] == 3
    assert found["busy"] == pytest.approx([BUSY] * 3)
    assert found["forwards"] == pytest.approx([(2 * 16 + 77) * 1e-6] * 3)
    assert found["sums"][0] == [replays.TARGET, replays.GEMM, GEMM_NAME, 2, pytest.approx(70e-6)]
    assert sum(line[-1] for line in found["sums"]) == pytest.approx(BUSY)

    kernels = recorded(1)
    for place, event in enumerate(kernels["events"]):
        event[3] = place  # launched one by one
    assert replays.summed(kernels) is None


def entry(replayed: Any) -> dict[str, Any]:
    """Four rounds, of which the profiler slowed two."""
    seconds = 1.25 * BUSY
    one = {"batch": 1, "recorded": False, "round": seconds, "forwards": {}, "alone": None}
    slow = {**one, "recorded": True, "round": 99.0}
    rounds_of = [{**each, "parts": {}} for each in (one, slow, slow, one, one)]
    steps = [[place * 2 * seconds, 1] for place in range(6)]
    return {"bursts": [{"steps": steps, "rounds": rounds_of, "replays": replayed}]}


def test_a_replayed_round_is_told_by_its_kernels() -> None:
    row = rounds.make_row(CELL, [entry(replays.summed(recorded(3)))])
    micro = {name: round(1e6 * value, 3) for name, value in row.parts.items()}
    assert micro == {
        "draft GEMMs": 20,
        "draft norm, rope, KV, activation": 4,
        "draft attention": 6,
        "draft join": 2,
        "target GEMMs": 70,
        "target attention": 5,
        "target join": 2,
        "sampler kernels": 18,
        "other kernels": 2,
        rounds.GAPS: pytest.approx(0.25e6 * BUSY),
        rounds.BETWEEN: pytest.approx(1.25e6 * BUSY),
    }
    assert row.replayed and row.rounds == 3
    assert row.round_seconds == pytest.approx(1.25 * BUSY)
    assert row.ratio_to_forwards.mean == pytest.approx(1.25 * BUSY / 109e-6)
    assert "draft GEMMs" in rounds.markdown([row], "note")

    found = entry(replays.summed(recorded(3)))
    for one in found["bursts"][0]["rounds"]:
        one["recorded"] = True  # none has a time of its own
    with pytest.raises(BenchError, match="--new-tokens"):
        rounds.make_row(CELL, [found])


class FakeProfiler:
    """torch.profiler.profile, with one kernel and what is none."""

    def __init__(self, **_: Any) -> None:
        device, host = SimpleNamespace(name="CUDA"), SimpleNamespace(name="CPU")
        events = [
            event("k", 1100, device),
            event("range", 1000, device, annotation=True),
            event("k", 1050, device),
            event("launch", 900, host),
        ]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

    def start(self) -> None: ...

    def stop(self) -> None: ...


def event(name: str, start: int, device: Any, annotation: bool = False) -> Any:
    said = {"name": name, "start_ns": start, "duration_ns": 7, "correlation_id": 3}
    said |= {"device_type": device, "is_user_annotation": annotation}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in said.items()})


def test_torchs_profiler_has_what_is_read_of_it() -> None:
    """Red where torch renames it: nothing would be known of a GPU's kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert {one.device_type().name for one in events} == {"CPU"}
    assert kernels_of(events) == {"names": [], "events": []}
    assert all(one.duration_ns() >= 0 and one.correlation_id() >= 0 for one in events)


def test_some_rounds_of_each_burst_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_recorder.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel_recorder.torch.profiler, "profile", FakeProfiler)
    recorder = KernelRecorder(2)
    seen = []
    for place in range(SKIPPED + 5):
        recorder.before(place)
        seen.append(recorder.is_recording)
    assert seen == [False] * SKIPPED + [True, True] + [False] * 3
    assert recorder.take() == {"names": ["k"], "events": [[0, 50, 7, 3], [0, 0, 7, 3]]}
    assert recorder.take() is None
    recorder.before(SKIPPED)  # a burst that ends too soon
    assert recorder.is_recording and recorder.take() is None and not recorder.is_recording
    for place in range(SKIPPED + 5):
        KernelRecorder(0).before(place)  # asks nothing of a GPU


def test_kernels_are_recorded_on_a_gpu_alone(tmp_path: Path) -> None:
    models = tmp_path / "t", tmp_path / "d"
    for preset, every, number in (
        (PRESETS["h200-8b"], FORWARDS_EVERY, probing.PROFILED_ROUNDS),
        (PRESETS["h200-8b"], FORWARDS_ONCE, 0),
        (CPU, FORWARDS_EVERY, 0),
    ):
        started = probed(launch(CELL.system, preset, models), tmp_path / "out", every)
        assert started.environment["SPEED_PROBE_KERNELS"] == str(number)
