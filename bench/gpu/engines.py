"""Measure each engine's tokens per second and the time of its rounds, one engine at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gpu.rounds import kernels_in, summed
from gpu.runner import Attempt, Case, Places
from speed import grid, presets
from speed.grid import (
    ADAPTIVE,
    AR,
    AR_DRAFT,
    AUTO,
    BLOCK,
    CHAIN,
    DRAFT,
    EAGLE,
    EXACT,
    EXACT_HEAD,
    HEAD,
    SMC,
    STANDALONE,
    TARGET,
    TREE,
    Cell,
    Launch,
    System,
)
from speed.measure import TEMPERATURE, WARM_UP, work
from speed.presets import PAIR_70B, PRESETS, Pair, Preset
from speed.remote import Asker, Sample, running
from study import code_fingerprint

from sglang_smc.dtype import default_dtype
from sglang_smc.tools.plan.shapes import ModelShape

#: Grace period of a finished engine, which is then killed.
STOP_SECONDS = 0.5
KEPT = ("completion_tokens", "spec_verify_ct", "spec_smc_rounds_ct", "spec_smc_replayed_ct")
WARM_SECONDS = 3.0
#: What SGLang's profiler records on a GPU: the kernels of so many rounds.
PROFILED_ROUNDS = 20
PROFILE_OPTIONS = {
    "num_steps": PROFILED_ROUNDS,
    "profile_by_stage": True,
    "activities": ["GPU"],
    "with_stack": False,
    "record_shapes": False,
}

# --- Engines, with batches and prompts, the most important first

N = K = 8
#: Draft vocabulary of published heads for Llama 3.1 8B.
HOT_TOKENS = 32_000

Sizes = tuple[tuple[int, int], ...]
ONE: Sizes = ((1, 256),)
#: By importance: the headline, long prompts, then large batches.
ALL: Sizes = ((1, 256), (1, 4096), (8, 256), (32, 256), (8, 4096), (32, 4096))
SHORT: Sizes = ((1, 256), (8, 256), (32, 256))


class EngineCase(NamedTuple):
    """An engine, and its cells as (batch, prompt tokens)."""

    system: System
    sizes: Sizes
    start_seconds: float
    sample_seconds: float  # per cell: warm-up and repeats
    engine: Mapping[str, Any]

    @property
    def cells(self) -> list[Cell]:
        return [Cell(self.system, batch, prompt) for batch, prompt in self.sizes]


def system_of(family: str) -> System:
    """Return a system of this family, at N = K = 8 if it has particles."""
    return System(family, N, K) if family in SMC else System(family)


def _case(family: str, sizes: Sizes, start_seconds: float = 45.0, **engine: Any) -> EngineCase:
    return EngineCase(system_of(family), sizes, start_seconds, 5.0, engine)


#: SGLang's default backend, flashinfer, first compiles its tree kernels for minutes.
OF_TREES = {"attention_backend": "fa3"}
PLAIN, STOCK_DRAFT = _case(AR, (*ALL, (64, 256))), _case(CHAIN, SHORT)
SPEED = (
    _case(AR_DRAFT, SHORT),  # K of its passes are a lower bound of the drafting time
    PLAIN,
    _case(BLOCK, ALL),
    _case(EXACT, ALL),
    _case(EXACT_HEAD, SHORT, 55.0),
    _case(EAGLE, SHORT, 55.0, **OF_TREES),
    _case(ADAPTIVE, ((32, 256), (64, 256), (1, 256)), 70.0),  # a graph for each budget and batch
)
MORE = (STOCK_DRAFT, _case(TREE, SHORT, **OF_TREES), _case(AUTO, ((1, 256), (1, 4096))))
PROFILE = (_case(BLOCK, ((1, 256), (1, 4096))), _case(EXACT, ONE))
LARGE = tuple(
    case._replace(sizes=ONE, start_seconds=50.0, sample_seconds=15.0)
    for case in (PLAIN, _case(BLOCK, ONE), _case(EXACT, ONE), STOCK_DRAFT)
)

#: Prefill runs without graphs, which take most of a start; only decoding is measured.
FAST_START = {"disable_prefill_cuda_graph": True, "mem_fraction_static": 0.8}
SPEED_8B = replace(PRESETS["h200-8b"], new_tokens=256, repeats=3, engine=FAST_START)
PROFILE_8B = replace(SPEED_8B, new_tokens=512, repeats=2)
LARGE_START = {**FAST_START, "mem_fraction_static": 0.9}
SPEED_70B = replace(SPEED_8B, name="h200-70b", pair=PAIR_70B, repeats=2, engine=LARGE_START)
TINY_PAIR = Pair(
    "tiny",
    ModelShape(2, 64, 128, 2, 1, 32, 1024, tied_embeddings=False),
    ModelShape(1, 32, 64, 1, 1, 32, 1024, tied_embeddings=False),
)
TINY = replace(
    PRESETS["cpu"], name="tiny", pair=TINY_PAIR, dtype=default_dtype(), new_tokens=24, repeats=1
)


def on_a_cpu(cases: Sequence[EngineCase]) -> list[EngineCase]:
    """Return the cases that run on a CPU, with one size or two."""
    return [
        case._replace(sizes=tuple(dict.fromkeys((min(b, 2), 32) for b, _ in case.sizes)))
        for case in cases
        if case.system.family not in (*STANDALONE, EAGLE)  # which have no kernels there
    ]


def preset_of(case: EngineCase, preset: Preset) -> Preset:
    """Return the preset with an engine for only this case's sizes."""
    batches, prompts = (tuple(sorted(set(sizes))) for sizes in zip(*case.sizes, strict=True))
    graphs = {} if preset.device == "cpu" else {"cuda_graph_bs_decode": list(batches)}
    engine = {**preset.engine, **graphs, **case.engine}
    return replace(preset, batches=batches, prompts=prompts, engine=engine)


def launch_of(case: EngineCase, preset: Preset, models: Path) -> Launch:
    """Return the launch of the case's engine, with its models in folders under ``models``."""
    folders = {name: models / preset.pair.name / name for name in (TARGET, DRAFT, HEAD)}
    return grid.launch(case.system, preset_of(case, preset), folders)


def write_models(pair: Pair, models: Path, *, has_head: bool = False) -> None:
    """Write target and draft as folders of dummies, and a random EAGLE-3 head.

    The head's token map is among its weights, so that dummy weights would not do.
    """
    presets.write_models(pair, models)
    folder = models / pair.name
    if has_head and not (folder / HEAD / "model.safetensors").exists():
        from sglang_smc.tools.distill.checkpoints import new_head  # imports torch

        hot = range(min(HOT_TOKENS, pair.target.vocab_size))
        new_head("eagle3", folder / TARGET, folder / HEAD, hot_tokens=hot)


# --- Measurement


def engine_cases(
    cases: Sequence[EngineCase], preset: Preset, places: Places, *, profiled: bool = False
) -> list[Case]:
    """Return a case for each engine; its parts are the engine's cells."""
    found = []
    for case in cases:
        launch = launch_of(case, preset, places.models)
        shared = {
            "pair": preset.pair.name,
            "engine": without_models(launch),
            "environment": launch.environment,
            "new_tokens": preset.new_tokens,
            "repeats": preset.repeats,
            "temperature": TEMPERATURE,
            "sglang": version("sglang"),
        }
        if case.system.num_particles is not None:
            shared["plugin"] = code_fingerprint()["plugin"]
        if profiled:
            shared["profile"] = PROFILE_OPTIONS
        parts = {cell.slug: {"cell": cell.slug, **shared} for cell in case.cells}
        seconds = case.start_seconds + case.sample_seconds * len(case.sizes)
        run = partial(measure, case, preset, places, profiled)
        found.append(Case(case.system.slug, parts, seconds, run, shown(launch)))
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
    """Measure one engine's missing cells, and their rounds' kernels if ``profiled``."""
    has_head = grid.drafted_by(case.system) == HEAD
    write_models(preset.pair, places.models, has_head=has_head)
    sized, launch = preset_of(case, preset), launch_of(case, preset, places.models)
    name = f"{preset.name}-{case.system.slug}" + ("-profiled" if profiled else "")
    with running(launch, places.logs / f"{name}.log", STOP_SECONDS) as engine:
        attempt.started = True
        for cell in (cell for cell in case.cells if cell.slug in missing):
            attempt.clock.require(case.sample_seconds + WARM_SECONDS)
            found = sampled(engine, cell, sized)
            if profiled and preset.device != "cpu":
                with tempfile.TemporaryDirectory() as folder:
                    engine.exchange({"profile": {"output_dir": folder, **PROFILE_OPTIONS}})
                    engine.ask(work(cell, "profile", sized))
                    found["kernels"] = summed(kernels_in(Path(folder)), PROFILED_ROUNDS)
            attempt.add(cell.slug, found)


def sampled(engine: Asker, cell: Cell, preset: Preset) -> dict[str, Any]:
    """Run a warm-up and all repeats of a cell; return their medians."""
    engine.ask(work(cell, WARM_UP, preset))
    samples = [engine.ask(work(cell, repeat, preset)) for repeat in range(preset.repeats)]
    infos = [info for sample in samples for info in sample.infos]
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
        "simulated": grid.simulated_acceptance(cell.system, preset),
        "samples": [asdict(reduced(sample)) for sample in samples],
    }
    if any("spec_smc_replayed_ct" in info for info in infos):
        rounds = sum(info["spec_smc_rounds_ct"] for info in infos)
        replayed = sum(info["spec_smc_replayed_ct"] for info in infos)
        found["replayed_share"] = replayed / max(1, rounds)
    return found


def reduced(sample: Sample) -> Sample:
    """Return the sample with only the counters that the numbers use."""
    infos = [{key: info[key] for key in KEPT if key in info} for info in sample.infos]
    return replace(sample, infos=infos)
