"""Provide engines, stored answers and cells for the studies on held-out problems."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pair.task import Problem, held_out, messages
from study import PAIR, REPOSITORY, BenchError, Log, bar, code_fingerprint, digest, selected

#: The task's longest reference answers have about 130 tokens.
MAX_TOKENS = 160
#: Problems below this belong to the tables, each with its number as the seed; all others, such as
#: the demos', are larger.
MAX_PROBLEMS = 10_000
GOES_ON = "All answers so far are kept: the same command goes on from here."
CONCURRENCY = 64
#: Settings of all engines; they make answers comparable.
COMMON: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "random_seed": 0,
    "max_running_requests": CONCURRENCY,
    "context_length": 1024,
    # Enough for 64 requests of eight particles without a shared prefix.
    "max_total_tokens": 196_608,
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "watchdog_timeout": 600,
    "log_level": "error",
}


def at_least_two(text: str) -> int:
    """Parse a number of problems from 2, as one has no interval, to `MAX_PROBLEMS`."""
    value = int(text)
    if not 2 <= value <= MAX_PROBLEMS:
        raise argparse.ArgumentTypeError(f"{value} is not from 2 to {MAX_PROBLEMS}")
    return value


def fingerprint(pair: Path = PAIR) -> dict[str, Any]:
    """Return the fingerprint of the code and models that answers depend on."""
    models = [path for name in ("target", "draft") for path in (pair / name).iterdir()]
    task = REPOSITORY / "bench" / "pair" / "task.py"
    return {**code_fingerprint(), "pair": digest([*models, task])}


# --- Engines


class Request(NamedTuple):
    """One problem, and the sampling parameters of its answer."""

    index: int
    item: Problem
    sampling_params: dict[str, Any]


class Reply(NamedTuple):
    """One answer of an engine."""

    index: int
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


def request(index: int, seed: int, temperature: float, smc: dict[str, Any] | None) -> Request:
    """Return the request of problem ``index``, with SMC request fields, if any."""
    params: dict[str, Any] = {
        "temperature": temperature,
        "max_new_tokens": MAX_TOKENS,
        "sampling_seed": seed,
    }
    if smc is not None:
        params["custom_params"] = {"smc": smc}
    return Request(index, held_out(index), params)


def prompt_ids(tokenizer: Any, index: int) -> list[int]:
    """Return the prompt's token ids for problem ``index``."""
    chat = messages(held_out(index))
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


class Asker(Protocol):
    """An engine that answers requests, or a stand-in."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Submit all requests at once; yield each answer as soon as it is complete."""
        ...


#: Starts the engine with the given name.
Start = Callable[[str], AbstractContextManager[Asker]]


class EngineAsker:
    """Submits requests to an offline `sgl.Engine`, which schedules them.

    Args:
        forgets: whether to flush the cache first: cells share their problems, so that n-gram
            matches would find earlier answers.
    """

    def __init__(self, engine: Any, *, forgets: bool = False) -> None:
        self._engine, self._forgets = engine, forgets
        self._tokenizer = engine.tokenizer_manager.tokenizer

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Yield answers as they complete; the others continue while the caller handles one."""
        if self._forgets:
            self._engine.flush_cache()
        loop = self._engine.loop
        pending = {loop.create_task(self._reply(request)) for request in requests}
        try:
            while pending:
                first = asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done, pending = loop.run_until_complete(first)
                for task in done:
                    yield task.result()
        finally:
            for task in pending:
                task.cancel()

    async def _reply(self, request: Request) -> Reply:
        ids, asked = prompt_ids(self._tokenizer, request.index), request.sampling_params
        try:
            answer = await self._engine.async_generate(input_ids=ids, sampling_params=asked)
        except ValueError as error:  # raised for an invalid request
            raise BenchError(f"The engine refused {asked}: {error}") from error
        return Reply(request.index, answer["text"], answer["output_ids"], answer["meta_info"])


@contextlib.contextmanager
def started(
    settings: dict[str, Any], target: str, draft: str | None = None, *, forgets: bool = False
) -> Iterator[EngineAsker]:
    """Start an engine with these settings and models of the pair for the ``with`` block."""
    # Dozens of warnings about missing hardware would break the progress bars; child processes
    # inherit the second setting.
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    import sglang  # the import takes seconds, which --list and --help skip

    models = {"model_path": str(PAIR / target)}
    if draft is not None:
        models["speculative_draft_model_path"] = str(PAIR / draft)
    engine = sglang.Engine(**settings, **models)
    try:
        yield EngineAsker(engine, forgets=forgets)
    finally:
        engine.shutdown()


# --- Answers on disk


class AskedCell(Protocol):
    """A cell with ``samples`` answers to each problem by one engine."""

    @property
    def slug(self) -> str: ...

    @property
    def engine(self) -> str: ...

    @property
    def samples(self) -> int: ...


class Answer(Protocol):
    """A stored answer: a dataclass with the number of its problem."""

    @property
    def index(self) -> int: ...


C = TypeVar("C", bound=AskedCell)
A = TypeVar("A", bound=Answer)


@dataclass(frozen=True)
class Answers(Generic[A]):
    """The answers of a cell, ``samples`` for each problem."""

    log: Log
    kind: type[A]
    problems: int
    samples: int = 1

    def read(self) -> list[A]:
        """Return the stored answers to the requested problems, by problem and sample."""
        found = [self.kind(**entry) for entry in self.log.read()]
        found.sort(key=lambda one: (one.index, _sample(one)))
        return [one for one in found if one.index < self.problems]

    def missing(self) -> list[tuple[int, int]]:
        """Return the (sample, problem) pairs without an answer, sample by sample."""
        there = {(_sample(one), one.index) for one in self.read()}
        wanted = ((s, index) for s in range(self.samples) for index in range(self.problems))
        return [pair for pair in wanted if pair not in there]


def _sample(one: Any) -> int:
    return getattr(one, "sample", 0)


#: Yields an engine's answers to the missing problems of a cell.
Ask = Callable[[C, Answers[A], Asker], Iterable[A]]


def measure(todo: Sequence[tuple[C, Answers[A]]], start: Start, ask: Ask[C, A]) -> None:
    """Complete all cells, starting each needed engine once; each answer is stored at once."""
    missing = {cell: len(answers.missing()) for cell, answers in todo}
    open_cells = [(cell, answers) for cell, answers in todo if missing[cell]]
    with bar(total=sum(missing.values()), unit="answer", disable=not open_cells) as progress:
        for engine, group in groupby(open_cells, key=lambda pair: pair[0].engine):
            progress.set_description_str(f"starting the engine: {engine}")
            with start(engine) as asker:
                for cell, answers in group:
                    progress.set_description_str(cell.slug)
                    with answers.log.writing() as write:
                        for one in ask(cell, answers, asker):
                            write(asdict(one))  # type: ignore[call-overload]
                            progress.update()


# --- Cells and their files


class Remarks(Protocol[A]):
    """Evaluations of a cell's answers, in a file of their own."""

    @property
    def log(self) -> Log: ...

    def missing(self, answers: list[A]) -> list[A]:
        """Return the answers without an evaluation."""
        ...


S = TypeVar("S", bound=Remarks)


class AnswersPlan(Generic[C, A, S]):
    """The cells of a run, with their answers and evaluations.

    Args:
        options: of the command line.
        every: all cells, selected or not.
        kind: the dataclass of a stored answer.
    """

    def __init__(self, options: argparse.Namespace, every: Sequence[C], kind: type[A]) -> None:
        self.options = options
        self.selected = selected(every, options.only, look="--list")
        self.answers: dict[C, Answers[A]] = {}
        self.remarks: dict[C, S] = {}
        for cell in every:
            log = Log(self.path("answers", cell), self.identity(cell))
            self.answers[cell] = Answers(log, kind, options.problems, cell.samples)
            remarks = self.remarks_on(cell)
            if remarks is not None:
                self.remarks[cell] = remarks

    def identity(self, cell: C) -> dict[str, Any]:
        """Return the settings and code that the answers of a cell depend on."""
        raise NotImplementedError

    def remarks_on(self, cell: C) -> S | None:
        """Return the evaluations of a cell's answers; None for a cell without."""
        raise NotImplementedError

    def path(self, folder: str, cell: C) -> Path:
        """Return the path of a cell's file in ``folder``."""
        return self.options.output_dir / folder / f"{cell.slug}.jsonl"

    def own_logs(self) -> list[Log]:
        """Return the files of the selected cells."""
        found = [self.answers[cell].log for cell in self.selected]
        return found + [self.remarks[cell].log for cell in self.selected if cell in self.remarks]

    def logs(self) -> list[Log]:
        """Return the files that are read before the report: those of the selected cells."""
        return self.own_logs()

    def todo(self) -> list[tuple[C, Answers[A]]]:
        """Return the selected cells with their answers."""
        return [(cell, self.answers[cell]) for cell in self.selected]

    def unremarked(self) -> list[tuple[C, list[A], S]]:
        """Return the selected cells with evaluations, and their answers that lack one."""
        found = [(cell, self.remarks[cell]) for cell in self.selected if cell in self.remarks]
        return [(cell, said.missing(self.answers[cell].read()), said) for cell, said in found]

    def complete(self) -> list[C]:
        """Return every cell that is complete, by this run or an earlier one with equal settings."""
        return [cell for cell in self.answers if self._is_complete(cell)]

    def _is_complete(self, cell: C) -> bool:
        answers, remarks = self.answers[cell], self.remarks.get(cell)
        if not answers.log.fits or answers.missing():
            return False
        return remarks is None or (remarks.log.fits and not remarks.missing(answers.read()))

    def require_all(self) -> None:
        """Raise BenchError if a part of the grid is missing: partial results are not published."""
        there = self.complete()
        missing = [cell.slug for cell in self.answers if cell not in there]
        if missing:
            raise BenchError(
                f"Not published: {len(missing)} of {len(self.answers)} cells are not complete, as "
                f"{missing[0]}. Complete them with the same command without --only."
            )

    def status(self) -> str:
        """Return a line for each selected cell."""
        lines = []
        for cell, answers in self.todo():
            there, remarks = answers.read(), self.remarks.get(cell)
            said = f", {len(there) - len(remarks.missing(there))} scored" if remarks else ""
            wanted = answers.problems * answers.samples
            lines.append(f"{cell.slug:26} {len(there):5} of {wanted} answered{said}")
        return "\n".join(lines)

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the settings that the numbers depend on, including a study's own."""
        own = {"problems": self.options.problems, "first_problem": 0, "max_new_tokens": MAX_TOKENS}
        return own | more
