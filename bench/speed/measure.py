"""Measure engines, one at a time or in turns with plain decoding; keep every sample."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dummies import FIRST_TOKEN
from speed.conditions import EngineStart, conditions
from speed.grid import (
    ADAPTS,
    EXACT,
    PLAIN,
    Preset,
    SpeedCell,
    System,
    launch_of,
    settings_of,
    write_models,
)
from speed.remote import EngineError, RemoteEngine, TimedBatch, Work, running
from speed.runner import Attempt, CallError, Case, Entry
from study import code_fingerprint

TEMPERATURE = 0.7
WARM_UP = "warm-up"
WARM_UP_TOKENS = 16
KEPT = ("completion_tokens", "spec_verify_ct", "spec_smc_rounds_ct", "spec_smc_replayed_ct")


def work(cell: SpeedCell, repeat: int | str, preset: Preset) -> Work:
    """Return the requests of a repeat: the same for every system, different in every repeat."""
    tokens = WARM_UP_TOKENS if repeat == WARM_UP else preset.new_tokens
    limit = preset.pair.target.vocab_size
    prompts = []
    for index in range(cell.batch):
        draw = random.Random(f"{cell.prompt} {repeat} {index}")
        prompts.append([draw.randrange(FIRST_TOKEN, limit) for _ in range(cell.prompt)])
    common: Entry = {"temperature": TEMPERATURE, "max_new_tokens": tokens, "ignore_eos": True}
    if preset.adaptive is not None and cell.system.family == EXACT:
        common["custom_params"] = {"smc": {"num_particles": cell.system.num_particles}}
    return Work(prompts, [{**common, "sampling_seed": index} for index in range(cell.batch)])


class EngineCase(NamedTuple):
    """An engine, its cells as (batch, prompt tokens), and about how long it takes.

    ``chosen`` are further systems, as which its requests choose to run.
    """

    system: System
    sizes: Sequence[tuple[int, int]]
    start_seconds: float
    sample_seconds: float  # per cell: warm-up and repeats
    engine: Mapping[str, Any] = {}
    chosen: Sequence[System] = ()

    @property
    def cells(self) -> list[SpeedCell]:
        return [SpeedCell(one, *size) for one in (self.system, *self.chosen) for size in self.sizes]

    @property
    def seconds(self) -> float:
        return self.start_seconds + self.sample_seconds * len(self.cells)


#: Measures more of a cell once it is sampled.
More = Callable[[RemoteEngine, SpeedCell, Preset], Entry]


def engine_cases(
    cases: Sequence[EngineCase],
    preset: Preset,
    folder: Path,
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
        launch = launch_of(case.system, sized, folder / "models")
        shared = {
            "pair": preset.pair.name,
            "engine": settings_of(launch),
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
        run = partial(measure, case, sized, folder, paired and case.system != PLAIN, more)
        found.append(Case(case.system.slug, parts, case.seconds, run, str(launch)))
    return found


def preset_of(case: EngineCase, preset: Preset) -> Preset:
    """Return the preset with an engine for only this case's sizes."""
    batches, prompts = (tuple(sorted(set(sizes))) for sizes in zip(*case.sizes, strict=True))
    graphs = {} if preset.device == "cpu" else {"cuda_graph_bs_decode": list(batches)}
    engine = {**preset.engine, **graphs, **case.engine}
    return replace(preset, batches=batches, prompts=prompts, engine=engine)


def measure(
    case: EngineCase,
    preset: Preset,
    folder: Path,
    paired: bool,
    more: More | None,
    attempt: Attempt,
) -> None:
    """Measure one engine's missing cells."""
    write_models(preset.pair, folder / "models", case.system.draft)
    with contextlib.ExitStack() as stack:

        def start(system: System, beside: str = "") -> RemoteEngine:
            log = folder / "logs" / f"{attempt.stage}-{case.system.slug}{beside}.log"
            return stack.enter_context(running(launch_of(system, preset, folder / "models"), log))

        plain = None
        if paired:
            with error_of_the_call("Plain decoding did not start"):
                plain = start(PLAIN, "-beside")
        began = time.time()
        engine = start(case.system)
        attempt.started = True
        took = EngineStart(began, time.time() - began)
        for cell in (cell for cell in case.cells if cell.slug in attempt.missing):
            found = sampled(engine, cell, preset, plain)
            if case.system.family in ADAPTS:
                found["costs"] = engine.internal_state()["smc"]["costs"]
            found["conditions"] = conditions(engine, took)
            attempt.add(cell.slug, {**found, **(more(engine, cell, preset) if more else {})})


@contextlib.contextmanager
def error_of_the_call(what: str) -> Iterator[None]:
    """Turn an engine's error into one of the call: it is not the cell's own."""
    try:
        yield
    except EngineError as error:
        raise CallError(f"{what}: {error}") from error


def sampled(
    engine: RemoteEngine, cell: SpeedCell, preset: Preset, plain: RemoteEngine | None = None
) -> Entry:
    """Run a warm-up and all repeats of a cell; return its samples, and medians of them.

    Args:
        plain: an engine of plain decoding, which gets each repeat just before.
    """
    samples: list[TimedBatch] = []
    beside: list[TimedBatch] = []
    for repeat in (WARM_UP, *range(preset.repeats)):
        asked = work(cell, repeat, preset)
        if plain is not None:
            with error_of_the_call(f"Plain decoding failed beside {cell.slug}"):
                beside.append(plain.ask(asked))
        samples.append(engine.ask(asked))
    del samples[0], beside[:1]
    infos = [info for sample in samples for info in sample.infos]
    found: Entry = {
        "decode_tokens_per_second": median(sample.decode_speed for sample in samples),
        "round_ms": 1000 * median(sample.round_seconds for sample in samples),
        "samples": list(map(_reduced, samples)),
        "beside": list(map(_reduced, beside)),
    }
    if any("spec_smc_replayed_ct" in info for info in infos):
        rounds = sum(info["spec_smc_rounds_ct"] for info in infos)
        replayed = sum(info["spec_smc_replayed_ct"] for info in infos)
        found["replayed_share"] = replayed / max(1, rounds)
    return found


def _reduced(sample: TimedBatch) -> Entry:
    """Return the sample with only the counters that the numbers use."""
    infos = [{key: info[key] for key in KEPT if key in info} for info in sample.infos]
    return asdict(sample) | {"infos": infos}
