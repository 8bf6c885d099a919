"""Answers on disk: one JSONL file for each cell, which a later run continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from study import Log


@dataclass(frozen=True)
class Drawn:
    """What one request gave: a plain sample, or the particles of SMC."""

    index: int  # of the problem
    sample: int  # which one of it, from 0 on
    chosen: str  # the server's answer
    texts: list[str]
    weights: list[float]  # that sum to 1
    tokens: int  # of all texts
    passes: int  # of the model
    values: dict[str, float] = field(default_factory=dict)  # log phi, of a plain sample


@dataclass(frozen=True)
class Pool:
    """The answers of a cell: of each problem, ``samples``."""

    log: Log
    problems: int
    samples: int

    def read(self) -> list[Drawn]:
        """In the order of problems and samples, of those that are asked for."""
        found = [Drawn(**entry) for entry in self.log.read()]
        found.sort(key=lambda one: (one.index, one.sample))
        return [one for one in found if one.index < self.problems]

    def missing(self) -> list[tuple[int, int]]:
        """Samples and problems that have no answer yet, sample by sample."""
        there = {(one.sample, one.index) for one in self.read()}
        wanted = ((s, index) for s in range(self.samples) for index in range(self.problems))
        return [pair for pair in wanted if pair not in there]

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[Drawn], None]]:
        """What appends an answer."""
        with self.log.writing() as append:
            yield lambda one: append(asdict(one))


@dataclass(frozen=True)
class Valued:
    """What potentials say of the plain samples of a pool; others may be asked about the same."""

    log: Log
    pool: Pool

    def read(self) -> list[Drawn]:
        """The samples that have values, with them."""
        known = {(one["index"], one["sample"]): one["values"] for one in self.log.read()}
        there = (one for one in self.pool.read() if (one.index, one.sample) in known)
        return [replace(one, values=known[one.index, one.sample]) for one in there]

    def missing(self) -> list[Drawn]:
        """Samples without values."""
        known = {(one.index, one.sample) for one in self.read()}
        return [one for one in self.pool.read() if (one.index, one.sample) not in known]
