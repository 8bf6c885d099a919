"""Measure the engines, with plain decoding beside or around each, and show the progress."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

from speed.grid import PLAIN, Cell, System
from speed.presets import FIRST_TOKEN, Preset
from speed.remote import Asker, EngineError, Sample, Work
from speed.store import CellLog, Measured
from study import BenchError, bar

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
    params: list[dict[str, Any]] = [
        {
            "temperature": TEMPERATURE,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "sampling_seed": index,
        }
        for index in range(cell.batch)
    ]
    return Work(prompts, params)


class TimeUpError(Exception):
    """The time of the call is used up."""


class Turn:
    """One engine's samples, with a warm-up for each cell."""

    def __init__(self, asker: Asker, preset: Preset) -> None:
        self._asker, self._preset = asker, preset
        self._warm: set[Cell] = set()

    def warm_up(self, cell: Cell) -> None:
        """Run a few unmeasured tokens, if this cell has not run yet."""
        if cell not in self._warm:
            self._asker.ask(work(cell, WARM_UP, self._preset))
            self._warm.add(cell)

    def sample(self, cell: Cell, repeat: int) -> Sample:
        """Measure one repeat of a cell."""
        self.warm_up(cell)
        return self._asker.ask(work(cell, repeat, self._preset))


class Bench:
    """One call: its cells, their logs and its deadline."""

    def __init__(
        self,
        preset: Preset,
        logs: Mapping[Cell, CellLog],
        start: Start,
        run: str,
        deadline: float = math.inf,
    ) -> None:
        self._preset, self._logs, self._start, self._run = preset, logs, start, run
        self._deadline = deadline  # of `time.monotonic`; a started sample is completed

    def measure(self, todo: Mapping[Cell, Sequence[int]]) -> None:
        """Complete the cells; record the reason if a system fails."""
        self._todo = dict(todo)
        with bar(total=sum(map(len, todo.values())), unit="sample") as self._bar:
            try:
                if self._preset.side_by_side:
                    self._side_by_side()
                else:
                    self._one_at_a_time()
            except TimeUpError:
                self._bar.write("Time is up: the same command goes on from here.")

    def _side_by_side(self) -> None:
        """Keep plain decoding running beside each other engine; the two take turns."""
        with self._start(PLAIN) as asker:
            plain = Turn(asker, self._preset)
            for system, cells in self._systems():
                if system == PLAIN:
                    for cell in cells:
                        self._repeats(cell, plain, None)
                else:
                    self._system(system, cells, plain)

    def _one_at_a_time(self) -> None:
        """Run plain decoding before all others, and again after them."""
        others = [(system, cells) for system, cells in self._systems() if system != PLAIN]
        references = list(dict.fromkeys(cell.reference for cell in self._todo))
        self._plain(references, range(self._preset.repeats))
        try:
            for system, cells in others:
                self._system(system, cells, None)
        except TimeUpError:
            self._plain_again(references)
            raise
        if others:
            self._plain_again(references)

    def _plain_again(self, cells: Sequence[Cell]) -> None:
        self._plain(cells, range(self._preset.repeats, 2 * self._preset.repeats))

    def _plain(self, cells: Sequence[Cell], repeats: Sequence[int]) -> None:
        with self._start(PLAIN) as asker:
            plain = Turn(asker, self._preset)
            for cell in cells:
                self._bar.set_description_str(cell.name)
                for repeat in repeats:
                    sample = plain.sample(cell, repeat)
                    self._logs[cell].add(Measured(self._run, repeat, sample))
                self._bar.update(len(self._todo.get(cell, ())) if repeats[0] == 0 else 0)

    def _systems(self) -> list[tuple[System, list[Cell]]]:
        groups = groupby(self._todo, key=lambda cell: cell.system)
        return [(system, list(cells)) for system, cells in groups]

    def _system(self, system: System, cells: list[Cell], plain: Turn | None) -> None:
        """Measure all cells of one engine; restart it after a failed cell."""
        left = list(cells)
        while left:
            self._check_time()
            started = False
            self._bar.set_description_str(f"starting {system.name}")
            try:
                with self._start(system) as asker:
                    started, turn = True, Turn(asker, self._preset)
                    while left:
                        self._repeats(left[0], turn, plain)
                        left.pop(0)
            except EngineError as error:
                for cell in left[:1] if started else left:
                    self._refuse(cell, str(error))
                left = left[1:] if started else []

    def _refuse(self, cell: Cell, reason: str) -> None:
        self._bar.write(f"{cell.name}: not run here: {reason}")
        self._bar.update(len(self._logs[cell].missing(self._preset.repeats)))
        self._logs[cell].refuse(reason)

    def _repeats(self, cell: Cell, turn: Turn, plain: Turn | None) -> None:
        self._bar.set_description_str(cell.name)
        turn.warm_up(cell)
        for repeat in self._todo[cell]:
            self._check_time()
            beside = _beside(plain, cell, repeat) if plain else None
            sample = turn.sample(cell, repeat)
            self._logs[cell].add(Measured(self._run, repeat, sample, beside))
            self._bar.update()

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise TimeUpError


def _beside(plain: Turn, cell: Cell, repeat: int) -> Sample:
    try:
        return plain.sample(cell.reference, repeat)
    except EngineError as error:  # not an error of the cell itself
        raise BenchError(f"Plain decoding failed beside {cell.name}: {error}") from error
