"""Define the engines of a GPU, with batches and prompts, the most important first."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

from speed import grid
from speed.measure import EngineCase, work
from speed.remote import RemoteEngine
from speed.runner import Entry
from study import BenchError

#: What SGLang's profiler records: the kernels of so many rounds.
PROFILED_ROUNDS = 20
PROFILE_OPTIONS = {
    "num_steps": PROFILED_ROUNDS,
    "profile_by_stage": True,
    "activities": ["GPU"],
    "with_stack": False,
    "record_shapes": False,
}

N = K = 8

Sizes = tuple[tuple[int, int], ...]
ONE: Sizes = ((1, 256),)
TWO: Sizes = ((1, 256), (8, 256))
#: By importance: the headline, long prompts, then large batches.
ALL: Sizes = ((1, 256), (1, 4096), (8, 256), (32, 256), (8, 4096), (32, 4096))
SHORT: Sizes = ((1, 256), (8, 256), (32, 256))


def _case(
    family: str, sizes: Sizes, start_seconds: float = 45.0, n: int = N, k: int = K, **engine: Any
) -> EngineCase:
    system = grid.System(family, *((n, k) if family in grid.SMC else ()))
    return EngineCase(system, sizes, start_seconds, 5.0, engine)


#: SGLang's default backend, flashinfer, first compiles its tree kernels for minutes.
OF_TREES = {"attention_backend": "fa3"}
PLAIN = _case(grid.AR, (*ALL, (64, 256)))
STOCK_DRAFT = _case(grid.CHAIN, SHORT)
#: What has not been measured, first.
DEEP = (_case(grid.EXACT_HEAD, SHORT, 40.0, 4, 17),)
CHOSEN = (_case(grid.CHOSEN, TWO, 45.0),)
SERVED = (_case(grid.SERVED, SHORT, 85.0, 4, 16),)
OTHERS = (
    _case(grid.EXACT_BLOCK, SHORT, 55.0),
    _case(grid.EAGLE_TREE, SHORT, 55.0, **OF_TREES),
    PLAIN,
    _case(grid.BLOCK, ALL),
    _case(grid.EXACT, ALL),
    _case(grid.EXACT_HEAD, SHORT, 55.0),
    _case(grid.EAGLE, SHORT, 55.0, **OF_TREES),
    _case(grid.ADAPTIVE, ((32, 256), (64, 256), (1, 256)), 140.0),  # captures each budget, too
    _case(grid.SERVED, SHORT, 140.0),
    _case(grid.AR_DRAFT, SHORT),  # K of its passes are a lower bound of the drafting time
)
SPEED = (*DEEP, *CHOSEN, *SERVED, *OTHERS)
#: Without STANDALONE's tree, whose servers end by SGLang's own check for leaks.
MORE = (STOCK_DRAFT, _case(grid.AUTO, ((1, 256), (1, 4096))))
PROFILE = (
    _case(grid.BLOCK, TWO, 60.0),
    _case(grid.FUSED, TWO),
    _case(grid.EXACT, TWO),
    _case(grid.EXACT_HEAD, TWO),
)
LARGE = tuple(
    case._replace(sizes=ONE, start_seconds=45.0, sample_seconds=15.0)
    for case in (_case(grid.BLOCK, ONE), PLAIN, _case(grid.EXACT, ONE), STOCK_DRAFT)
)

#: Prefill runs without graphs, which take most of a start; only decoding is measured.
FAST_START = {"disable_prefill_cuda_graph": True, "mem_fraction_static": 0.8}
SPEED_8B = replace(grid.PRESETS["h200-8b"], new_tokens=256, repeats=3, engine=FAST_START)
PROFILE_8B = replace(SPEED_8B, new_tokens=512, repeats=2)
LARGE_START = {**FAST_START, "mem_fraction_static": 0.9}
SPEED_70B = replace(SPEED_8B, name="h200-70b", pair=grid.PAIR_70B, repeats=2, engine=LARGE_START)
TINY = replace(grid.quick(grid.PRESETS["cpu"]), name="tiny", new_tokens=24, repeats=1)


def on_a_cpu(cases: Sequence[EngineCase]) -> list[EngineCase]:
    """Return the cases that run on a CPU, with one size or two."""
    return [
        case._replace(sizes=tuple(dict.fromkeys((min(b, 2), 32) for b, _ in case.sizes)))
        for case in cases
        # Which have no kernels there.
        if case.system.family not in (*grid.STANDALONE, *grid.EAGLES, grid.FUSED, grid.CHOSEN)
    ]


#: The kernel of fused layers, in the names of a trace.
FUSED_KERNEL = "_skinny"


def profile(engine: RemoteEngine, cell: grid.SpeedCell, preset: grid.Preset) -> Entry:
    """Return the kernels of a cell's rounds, and what is wrong with them; none on a CPU."""
    if preset.device == "cpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        engine.post("/start_profile", output_dir=folder, **PROFILE_OPTIONS)
        engine.ask(work(cell, "profile", preset))
        try:
            events = events_in(Path(folder))
        except BenchError as error:
            return {"wrong": [str(error)]}  # the cell's samples are good
    kernels = kernels_of(events)
    found = {"kernels": kernels, "round": round_of(events), "wrong": []}
    if cell.system.family == grid.FUSED and not any(FUSED_KERNEL in name for name, *_ in kernels):
        found["wrong"] = [f"its rounds do not launch {FUSED_KERNEL}, the kernel of fused layers"]
    return found


def events_in(folder: Path) -> list[Entry]:
    """Return what the device does in SGLang's trace of decoding, in order.

    Raises BenchError unless there is one such trace, named by either of SGLang's profilers.
    """
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    traces = [path for path in written if fnmatch(path.name.upper(), "*DECODE*.JSON.GZ")]
    if len(traces) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in written) or "nothing"
        raise BenchError(f"SGLang's profiler wrote {names}; needed: one *DECODE*.json.gz.")
    with gzip.open(traces[0]) as file:
        events = json.load(file)["traceEvents"]
    device = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(device, key=lambda one: one["ts"])


def kernels_of(events: Sequence[Entry]) -> list[tuple[str, float, float]]:
    """Return name, launches and ms a round of each kernel."""
    launches = Counter(one["name"] for one in events)
    micro = Counter[str]()
    for one in events:
        micro[one["name"]] += one["dur"]
    return [
        (name, launches[name] / PROFILED_ROUNDS, total / 1000 / PROFILED_ROUNDS)
        for name, total in micro.most_common()
    ]


def round_of(events: Sequence[Entry]) -> list[tuple[str, float, float]]:
    """Return name, microseconds idle before it and microseconds of each kernel of one round.

    Rounds begin with any kernel that each has once; none is returned without such a kernel.
    """
    launches = Counter(one["name"] for one in events)
    once = next((name for name, count in launches.items() if count == PROFILED_ROUNDS), None)
    starts = [place for place, one in enumerate(events) if one["name"] == once]
    begin, end = starts[len(starts) // 2 :][:2] or (0, 0)
    found = []
    until = events[begin]["ts"] if starts else 0.0
    for one in events[begin:end]:
        found.append((one["name"][:60], round(one["ts"] - until, 2), round(one["dur"], 2)))
        until = one["ts"] + one["dur"]
    return found
