"""Measure each engine's tokens per second and the time of its rounds, one engine at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from gpu.cases import EngineCase, launch_of, preset_of, write_models
from gpu.replays import summed
from gpu.runner import Attempt, Case, Places
from speed.bound import measure_machine
from speed.grid import HEAD, Cell, Launch, drafted_by, simulated_acceptance
from speed.measure import TEMPERATURE, WARM_UP, work
from speed.presets import Preset
from speed.remote import Asker, Sample, running
from study import BenchError, code_fingerprint, digest, whole_lines

#: Grace period of a finished engine, which is then killed.
STOP_SECONDS = 0.5
MACHINE = "machine"
KEPT = ("completion_tokens", "spec_verify_ct", "spec_smc_rounds_ct", "spec_smc_replayed_ct")
WARM_SECONDS = 3.0
#: Plugin of SGLang with timers in the scheduler, and how long it may take to write them.
PLUGIN = Path(__file__).resolve().parent / "plugin"
TIMERS_SECONDS = 30.0
#: Rounds per burst that are profiled on a GPU, kernel by kernel.
PROFILED_ROUNDS = 20


def engine_cases(
    cases: Sequence[EngineCase], preset: Preset, places: Places, *, profiled: bool = False
) -> list[Case]:
    """Return a case for each engine; its parts are the engine's cells."""
    return [
        Case(
            slug=case.slug,
            parts={
                cell.slug: identity(case, cell, preset, places, profiled) for cell in case.cells
            },
            seconds=case.seconds,
            run=partial(measure, case, preset, places, profiled),
            shown=shown(launch_of(case, preset, places.models)),
        )
        for case in cases
    ]


def machine_case(preset: Preset, places: Places) -> Case:
    """Return the case that measures the machine's bandwidth and FLOP/s, for rooflines."""

    def run(missing: Sequence[str], attempt: Attempt) -> None:
        found = measure_machine(preset, places.work / "machine.json")
        attempt.add(MACHINE, found._asdict())

    parts = {MACHINE: {"device": preset.device, "dtype": preset.dtype}}
    return Case(MACHINE, parts, 15.0, run, "torch alone")


def identity(
    case: EngineCase, cell: Cell, preset: Preset, places: Places, profiled: bool
) -> dict[str, Any]:
    """Return the settings that a cell depends on; the plugin's code only for SMC."""
    launch = launch_of(case, preset, places.models)
    found = {
        "cell": cell.slug,
        "pair": preset.pair.name,
        "engine": without_models(launch),
        "environment": launch.environment,
        "new_tokens": preset.new_tokens,
        "repeats": preset.repeats,
        "temperature": TEMPERATURE,
        "sglang": version("sglang"),
    }
    if case.has_plugin:
        found["plugin"] = code_fingerprint()["plugin"]
    if profiled:
        found["probe"] = digest(PLUGIN.glob("*.py"))
    return found


def without_models(launch: Launch) -> dict[str, Any]:
    """Return an engine's keywords except the models' folders."""
    return {k: v for k, v in launch.arguments.items() if not k.endswith("model_path")}


def shown(launch: Launch) -> str:
    """Return the command that starts the engine by hand."""
    variables = "".join(f"{name}={value} " for name, value in launch.environment.items())
    arguments = ", ".join(f"{name}={value!r}" for name, value in launch.arguments.items())
    return f"{variables}sglang.Engine({arguments})"


def measure(
    case: EngineCase,
    preset: Preset,
    places: Places,
    profiled: bool,
    missing: Sequence[str],
    attempt: Attempt,
) -> None:
    """Measure one engine's missing cells, with timers in its scheduler if profiled."""
    has_head = drafted_by(case.system) == HEAD
    write_models(preset.pair, places.models, has_head=has_head)
    sized, launch = preset_of(case, preset), launch_of(case, preset, places.models)
    name = f"{preset.name}-{case.slug}" + ("-profiled" if profiled else "")
    timers = places.logs / f"{name}-timers.jsonl"
    if profiled:
        timers.unlink(missing_ok=True)
        launch = probed(launch, timers)
    with running(launch, places.logs / f"{name}.log", STOP_SECONDS) as engine:
        attempt.started = True
        for cell in (cell for cell in case.cells if cell.slug in missing):
            attempt.require(case.sample_seconds + WARM_SECONDS)
            found = (
                profile(engine, cell, sized, timers) if profiled else sampled(engine, cell, sized)
            )
            attempt.add(cell.slug, found)


def sampled(engine: Asker, cell: Cell, preset: Preset) -> dict[str, Any]:
    """Run a warm-up and all repeats of a cell; return their medians."""
    engine.ask(work(cell, WARM_UP, preset))
    samples = [engine.ask(work(cell, repeat, preset)) for repeat in range(preset.repeats)]
    decoded = sum(sample.decode_tokens for sample in samples)
    passes = sum(sum(sample.passes) for sample in samples)
    found = {
        "system": cell.system.name,
        "batch": cell.batch,
        "prompt": cell.prompt,
        "decode_tokens_per_second": median(sample.decode_speed for sample in samples),
        "tokens_per_second": median(sample.speed for sample in samples),
        "round_ms": 1000 * median(sample.decode_seconds / sample.rounds for sample in samples),
        "first_ms": 1000 * median(max(sample.first) for sample in samples),
        "tokens_per_round": decoded / max(1, passes),
        "simulated": simulated_acceptance(cell.system, preset),
        "samples": [asdict(reduced(sample)) for sample in samples],
    }
    infos = [info for sample in samples for info in sample.infos]
    if any("spec_smc_replayed_ct" in info for info in infos):
        counts = [
            sum(info[key] for info in infos)
            for key in ("spec_smc_replayed_ct", "spec_smc_rounds_ct")
        ]
        found["replayed_share"] = counts[0] / max(1, counts[1])
    return found


def reduced(sample: Sample) -> Sample:
    """Return the sample with only the counters that the numbers use."""
    infos = [{key: info[key] for key in KEPT if key in info} for info in sample.infos]
    return Sample(sample.first, sample.end, infos)


# --- Timers inside the scheduler (plugin/speed_probe.py)


def probed(launch: Launch, timers: Path) -> Launch:
    """Return the same engine with timers that write to this file."""
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    extra = {
        "PYTHONPATH": path,
        "SPEED_PROBE_OUT": str(timers.resolve()),
        "SPEED_PROBE_KERNELS": str(0 if launch.arguments["device"] == "cpu" else PROFILED_ROUNDS),
    }
    return replace(launch, environment={**launch.environment, **extra})


def profile(engine: Asker, cell: Cell, preset: Preset, timers: Path) -> dict[str, Any]:
    """Return the timers' output for all repeats, with sums in place of some 50,000 kernels."""
    timed(engine, cell, WARM_UP, preset, timers)
    bursts = [
        {**burst, "kernels": kernels and summed(kernels, recorded_rounds(burst))}
        for repeat in range(preset.repeats)
        for burst in timed(engine, cell, repeat, preset, timers)
        for kernels in [burst["kernels"]]
    ]
    return {"rounds": sum(len(burst["rounds"]) for burst in bursts), "bursts": bursts}


def recorded_rounds(burst: dict[str, Any]) -> int:
    """Return the number of rounds that were profiled."""
    return sum(one["recorded"] for one in burst["rounds"])


def timed(
    engine: Asker, cell: Cell, repeat: int | str, preset: Preset, timers: Path
) -> list[dict[str, Any]]:
    """Run a repeat, and return the scheduler's timings of it."""
    before = len(whole_lines(timers))
    engine.ask(work(cell, repeat, preset))
    deadline = time.monotonic() + TIMERS_SECONDS
    while len(lines := whole_lines(timers)) == before:
        if time.monotonic() > deadline:
            raise BenchError(
                f"The timers of {cell.name} wrote nothing to {timers}: SGLang did not load "
                "the plugin speed_probe, or its scheduler has changed. The engine's log says."
            )
        time.sleep(0.05)
    return lines[before:]
