"""Ask the cells' problems, skipping what is on disk, and show how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from fidelity.grid import Cell
from fidelity.store import Answers, Record
from pair.task import Problem, check, held_out, messages
from study import BenchError, bar
from tqdm import tqdm

#: The longest worked answers of the task take about 130 tokens.
MAX_TOKENS = 160
#: Problems below this are the tables', each with its number as the seed; all others, the demos'
#: among them, lie beyond.
MAX_PROBLEMS = 10_000
#: A problem to warm up with lies beyond all that are measured.
WARM_UP = 1_000_000
#: An engine takes about so long to start.
START_SECONDS = 30.0
#: So much of a run must be over until its own speed counts half in the forecast.
PRIOR_SECONDS = 10.0
KEPT = ("completion_tokens", "spec_verify_ct")
KEPT_PREFIX = "spec_smc_"


class Request(NamedTuple):
    """One problem, and how to sample its answer."""

    index: int
    item: Problem
    sampling_params: dict[str, Any]


class Reply(NamedTuple):
    """One answer as an engine gives it."""

    index: int
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class Asker(Protocol):
    """Whatever answers requests: an engine, or a stand-in."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Take on all requests at once; yield each answer as soon as it is complete."""
        ...


#: Starts what answers for "target", "draft" or "smc".
Start = Callable[[str], AbstractContextManager[Asker]]


def request(cell: Cell, index: int) -> Request:
    """Problem ``index``, under the settings of ``cell``."""
    params: dict[str, Any] = {
        "temperature": cell.temperature,
        "max_new_tokens": MAX_TOKENS,
        "sampling_seed": index,
    }
    if cell.kind.smc is not None:
        params["custom_params"] = {"smc": cell.kind.smc}
    return Request(index, held_out(index), params)


def prompt_ids(tokenizer: Any, index: int) -> list[int]:
    """The tokens that an answer to problem ``index`` follows: what engines are asked."""
    chat = messages(held_out(index))
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def grade(reply: Reply, *, part: int, at: float) -> Record:
    """What is kept of a reply; raises BenchError where its tokens are not all there."""
    info = reply.meta_info
    if len(reply.output_ids) != info["completion_tokens"]:
        raise BenchError(
            f"Problem {reply.index} was answered with {info['completion_tokens']} tokens, of which "
            f"{len(reply.output_ids)} came: they cannot be scored."
        )
    # An answer cut off by the length limit may end in a right number by chance.
    ended = info["finish_reason"]["type"] == "stop"
    kept = {key: info[key] for key in info if key in KEPT or key.startswith(KEPT_PREFIX)}
    if "spec_smc_rounds_ct" in kept:  # each is one pass of the target
        kept.setdefault("spec_verify_ct", kept["spec_smc_rounds_ct"])
    right = ended and check(reply.text, held_out(reply.index))
    return Record(reply.index, right, part, round(at, 3), reply.output_ids, kept)


def measure(todo: Sequence[tuple[Cell, Answers]], start: Start) -> None:
    """Complete all cells, starting each engine that is needed once."""
    missing = {cell: answers.missing() for cell, answers in todo}
    with Progress(missing) as progress:
        open_cells = [(cell, answers) for cell, answers in todo if missing[cell]]
        for engine, group in groupby(open_cells, key=lambda pair: pair[0].kind.engine):
            progress.starting(engine)
            with start(engine) as asker:
                for cell, answers in group:
                    _complete(cell, answers, asker, progress)


def _complete(cell: Cell, answers: Answers, asker: Asker, progress: Progress) -> None:
    """Ask what is missing of one cell."""
    missing = answers.missing()
    part = max((record.part for record in answers.records()), default=-1) + 1
    progress.begin(cell, len(missing), answers.problems)
    list(asker.ask([request(cell, WARM_UP)]))
    requests = [request(cell, index) for index in missing]
    with answers.writing() as write:
        began, last = time.perf_counter(), 0.0
        for reply in asker.ask(requests):
            record = grade(reply, part=part, at=time.perf_counter() - began)
            write(record)
            progress.answered(record, record.at - last)
            last = record.at


class Progress:
    """Two lines: all cells with the time to go, and the answers of the current cell."""

    def __init__(self, missing: dict[Cell, list[int]]) -> None:
        self._cells = [cell for cell, indices in missing.items() if indices]
        self._forecast = Forecast({cell: len(missing[cell]) for cell in self._cells})
        self._all = bar(
            total=self._forecast.total,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}",
            disable=not self._cells,
        )
        self._one: tqdm | None = None
        self._cell, self._right, self._count = None, 0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_cell()
        self._all.close()

    def starting(self, engine: str) -> None:
        """An engine is about to start, which takes a while and yields nothing."""
        self._end_cell()
        self._all.set_description_str(f"starting the engine: {engine}")

    def begin(self, cell: Cell, missing: int, problems: int) -> None:
        """The next cell."""
        self._end_cell()
        self._cell, self._right, self._count = cell, 0, 0
        self._all.set_description_str(f"cell {self._cells.index(cell) + 1}/{len(self._cells)}")
        self._one = bar(
            total=problems,
            initial=problems - missing,
            desc=cell.name,
            unit="answer",
            leave=False,
        )

    def answered(self, record: Record, seconds: float) -> None:
        """One more answer, ``seconds`` after the last."""
        assert self._cell is not None and self._one is not None
        left = self._forecast.answered(self._cell, seconds)
        self._all.set_postfix_str(f"about {tqdm.format_interval(left)} to go", refresh=False)
        self._all.update(min(self._cell.kind.cost, self._forecast.total - self._all.n))
        self._count += 1
        self._right += record.right
        self._one.set_postfix_str(f"{self._right / self._count:.0%} right", refresh=False)
        self._one.update()

    def _end_cell(self) -> None:
        if self._one is not None:
            self._one.close()
            self._one = None


class Forecast:
    """The time to go: what the cells cost on our machine, times how slow this one has been."""

    def __init__(self, missing: dict[Cell, int]) -> None:
        self.total = sum(cell.kind.cost * count for cell, count in missing.items())
        self._engines_left = [cell.kind.engine for cell in missing]
        self._done = self._spent = PRIOR_SECONDS
        self._left = self.total

    def answered(self, cell: Cell, seconds: float) -> float:
        """Seconds to go, after one more answer that took ``seconds``."""
        self._done += cell.kind.cost
        self._left -= cell.kind.cost
        self._spent += seconds
        at = self._engines_left.index(cell.kind.engine)
        starts = len(set(self._engines_left[at:]) - {cell.kind.engine})
        left = max(0.0, self._left)  # sums of costs may end just below
        return left * self._spent / self._done + starts * START_SECONDS
