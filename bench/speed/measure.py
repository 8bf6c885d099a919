"""Measure engines, one at a time or in turns with plain decoding; keep every sample."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

from dummies import FIRST_TOKEN
from speed import grid
from speed.grid import DRAFT, HEAD, PLAIN, TARGET, Cell, Launch, System
from speed.presets import Preset, write_models
from speed.remote import Asker, EngineError, RemoteEngine, Sample, Work, running
from speed.runner import Attempt, CallError, Case, Places
from study import code_fingerprint

TEMPERATURE = 0.7
WARM_UP, WARM_UP_TOKENS = "warm-up", 16
WARM_SECONDS = 3.0
#: Grace period of a finished engine, which is then killed.
STOP_SECONDS = 0.5
KEPT = ("completion_tokens", "spec_verify_ct", "spec_smc_rounds_ct", "spec_smc_replayed_ct")


def work(cell: Cell, repeat: int | str, preset: Preset) -> Work:
    """Return the requests of a repeat: the same for every system, different in every repeat."""
    tokens = WARM_UP_TOKENS if repeat == WARM_UP else preset.new_tokens
    limit = preset.pair.target.vocab_size
    prompts = []
    for index in range(cell.batch):
        draw = random.Random(f"{cell.prompt} {repeat} {index}")
        prompts.append([draw.randrange(FIRST_TOKEN, limit) for _ in range(cell.prompt)])
    common = {"temperature": TEMPERATURE, "max_new_tokens": tokens, "ignore_eos": True}
    params: list[dict[str, Any]] = [
        {**common, "sampling_seed": index} for index in range(cell.batch)
    ]
    return Work(prompts, params)


class EngineCase(NamedTuple):
    """An engine, its cells as (batch, prompt tokens), and about how long it takes."""

    system: System
    sizes: Sequence[tuple[int, int]]
    start_seconds: float
    sample_seconds: float  # per cell: warm-up and repeats
    engine: Mapping[str, Any] = {}

    @property
    def cells(self) -> list[Cell]:
        return [Cell(self.system, batch, prompt) for batch, prompt in self.sizes]

    @property
    def seconds(self) -> float:
        return self.start_seconds + self.sample_seconds * len(self.sizes)


#: Measures more of a cell once it is sampled.
More = Callable[[RemoteEngine, Cell, Preset], dict[str, Any]]


def engine_cases(
    cases: Sequence[EngineCase],
    preset: Preset,
    places: Places,
    *,
    paired: bool = False,
    more: More | None = None,
) -> list[Case]:
    """Return a case for each engine; its parts are the engine's cells.

    Args:
        paired: measure plain decoding beside each other engine, with the preset's sizes for all.
    """
    found = []
    for case in cases:
        sized = preset if paired else preset_of(case, preset)
        launch = launch_of(case.system, sized, places)
        shared = {
            "pair": preset.pair.name,
            "engine": without_models(launch),
            "environment": launch.environment,
            "new_tokens": preset.new_tokens,
            "repeats": preset.repeats,
            "temperature": TEMPERATURE,
            "paired": paired,
            "sglang": version("sglang"),
            "torch": version("torch"),
        }
        if paired or case.system.num_particles is not None:
            shared["plugin"] = code_fingerprint()["plugin"]
        parts = {cell.slug: {"cell": cell.slug, **shared} for cell in case.cells}
        run = partial(measure, case, sized, places, paired and case.system != PLAIN, more)
        found.append(Case(case.system.slug, parts, case.seconds, run, shown(launch)))
    return found


def preset_of(case: EngineCase, preset: Preset) -> Preset:
    """Return the preset with an engine for only this case's sizes."""
    batches, prompts = (tuple(sorted(set(sizes))) for sizes in zip(*case.sizes, strict=True))
    graphs = {} if preset.device == "cpu" else {"cuda_graph_bs_decode": list(batches)}
    engine = {**preset.engine, **graphs, **case.engine}
    return replace(preset, batches=batches, prompts=prompts, engine=engine)


def launch_of(system: System, preset: Preset, places: Places) -> Launch:
    """Return the launch of a system's engine, with its models in the places' folder."""
    pair = preset.pair
    target, draft = pair.folders or (places.models / pair.name / one for one in (TARGET, DRAFT))
    head = places.models / pair.name / HEAD
    return grid.launch(system, preset, {TARGET: target, DRAFT: draft, HEAD: head})


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
    paired: bool,
    more: More | None,
    missing: Sequence[str],
    attempt: Attempt,
) -> None:
    """Measure one engine's missing cells."""
    write_models(preset.pair, places.models, has_head=grid.drafted_by(case.system) == HEAD)

    with contextlib.ExitStack() as stack:

        def start(system: System, beside: str = "") -> RemoteEngine:
            log = places.logs / f"{attempt.stage}-{case.system.slug}{beside}.log"
            launch = launch_of(system, preset, places)
            return stack.enter_context(running(launch, log, STOP_SECONDS))

        try:
            plain = start(PLAIN, "-beside") if paired else None
        except EngineError as error:
            raise CallError(f"Plain decoding did not start: {error}") from error
        engine = start(case.system)
        attempt.started = True
        for cell in (cell for cell in case.cells if cell.slug in missing):
            attempt.clock.require(case.sample_seconds + WARM_SECONDS)
            found = sampled(engine, cell, preset, plain)
            attempt.add(cell.slug, {**found, **(more(engine, cell, preset) if more else {})})


def sampled(
    engine: Asker, cell: Cell, preset: Preset, plain: Asker | None = None
) -> dict[str, Any]:
    """Run a warm-up and all repeats of a cell; return its samples, and medians of them.

    Args:
        plain: an engine of plain decoding, which gets each repeat just before.
    """
    samples: list[Sample] = []
    beside: list[Sample] = []
    for repeat in (WARM_UP, *range(preset.repeats)):
        asked = work(cell, repeat, preset)
        if plain is not None:
            beside.append(_beside(plain, asked, cell))
        samples.append(engine.ask(asked))
    del samples[0], beside[:1]
    infos = [info for sample in samples for info in sample.infos]
    found = {
        "decode_tokens_per_second": median(sample.decode_speed for sample in samples),
        "tokens_per_second": median(sample.speed for sample in samples),
        "round_ms": 1000 * median(sample.decode_seconds / sample.rounds for sample in samples),
        "first_ms": 1000 * median(max(sample.first) for sample in samples),
        "samples": [asdict(reduced(sample)) for sample in samples],
        "beside": [asdict(reduced(sample)) for sample in beside],
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


def _beside(plain: Asker, asked: Work, cell: Cell) -> Sample:
    try:
        return plain.ask(asked)
    except EngineError as error:  # not an error of the cell itself
        raise CallError(f"Plain decoding failed beside {cell.name}: {error}") from error
