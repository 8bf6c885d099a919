"""Run cells with timers inside SGLang's scheduler (plugin/speed_probe.py), and read them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu import replays
from speed.engines import Launch
from speed.grid import Cell, System
from speed.measure import work
from speed.presets import Preset
from speed.remote import Asker, running
from study import BenchError

PLUGIN = Path(__file__).resolve().parent / "plugin"
#: The forwards of one round in so many are run again, alone.
FORWARDS_EVERY = 2
#: Rounds per burst that are profiled on a GPU, kernel by kernel.
PROFILED_ROUNDS = 20
PATIENCE = 30.0


def probed(launch: Launch, out: Path) -> Launch:
    """Return the same engine with timers that write to ``out``."""
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    extra = {
        "PYTHONPATH": path,
        "SPEED_PROBE_OUT": str(out.resolve()),
        "SPEED_PROBE_FORWARDS_EVERY": str(FORWARDS_EVERY),
        "SPEED_PROBE_KERNELS": str(0 if launch.arguments["device"] == "cpu" else PROFILED_ROUNDS),
    }
    return replace(launch, environment={**launch.environment, **extra})


@dataclass(frozen=True)
class ProbedEngine:
    """An engine with timers, and their output file."""

    asker: Asker
    out: Path

    def inside(self, cell: Cell, repeat: int | str, preset: Preset) -> dict[str, Any]:
        """Run a repeat, and return the scheduler's timings of it."""
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
    """Return a burst of timings, with sums in place of its some 50,000 kernels."""
    found = json.loads(line)
    kernels = found.pop("kernels", None)
    return {**found, "replays": replays.summed(kernels) if kernels else None}


@contextlib.contextmanager
def start_probed(system: System, launch: Launch, folder: Path) -> Iterator[ProbedEngine]:
    """Start an engine with timers for the ``with`` block."""
    out = folder / "logs" / f"{system.slug}-timers.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    log = folder / "logs" / f"{system.slug}-probed.log"
    with running(probed(launch, out), log) as engine:
        yield ProbedEngine(engine, out)
