"""Measure each engine's tokens per second and the parts of its rounds, one engine at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

from gpu.cases import EngineCase, launch_of, preset_of, write_models
from gpu.probing import PLUGIN, ProbedEngine, start_probed
from gpu.stages import Attempt, Case, Places
from speed.bound import measure_machine
from speed.engines import simulated_acceptance
from speed.grid import Cell
from speed.measure import TEMPERATURE, WARM_UP, work
from speed.presets import Preset
from speed.remote import Asker, Sample, running
from study import code_fingerprint, digest

#: Grace period of a finished engine, which is then killed.
STOP_SECONDS = 0.5
MACHINE = "machine"
KEPT = ("completion_tokens", "spec_verify_ct", "spec_smc_rounds_ct", "spec_smc_replayed_ct")
WARM_SECONDS = 3.0


def engine_cases(
    cases: Sequence[EngineCase], preset: Preset, places: Places, *, profiled: bool = False
) -> list[Case]:
    """Return a case for each engine; its parts are the engine's cells."""
    write = profile if profiled else measure
    return [
        Case(
            slug=case.slug,
            parts={
                cell.slug: identity(case, cell, preset, places, profiled=profiled)
                for cell in case.cells
            },
            seconds=case.seconds,
            run=partial(write, case, preset, places),
            shown=shown(case, preset, places),
        )
        for case in cases
    ]


def machine_case(preset: Preset, places: Places) -> Case:
    """Return the case that measures the machine's bandwidth and FLOP/s, for rooflines."""
    parts = {MACHINE: {"device": preset.device, "dtype": preset.dtype}}
    return Case(MACHINE, parts, 15.0, partial(measure_ceilings, preset, places), "torch alone")


def measure_ceilings(
    preset: Preset, places: Places, missing: Sequence[str], attempt: Attempt
) -> None:
    """Measure a copy and a matrix product, in a process of their own."""
    found = measure_machine(preset, places.work / "machine.json")
    attempt.add(MACHINE, found._asdict())


def identity(
    case: EngineCase, cell: Cell, preset: Preset, places: Places, *, profiled: bool
) -> dict[str, Any]:
    """Return the settings that a cell depends on; the plugin's code only for SMC."""
    launch = launch_of(case, preset, places.models)
    folders = ("model_path", "speculative_draft_model_path")
    found = {
        "cell": cell.slug,
        "pair": preset.pair.name,
        "engine": {k: v for k, v in launch.arguments.items() if k not in folders},
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


def shown(case: EngineCase, preset: Preset, places: Places) -> str:
    """Return the command that starts the engine by hand."""
    launch = launch_of(case, preset, places.models)
    variables = "".join(f"{name}={value} " for name, value in launch.environment.items())
    arguments = ", ".join(f"{name}={value!r}" for name, value in launch.arguments.items())
    return f"{variables}sglang.Engine({arguments})"


def measure(
    case: EngineCase, preset: Preset, places: Places, missing: Sequence[str], attempt: Attempt
) -> None:
    """Measure one engine's missing cells."""
    write_models(preset.pair, places.models, case.drafted)
    sized = preset_of(case, preset)
    log = places.logs / f"{preset.name}-{case.slug}.log"
    with running(launch_of(case, preset, places.models), log, STOP_SECONDS) as engine:
        attempt.started = True
        for cell in wanted(case, missing):
            attempt.require(case.sample_seconds + WARM_SECONDS)
            attempt.add(cell.slug, sampled(engine, cell, sized))


def wanted(case: EngineCase, missing: Sequence[str]) -> list[Cell]:
    return [cell for cell in case.cells if cell.slug in missing]


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
    rounds = total(samples, "spec_smc_rounds_ct")
    if rounds:
        found["replayed_share"] = share(total(samples, "spec_smc_replayed_ct"), rounds)
    return found


def total(samples: Sequence[Sample], key: str) -> int | None:
    """Return the sum over all requests; None if no request has the key."""
    values = [info[key] for sample in samples for info in sample.infos if key in info]
    return sum(values) if values else None


def share(part: int | None, whole: int) -> float | None:
    return None if part is None else part / whole


def reduced(sample: Sample) -> Sample:
    """Return the sample with only the counters that the numbers use."""
    infos = [{key: info[key] for key in KEPT if key in info} for info in sample.infos]
    return Sample(sample.first, sample.end, infos)


def profile(
    case: EngineCase, preset: Preset, places: Places, missing: Sequence[str], attempt: Attempt
) -> None:
    """Time the rounds of one engine from inside its scheduler."""
    write_models(preset.pair, places.models, case.drafted)
    sized, launch = preset_of(case, preset), launch_of(case, preset, places.models)
    with start_probed(case.system, launch, places.work) as engine:
        attempt.started = True
        for cell in wanted(case, missing):
            attempt.require(case.sample_seconds + WARM_SECONDS)
            attempt.add(cell.slug, profiled_rounds(engine, cell, sized))


def profiled_rounds(engine: ProbedEngine, cell: Cell, preset: Preset) -> dict[str, Any]:
    """Return the timers' output for all repeats."""
    engine.inside(cell, WARM_UP, preset)
    entries = [engine.inside(cell, repeat, preset) for repeat in range(preset.repeats)]
    bursts = [burst for entry in entries for burst in entry["bursts"]]
    replayed = [burst["replays"] for burst in bursts if burst["replays"]]
    return {
        "rounds": sum(len(burst["rounds"]) for burst in bursts),
        "profiled_rounds": sum(one["rounds"] for one in replayed),
        "entries": entries,
    }
