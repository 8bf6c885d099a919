"""Kernels of rounds: what SGLang's profiler records of them, and the tables of these."""

import gzip
import json
from pathlib import Path

import pytest
from contract.upstream import release
from gpu import rounds
from gpu.engines import PROFILE_OPTIONS
from gpu.rounds import Kernel
from speed.grid import BLOCK, Cell, System
from study import BenchError

CELL = Cell(System(BLOCK, 8, 8), 1, 256)
GEMM_NAME, NORM_NAME = "nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "void FusedAddRMSNormKernel<8u>"
COPY = "void at::native::vectorized_elementwise_kernel<4>"
#: A round of two drafted tokens: names and microseconds, in the order in which they run.
DRAFTED = [(GEMM_NAME, 10), (NORM_NAME, 2), ("_attend_spans", 3), ("_join_spans", 1)]
SCORED = [(GEMM_NAME, 40), ("_attend_spans", 5), ("_join_spans", 2), (GEMM_NAME, 30)]
REPLAYED = [
    *(("_reserve", 1), (COPY, 1), *DRAFTED, ("_sum_tile", 4), ("_draw", 2), *DRAFTED, ("_draw", 2)),
    *(*SCORED, ("_score", 3), (COPY, 1), ("_place", 6)),
]


def recorded(num_rounds: int) -> list[Kernel]:
    """Replays, in no order."""
    found, now = [], 0.0
    for launch_number in range(1, num_rounds + 1):
        for name, duration in REPLAYED:
            found.append(Kernel(name, now, duration, launch_number))
            now += duration + 0.1
    return found[::-1]


def test_every_kernel_of_ours_is_known() -> None:
    """Red where a file of kernels is written so that its names are not found."""
    # FlashAttention is made with CUTLASS.
    assert rounds.kind_of("void cutlass::device_kernel<flash::FwdSm90>") == rounds.ATTENTION
    files = set(rounds.own_kernels().values())
    assert {"attention/particle_attention", "sample", "lineage", "reweight"} <= files
    kinds = {rounds.kind_of(name) for name in rounds.own_kernels()}
    assert kinds == {rounds.OURS, rounds.ATTENTION, rounds.JOIN}


def test_the_kernels_of_a_round_are_summed_by_kind() -> None:
    """Of replayed rounds without others, of a prefill, say; and of launches one by one."""
    others = [Kernel("flash_fwd", 1e6, 9, 77), Kernel("_draw", 1e6, 9, 78)]
    found = rounds.summed([*recorded(3), *others], 99)
    assert found["rounds"] == 3 and found["replayed"]
    assert found["sums"][0] == [rounds.GEMM, GEMM_NAME, 4, pytest.approx(90e-6)]
    one = {"round_ms": 0.2, "kernels": found}
    micro = {name: 1000 * value for name, value in rounds.parts_of(one).items()}
    expected = {
        "GEMMs": 90,
        "norm, rope, KV, activation": 4,
        "attention": 11,
        "join": 4,
        "sampler kernels": 18,
        "other kernels": 2,
        rounds.GAPS: 200 - 129,
    }
    assert micro == pytest.approx(expected)
    # Forwards are 109 microseconds.
    assert "| 1 | 256 | 0.20 | 0.11 | 1.83 | 0.09 |" in rounds.markdown({CELL: one})
    assert len(rounds.largest(one, 4)) == 4
    kernels = [kernel._replace(launch=place) for place, kernel in enumerate(recorded(2))]
    again = rounds.summed(kernels, 2)
    assert not again["replayed"]
    assert rounds.parts_of({**one, "kernels": again}) == pytest.approx(rounds.parts_of(one))


def test_on_a_cpu_rounds_are_timed_alone() -> None:
    assert rounds.parts_of({"round_ms": 1100.0}) == {}
    assert "| 1100.00 |  |  |" in rounds.markdown({CELL: {"round_ms": 1100.0}})


def test_a_trace_of_torchs_profiler_is_read(tmp_path: Path) -> None:
    """Red where torch or SGLang renames it: nothing would be known of a GPU's kernels."""
    import torch

    with pytest.raises(BenchError, match="wrote 0 traces"):
        rounds.kernels_in(tmp_path)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    trace = tmp_path / "1-TP-0-DECODE.trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    assert rounds.kernels_in(tmp_path) == []
    with gzip.open(trace) as file:
        content = json.load(file)
    timed = [one for one in content["traceEvents"] if one.get("ph") == "X" and "cat" in one]
    one = max(timed, key=lambda event: event["dur"])
    content["traceEvents"].append({**one, "cat": "kernel", "args": {"correlation": 7}})
    with gzip.open(trace, "wt") as file:
        json.dump(content, file)
    assert rounds.kernels_in(tmp_path) == [Kernel(one["name"], one["ts"], one["dur"], 7)]
    root = release.installed()
    assert root is not None
    managers = root / "sglang" / "srt" / "managers"
    asked = (managers / "io_struct.py").read_text().partition("class ProfileReq(")[2]
    assert all(f"    {name}: " in asked.partition("\nclass ")[0] for name in PROFILE_OPTIONS)
    profiler_of_stages = (managers / "scheduler_components" / "profiler_manager.py").read_text()
    assert "_stop_profile(stage=ForwardMode.DECODE)" in profiler_of_stages
