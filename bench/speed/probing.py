"""Run cells with timers inside SGLang's scheduler (plugin/speed_probe.py), and read them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from speed import replays
from speed.engines import Launch
from speed.grid import Cell, System
from speed.measure import WARM_UP, work
from speed.presets import Preset
from speed.remote import Asker, EngineError, running
from study import BenchError, Log, bar
from tqdm import tqdm

PLUGIN = Path(__file__).resolve().parent / "plugin"
#: Of so many rounds the forwards of one are run again, alone.
FORWARDS_EVERY = 2
#: Or of none: they are timed where they run.
FORWARDS_ONCE = 1 << 30
#: Of a GPU's rounds in each burst so many are profiled, kernel by kernel.
PROFILED_ROUNDS = 20
PATIENCE = 30.0


def probed(launch: Launch, out: Path, forwards_every: int) -> Launch:
    """The same engine with timers that write to ``out``."""
    profiles = launch.arguments["device"] != "cpu" and forwards_every != FORWARDS_ONCE
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    extra = {
        "PYTHONPATH": path,
        "SPEED_PROBE_OUT": str(out.resolve()),
        "SPEED_PROBE_FORWARDS_EVERY": str(forwards_every),
        "SPEED_PROBE_KERNELS": str(PROFILED_ROUNDS if profiles else 0),
    }
    return replace(launch, environment={**launch.environment, **extra})


@dataclass(frozen=True)
class ProbedEngine:
    """An engine, and what its timers write."""

    asker: Asker
    out: Path

    def inside(self, cell: Cell, repeat: int | str, preset: Preset) -> dict[str, Any]:
        """Run a repeat, and return what the scheduler did meanwhile."""
        before = len(self._lines())
        sample = self.asker.ask(work(cell, repeat, preset))
        deadline = time.monotonic() + PATIENCE
        while len(lines := self._lines()) == before:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"The timers of {cell.name} wrote nothing to {self.out}: SGLang did not load "
                    "the plugin speed_probe, or its scheduler has changed. The engine's log says."
                )
            time.sleep(0.05)
        return {
            "bursts": [_burst(line) for line in lines[before:]],
            "tokens_per_round": sample.decode_tokens / cell.batch / sample.rounds,
        }

    def _lines(self) -> list[str]:
        if not self.out.exists():
            return []
        return [line for line in self.out.read_text().splitlines(keepends=True) if line[-1] == "\n"]


def _burst(line: str) -> dict[str, Any]:
    """What the timers wrote, with sums in place of kernels, of which there are some 50,000."""
    found = json.loads(line)
    kernels = found.pop("kernels", None)
    return {**found, "replays": replays.summed(kernels) if kernels else None}


#: Starts the engine of a system with timers.
StartProbed = Callable[[System], AbstractContextManager[ProbedEngine]]


@contextlib.contextmanager
def start_probed(
    system: System, launch: Launch, folder: Path, forwards_every: int
) -> Iterator[ProbedEngine]:
    """An engine with timers for the ``with`` block."""
    out = folder / "logs" / f"{system.slug}-timers.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    log = folder / "logs" / f"{system.slug}-probed.log"
    with running(probed(launch, out, forwards_every), log) as engine:
        yield ProbedEngine(engine, out)


def probe(todo: Mapping[Cell, Log], preset: Preset, repeats: int, start: StartProbed) -> None:
    """Complete the cells; a system that does not run is told, and has no numbers."""
    missing = {cell: repeats - len(log.read()) for cell, log in todo.items()}
    total = sum(max(0, number) for number in missing.values())
    left = [cell for cell in todo if missing[cell] > 0]
    with bar(total=total, unit="sample", disable=not left) as line:
        for system, cells in groupby(left, key=lambda cell: cell.system):
            line.set_description_str(f"starting {system.name} with timers")
            try:
                with start(system) as engine:
                    _complete(list(cells), todo, missing, engine, preset, line)
            except EngineError as error:
                line.write(f"{system.name}: not run here: {error}")


def _complete(
    cells: Sequence[Cell],
    todo: Mapping[Cell, Log],
    missing: Mapping[Cell, int],
    engine: ProbedEngine,
    preset: Preset,
    line: tqdm,
) -> None:
    for cell in cells:
        line.set_description_str(f"timers: {cell.name}")
        engine.inside(cell, WARM_UP, preset)
        for repeat in range(missing[cell]):
            found = engine.inside(cell, repeat, preset)
            with todo[cell].writing() as append:
                append(found)
            line.update()
