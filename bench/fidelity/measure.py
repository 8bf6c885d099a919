"""Run the problems of a cell, and grade their answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from answers import COMMON, Answers, Asker, Reply, Request, request, started
from fidelity.grid import SIZES, Cell
from pair.task import check, held_out
from study import BenchError

#: The warm-up problem, beyond all measured ones.
WARM_UP = 1_000_000
KEPT = ("completion_tokens", "spec_verify_ct")
KEPT_PREFIX = "spec_smc_"
#: Further settings of the SMC engine.
SMC: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": SIZES["num_steps"],
    "speculative_smc_num_particles": SIZES["num_particles"],
}


def settings(name: str) -> dict[str, Any]:
    """Return the keywords of `sgl.Engine` except the models."""
    return COMMON | (SMC if name == "smc" else {})


@contextlib.contextmanager
def running(name: str) -> Iterator[Asker]:
    """Start the target, the draft, or SMC with both for the ``with`` block."""
    models = ("target", "draft") if name == "smc" else (name,)
    with started(settings(name), *models) as asker:
        yield asker


@dataclass(frozen=True)
class Record:
    """One graded answer."""

    index: int
    right: bool
    part: int  # number of the run that measured it; above 0 after an interruption
    at: float  # seconds since that run began
    output_ids: list[int]  # including EOS
    info: dict[str, Any]


def seconds(records: Sequence[Record]) -> float:
    """Return the wall time of all runs; of an interrupted one, up to its last answer."""
    ends: dict[int, float] = {}
    for record in records:
        ends[record.part] = max(record.at, ends.get(record.part, 0.0))
    return sum(ends.values())


def request_of(cell: Cell, index: int) -> Request:
    """Return the request of problem ``index``, with its number as the seed, as ``cell`` sets it."""
    return request(index, index, cell.temperature, cell.kind.smc)


def grade(reply: Reply, *, part: int, at: float) -> Record:
    """Return the record of a reply; raise BenchError if some of its tokens are missing."""
    info = reply.meta_info
    if len(reply.output_ids) != info["completion_tokens"]:
        raise BenchError(
            f"Problem {reply.index} was answered with {info['completion_tokens']} tokens, of which "
            f"{len(reply.output_ids)} came: they cannot be scored."
        )
    # An answer cut off by the length limit may end in a right number by chance.
    ended = info["finish_reason"]["type"] == "stop"
    kept = {key: info[key] for key in info if key in KEPT or key.startswith(KEPT_PREFIX)}
    if "spec_smc_rounds_ct" in kept:  # each is one target pass
        kept.setdefault("spec_verify_ct", kept["spec_smc_rounds_ct"])
    right = ended and check(reply.text, held_out(reply.index))
    return Record(reply.index, right, part, round(at, 3), reply.output_ids, kept)


def graded(cell: Cell, answers: Answers[Record], asker: Asker) -> Iterator[Record]:
    """Run the missing problems of one cell, after a warm-up problem."""
    part = max((record.part for record in answers.read()), default=-1) + 1
    missing = [index for _, index in answers.missing()]
    list(asker.ask([request_of(cell, WARM_UP)]))
    began = time.perf_counter()
    for reply in asker.ask([request_of(cell, index) for index in missing]):
        yield grade(reply, part=part, at=time.perf_counter() - began)
