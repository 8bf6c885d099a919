"""Inside the scheduler: timers, kernels of rounds, and what is made of them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.upstream import release
from contract.upstream.sglang import Tree
from gpu import rounds
from gpu.engines import profile
from gpu.plugin import speed_probe
from gpu.plugin.speed_probe import KernelRecorder, Probe, kernels_of
from speed.grid import BLOCK, Cell, System
from speed.presets import CPU
from speed.remote import Sample, Work
from speed_stand_ins import FakeEngine
from study import REPOSITORY, BenchError


def test_rounds_and_steps_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As SGLang's scheduler calls them, with a quarter of a second behind each round of two."""
    clock = SimpleNamespace(time=0.0)  # which passes by what is done, not by itself
    monkeypatch.setattr(speed_probe, "now", lambda: clock.time)

    def launch(batch: Any) -> str:
        clock.time += 2
        return f"a round of {len(batch.reqs)}"

    scheduler = SimpleNamespace(draft_worker=SimpleNamespace(launch_round=launch))
    mode = SimpleNamespace(is_decode=lambda: True)
    probe = Probe(str(tmp_path / "out"), KernelRecorder(0))
    probe.built(lambda _: None, scheduler)
    for _ in range(3):
        batch = SimpleNamespace(reqs=[0] * 2, forward_mode=mode)
        found = probe.ran(lambda _, b: scheduler.draft_worker.launch_round(b), scheduler, batch)
        assert found == "a round of 2"
        clock.time += 0.25
    probe.idle(lambda _: None, scheduler)
    probe.idle(lambda _: None, scheduler)  # nothing ran since
    (line,) = (tmp_path / "out").read_text().splitlines()
    one = {"batch": 2, "recorded": False, "round": 2.0}
    steps = [[2.25 * place, 2] for place in range(3)]
    assert json.loads(line) == {"steps": steps, "rounds": [one] * 3, "kernels": None}


def test_what_the_timers_wrap_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red where SGLang or our worker renames it: the timers would write nothing."""
    hooked: list[str] = []
    registry = SimpleNamespace(register=lambda target, *_: hooked.append(target))
    stand_in = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND=0))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", stand_in)
    monkeypatch.setenv(speed_probe.OUT, str(tmp_path / "out"))
    speed_probe.register()
    root = release.installed()
    assert root is not None and len(hooked) == 3
    assert all(target.startswith(speed_probe.SCHEDULER) for target in hooked)
    tree = Tree(root)
    assert [target for target in hooked if tree.find(target) is None] == []
    assert "def launch_round(" in (REPOSITORY / "sglang_smc" / "worker.py").read_text()


class TimedEngine(FakeEngine):
    """Writes what the timers of a real one would, on a CPU: rounds of 1.1 s, the last of fewer."""

    def __init__(self, system: System, out: Path) -> None:
        super().__init__(system, [], [-1])
        self.out = out

    def ask(self, work: Work) -> Sample:
        found, batch = super().ask(work), len(work.prompts)
        one = {"batch": batch, "round": 1.1, "recorded": False}
        steps = [[1.3 * place, batch] for place in range(found.rounds)]
        last = {**one, "batch": batch - 1, "round": 99.0}
        burst = {"steps": steps, "rounds": [one] * 4 + [last], "kernels": None}
        with self.out.open("a") as file:
            file.write(json.dumps(burst) + "\n")
        return found


def test_on_a_cpu_rounds_are_timed_alone(tmp_path: Path) -> None:
    cell = Cell(System(BLOCK, 8, 8), 2, 256)
    found = profile(TimedEngine(cell.system, tmp_path / "out"), cell, CPU, tmp_path / "out")
    row = rounds.make_row(cell, found["bursts"])
    assert (row.rounds, row.seconds, row.forwards) == (4 * CPU.repeats, 1.1, None)
    assert row.parts == {rounds.BETWEEN: pytest.approx(0.2)}
    assert "1100.00 |  |  | 200.00" in rounds.markdown([row])


CELL = Cell(System(BLOCK, 8, 8), 1, 256)
GEMM_NAME, NORM_NAME = "nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "void FusedAddRMSNormKernel<8u>"
COPY = "void at::native::vectorized_elementwise_kernel<4>"
#: A round of two drafted tokens: names and microseconds, in the order in which they run.
DRAFTED = [(GEMM_NAME, 10), (NORM_NAME, 2), ("_attend_spans", 3), ("_join_spans", 1)]
SCORED = [(GEMM_NAME, 40), ("_attend_spans", 5), ("_join_spans", 2), (GEMM_NAME, 30)]
REPLAYED = [
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
BUSY = sum(duration for _, duration in REPLAYED) * 1e-6


def recorded(num_rounds: int) -> dict[str, Any]:
    """Replays with other kernels around them, in no order."""
    names = sorted({name for name, _ in REPLAYED} | {"flash_fwd"})
    events, now = [], 0
    for launch_number in range(1, num_rounds + 1):
        for name, duration in REPLAYED:
            events.append([names.index(name), now, 1000 * duration, launch_number])
            now += 1000 * duration + 100
    events.append([names.index("flash_fwd"), now, 9, 77])
    events.append([names.index("_draw"), now, 9, 78])  # of a prefill, by itself
    return {"names": names, "events": events[::-1]}


def test_every_kernel_of_ours_is_known() -> None:
    """Red where a file of kernels is written so that its names are not found."""
    # FlashAttention is made with CUTLASS.
    assert rounds.kind_of("void cutlass::device_kernel<flash::FwdSm90>") == rounds.ATTENTION
    files = set(rounds.own_kernels().values())
    assert {"attention/particle_attention", "sample", "lineage", "reweight"} <= files
    assert {rounds.kind_of(name) for name in rounds.own_kernels()} == {
        rounds.OURS,
        rounds.ATTENTION,
        rounds.JOIN,
    }


def test_sums_of_kernels() -> None:
    found = rounds.summed(recorded(3), 99)
    assert found["rounds"] == 3 and found["replayed"]
    assert found["busy"] == pytest.approx([BUSY] * 3)
    assert found["forwards"] == pytest.approx([(2 * 16 + 77) * 1e-6] * 3)
    assert found["sums"][0] == [rounds.TARGET, rounds.GEMM, GEMM_NAME, 2, pytest.approx(70e-6)]
    assert sum(line[-1] for line in found["sums"]) == pytest.approx(BUSY)


def test_kernels_that_are_launched_one_by_one_have_no_phase() -> None:
    kernels = recorded(2)
    kernels["events"] = kernels["events"][2:]  # without those around the rounds
    for place, event in enumerate(kernels["events"]):
        event[3] = place
    found = rounds.summed(kernels, 2)
    assert not found["replayed"] and found["busy"] == pytest.approx([BUSY])
    assert found["forwards"] == pytest.approx([109e-6])
    assert {rounds.part_of(*line[:2]) for line in found["sums"]} == {
        *rounds.FORWARD,
        rounds.OURS,
        rounds.OTHER,
    }


def bursts_of(kernels: Any) -> list[dict[str, Any]]:
    """Four rounds, of which the profiler slowed two."""
    seconds = 1.25 * BUSY
    one = {"batch": 1, "recorded": False, "round": seconds}
    slow = {**one, "recorded": True, "round": 99.0}
    steps = [[place * 2 * seconds, 1] for place in range(6)]
    return [{"steps": steps, "rounds": [one, slow, slow, one, one], "kernels": kernels}]


def test_a_replayed_round_is_told_by_its_kernels() -> None:
    row = rounds.make_row(CELL, bursts_of(rounds.summed(recorded(3), 2)))
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
    assert row.rounds == 3
    assert row.seconds == pytest.approx(1.25 * BUSY)
    assert row.ratio_to_forwards is not None
    assert row.ratio_to_forwards.mean == pytest.approx(1.25 * BUSY / 109e-6)
    assert "draft GEMMs" in rounds.markdown([row])

    found = bursts_of(None)
    for one in found[0]["rounds"]:
        one["recorded"] = True  # none has a time of its own
    with pytest.raises(BenchError, match="too short"):
        rounds.make_row(CELL, found)


def test_torchs_profiler_has_what_is_read_of_it() -> None:
    """Red where torch renames it: nothing would be known of a GPU's kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert {one.device_type().name for one in events} == {"CPU"}
    assert kernels_of(events) == {"names": [], "events": []}
    assert all(one.duration_ns() >= 0 and one.correlation_id() >= 0 for one in events)
