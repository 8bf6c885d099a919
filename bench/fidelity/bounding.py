"""Bounds on how far SMC's law is from the target's, cell by cell, on a few problems.

They come from an SMC of plain models (`bounds.py`), since they need conditional runs, which an
engine does not make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelity.grid import Cell
from fidelity.measure import MAX_TOKENS
from results import Interval
from study import Log, bar, digest, in_processes

from sglang_smc.cpu.threads import usable_cores

HERE = Path(__file__).resolve().parent
#: Conditional runs given an answer; more make the bounds tighter, and cost that many runs.
NUM_CONDITIONAL = 2
SEED = 0


@dataclass(frozen=True)
class Divergence:
    """In nats an answer; None where not measured. s is SMC's law, p the target's.

    ``upper`` is from the engine's own answers, all the others from runs of plain models on the
    problems that ``--bound-problems`` says.
    """

    upper: Interval | None = None  # KL(s || p) is at most -E[log Z]
    tight_upper: Interval | None = None
    lower: Interval | None = None
    reverse_upper: Interval | None = None  # KL(p || s)
    reverse_lower: Interval | None = None


#: Bounds of cells on the first so many problems, in any order, as (place in the sequence, bounds).
Bound = Callable[[Sequence[Cell], int], Iterator[tuple[int, Divergence]]]


def bounded(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that bounds are computed for."""
    return [cell for cell in cells if cell.is_pure_smc]


def bound_log(folder: Path, cell: Cell, problems: int, code: dict[str, Any]) -> Log:
    """Where the bounds of a cell are kept, and what they depend on."""
    identity = {
        **code,
        "bounds": digest([HERE / "bounds.py", HERE / "reference.py"]),
        "cell": cell.slug,
        "smc": cell.kind.smc,
        "bound_problems": problems,
        "num_conditional": NUM_CONDITIONAL,
        "seed": SEED,
    }
    return Log(folder / f"{cell.slug}.jsonl", identity)


def bound_cells(todo: dict[Cell, Log], problems: int, bound: Bound) -> None:
    """Compute what is missing, with a progress bar of its own."""
    missing = [cell for cell, log in todo.items() if not log.read()]
    if not missing:
        return
    results = bound(missing, problems)
    for place, found in bar(iterable=results, total=len(missing), desc="bounds", unit="cell"):
        with todo[missing[place]].writing() as append:
            append(vars(found))


def read_bounds(logs: dict[Cell, Log]) -> dict[Cell, Divergence]:
    """What is there."""
    entries = {cell: log.read() for cell, log in logs.items()}
    return {
        cell: Divergence(**{name: value and Interval(*value) for name, value in found[0].items()})
        for cell, found in entries.items()
        if found
    }


def by_plain_models(
    cells: Sequence[Cell], problems: int, pair: Path
) -> Iterator[tuple[int, Divergence]]:
    """Bounds by `bounds.py`, a process for each core: its models are too small to share one."""
    work = [(place, cell, problems, pair) for place, cell in enumerate(cells)]
    return in_processes(_bound_one, work, usable_cores())


def _bound_one(work: tuple[int, Cell, int, Path]) -> tuple[int, Divergence]:
    from fidelity.bounds import kl_bounds
    from fidelity.reference import Models, Setting
    from pair.task import held_out, messages
    from transformers import logging

    logging.disable_progress_bar()
    place, cell, problems, pair = work
    models = Models.load(pair)
    smc = cell.kind.smc or {}
    setting = Setting(smc["num_particles"], smc["num_steps"], smc["resample_at"])
    prompts = [models.prompt_ids(messages(held_out(index))) for index in range(problems)]
    found = kl_bounds(
        models,
        prompts,
        setting,
        cell.temperature,
        num_conditional=NUM_CONDITIONAL,
        seed=SEED,
        max_new_tokens=MAX_TOKENS,
    )
    return place, Divergence(
        tight_upper=found.upper,
        lower=found.lower,
        reverse_upper=found.reverse_upper,
        reverse_lower=found.reverse_lower,
    )
