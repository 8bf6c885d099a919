"""Measure the engines, with plain decoding beside or around each, and store every sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from dummies import FIRST_TOKEN
from speed.grid import PLAIN, Cell, System
from speed.presets import Preset
from speed.remote import Asker, EngineError, Sample, Work
from study import BenchError, Log, bar

TEMPERATURE = 0.7
WARM_UP, WARM_UP_TOKENS = "warm-up", 16

#: Starts the engine of a system.
Start = Callable[[System], AbstractContextManager[Asker]]


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


@dataclass(frozen=True)
class Measured:
    """One repeat; ``beside`` is plain decoding of the same requests just before it."""

    repeat: int
    sample: Sample
    beside: Sample | None = None


@dataclass(frozen=True)
class CellLog:
    """The stored repeats of a cell, or the reason why it cannot run here."""

    log: Log

    def measured(self) -> list[Measured]:
        """Return the repeats."""
        return [
            Measured(
                entry["repeat"],
                Sample(**entry["sample"]),
                entry["beside"] and Sample(**entry["beside"]),
            )
            for entry in self.log.read()
            if "refused" not in entry
        ]

    def refused(self) -> str | None:
        """Return the engine's error if the cell cannot run here, else None."""
        reasons = [entry["refused"] for entry in self.log.read() if "refused" in entry]
        return reasons[-1] if reasons else None

    def missing(self, repeats: int) -> list[int]:
        """Return the missing repeats; none if the cell cannot run."""
        if self.refused():
            return []
        return sorted(set(range(repeats)) - {one.repeat for one in self.measured()})

    def add(self, entry: Measured | str) -> None:
        """Write one repeat, or the reason why the cell cannot run here."""
        with self.log.writing() as append:
            append({"refused": entry} if isinstance(entry, str) else asdict(entry))


class Turn:
    """One engine's samples, with a warm-up for each cell."""

    def __init__(self, asker: Asker, preset: Preset) -> None:
        self._asker, self._preset = asker, preset
        self._warm: set[Cell] = set()

    def sample(self, cell: Cell, repeat: int) -> Sample:
        """Measure one repeat of a cell, behind a few unmeasured tokens if it has not run yet."""
        if cell not in self._warm:
            self._asker.ask(work(cell, WARM_UP, self._preset))
            self._warm.add(cell)
        return self._asker.ask(work(cell, repeat, self._preset))


class Bench:
    """One call: plain decoding runs beside each other engine, and the two take turns."""

    def __init__(self, preset: Preset, logs: Mapping[Cell, CellLog], start: Start) -> None:
        self._preset, self._logs, self._start = preset, logs, start

    def measure(self, todo: Mapping[Cell, Sequence[int]]) -> None:
        """Complete these repeats of cells; record the reason if a system fails."""
        total = sum(map(len, todo.values()))
        with bar(total=total, unit="sample") as self._bar, self._start(PLAIN) as asker:
            plain = Turn(asker, self._preset)
            for system, group in groupby(todo, key=lambda cell: cell.system):
                cells = {cell: todo[cell] for cell in group}
                if system == PLAIN:
                    for cell in cells:
                        self._repeats(cell, cells[cell], plain, None)
                else:
                    self._system(system, cells, plain)

    def _system(self, system: System, todo: dict[Cell, Sequence[int]], plain: Turn) -> None:
        """Measure all cells of one engine; restart it after a failed cell."""
        left = list(todo)
        while left:
            started = False
            self._bar.set_description_str(f"starting {system.name}")
            try:
                with self._start(system) as asker:
                    started, turn = True, Turn(asker, self._preset)
                    while left:
                        self._repeats(left[0], todo[left[0]], turn, plain)
                        left.pop(0)
            except EngineError as error:
                failed = left[:1] if started else left
                for cell in failed:
                    self._bar.write(f"{cell.name}: not run here: {error}")
                    self._bar.update(len(self._logs[cell].missing(self._preset.repeats)))
                    self._logs[cell].add(str(error))
                left = left[len(failed) :]

    def _repeats(self, cell: Cell, repeats: Sequence[int], turn: Turn, plain: Turn | None) -> None:
        self._bar.set_description_str(cell.name)
        for repeat in repeats:
            beside = None if plain is None else _beside(plain, cell, repeat)
            self._logs[cell].add(Measured(repeat, turn.sample(cell, repeat), beside))
            self._bar.update()


def _beside(plain: Turn, cell: Cell, repeat: int) -> Sample:
    try:
        return plain.sample(cell.reference, repeat)
    except EngineError as error:  # not an error of the cell itself
        raise BenchError(f"Plain decoding failed beside {cell.name}: {error}") from error
