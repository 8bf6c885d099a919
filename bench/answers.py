"""Provide engines, stored answers and cells for the studies on held-out problems."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from pair.task import Problem, check, held_out, messages
from results import Report
from study import (
    GOES_ON,
    PAIR,
    REPOSITORY,
    BenchError,
    Log,
    bar,
    code_fingerprint,
    digest,
    main_of,
    matching,
    parser,
    prepare_folder,
    slug_of,
)

#: The task's longest reference answers have about 130 tokens.
MAX_TOKENS = 160
#: Problems below this belong to the tables, each with its number as the seed; all others, such as
#: the demos', are larger.
MAX_PROBLEMS = 10_000
#: What is kept of ``meta_info``.
KEPT, KEPT_PREFIX = ("completion_tokens", "spec_verify_ct"), "spec_smc_"
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
    """Submits requests to an offline `sgl.Engine`, which schedules them."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._tokenizer = engine, engine.tokenizer_manager.tokenizer

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Yield answers as they complete; the others continue while the caller handles one."""
        # Cells share their problems: n-gram matches would find earlier answers.
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


# --- Cells and stored answers


@dataclass(frozen=True)
class Cell:
    """One setting of an engine's requests; studies add fields of their own.

    Args:
        label: the display name, without the temperature.
        engine: the name of the engine that answers.
        smc: SMC request fields; None for requests without SMC.
        samples: the number of answers to each problem.
    """

    label: str
    engine: str
    temperature: float
    smc: dict[str, Any] | None = field(default=None, hash=False)
    samples: int = 1

    @property
    def slug(self) -> str:
        """Return the name for files and patterns: ``mixed-c1-t0.7``."""
        return f"{slug_of(self.label)}-t{self.temperature:g}"


@dataclass(frozen=True)
class Record:
    """One graded answer."""

    index: int
    right: bool
    output_ids: list[int]  # including EOS
    info: dict[str, Any]
    sample: int = 0


def grade(reply: Reply) -> Record:
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
    return Record(reply.index, right, reply.output_ids, kept)


C = TypeVar("C", bound=Cell)
A = TypeVar("A")


class Study(ABC, Generic[C, A]):
    """A resumable study of answers to held-out problems, and of evaluations of these, if any.

    Args:
        start: starts the engine with the given name, or a stand-in.

    Attributes:
        name: of the command, the output folder and the files.
        about: one sentence of its help.
        kind: the dataclass of a stored answer, with its ``index`` and ``sample``.
        note: returns the text above the report's tables, by its provenance.
        remark_key: the fields of a stored evaluation that name its answer, see `key_of`.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    problems: ClassVar[int] = 200
    first_problem: ClassVar[int] = 0
    kind: ClassVar[type] = Record
    report: ClassVar[Report]
    note: ClassVar[Callable[[Mapping[str, Any]], str]]
    remark_key: ClassVar[tuple[str, str]] = ("index", "sample")

    def __init__(self, options: argparse.Namespace, start: Start | None = None) -> None:
        self.options = options
        self.start = start or self.running
        self.code = self.fingerprint()
        self.cells: list[C] = self.grid()
        self.selected = matching(self.cells, options.only)
        if not self.selected:
            patterns = " ".join(options.only)
            raise BenchError(f"No cell matches --only {patterns}; --list shows all.")
        self.answers = {c: Log(self.path("answers", c), self.identity(c)) for c in self.cells}
        remarks = {cell: self.remarks_on(cell) for cell in self.cells}
        self.remarks = {cell: log for cell, log in remarks.items() if log is not None}

    # Command line

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        """Return the parser; studies add their own options."""
        made = parser(cls.name, cls.about)
        add = made.add_argument
        add("--only", nargs="+", default=["*"], metavar="PATTERN", help="slugs, as a shell matches")
        add("--list", action="store_true", help="print the cells, and stop")
        add("--fresh", action="store_true", help="forget what the folder has of these cells")
        add("--publish", action="store_true", help=f"also copy to bench/results/{cls.name}")
        problems = {"type": at_least_two, "default": cls.problems}
        add("--problems", help="held-out problems for each cell", **problems)
        return made

    @classmethod
    def main(cls, argv: Sequence[str] | None = None, **stand_ins: Any) -> int:
        """Run the study; return exit status 0 if it completes."""
        options = cls.parser().parse_args(argv)
        return main_of(lambda: cls(options, **stand_ins).run(), GOES_ON)

    def run(self) -> None:
        """Do what the options select."""
        options, began = self.options, time.monotonic()
        some = [*map(self.answers.get, self.selected), *map(self.remarks.get, self.selected)]
        for log in (log for log in some if log is not None):
            if options.fresh and not options.list:
                log.path.unlink(missing_ok=True)
            log.read()  # raises if it was measured otherwise, before anything starts
        if options.list:
            print(self.status())
            return
        prepare_folder(options.output_dir)
        self._answer()
        remarked = [cell for cell in self.selected if cell in self.remarks]
        self.evaluate([(cell, self.without_remark(cell), self.remarks[cell]) for cell in remarked])
        text, seconds = self.told(self.rows()), time.monotonic() - began
        print(f"\n{text}\n\n{seconds:.0f} s. All is in {options.output_dir}/.")
        if options.publish:
            self.publish()

    # What a study defines

    @abstractmethod
    def grid(self) -> list[C]:
        """Return all cells, grouped by engine to start each once."""

    @abstractmethod
    def engine(self, name: str) -> dict[str, Any]:
        """Return the keywords of an engine except the models."""

    @abstractmethod
    def models(self, name: str) -> tuple[str, str | None]:
        """Return the folders of an engine's target and draft in the pair."""

    @abstractmethod
    def rows(self) -> list[Any]:
        """Return the rows of all complete cells."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the code and models that answers depend on."""
        models = [path for name in ("target", "draft") for path in (PAIR / name).iterdir()]
        task = REPOSITORY / "bench" / "pair" / "task.py"
        return {**code_fingerprint(), "pair": digest([*models, task])}

    def identity(self, cell: C) -> dict[str, Any]:
        """Return the settings and code that the answers of a cell depend on."""
        return {
            **self.code,
            "cell": cell.slug,
            "smc": cell.smc,
            "engine": self.engine(cell.engine),
            "temperature": cell.temperature,
            "max_new_tokens": MAX_TOKENS,
        }

    def remarks_on(self, cell: C) -> Log | None:
        """Return the file of evaluations of a cell's answers; None for a cell without."""
        return None

    def key_of(self, one: A) -> tuple:
        """Return the values of `remark_key` for an answer."""
        return one.index, one.sample

    def evaluate(self, todo: Sequence[tuple[C, list[A], Log]]) -> None:
        """Evaluate the answers that lack it."""

    def request_of(self, cell: C, index: int) -> Request:
        """Return the request of problem ``index``, with its number as the seed."""
        return request(index, index, cell.temperature, cell.smc)

    def ask(self, cell: C, asker: Asker) -> Iterator[Any]:
        """Run the missing problems of one cell."""
        for reply in asker.ask([self.request_of(cell, index) for _, index in self.missing(cell)]):
            record = grade(reply)
            yield replace(record, index=record.index - self.first_problem)

    # What all have in common

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[Asker]:
        """Start the engine with this name for the ``with`` block."""
        # Dozens of warnings about missing hardware would break the progress bars; child processes
        # inherit the second setting.
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        import sglang  # the import takes seconds, which --list and --help skip

        target, draft = self.models(name)
        models = {"model_path": str(PAIR / target)}
        if draft is not None:
            models["speculative_draft_model_path"] = str(PAIR / draft)
        engine = sglang.Engine(**self.engine(name), **models)
        try:
            yield EngineAsker(engine)
        finally:
            engine.shutdown()

    def path(self, folder: str, cell: C) -> Path:
        """Return the path of a cell's file in ``folder``."""
        return self.options.output_dir / folder / f"{cell.slug}.jsonl"

    def read(self, cell: C) -> list[A]:
        """Return the stored answers to the requested problems, by problem and sample."""
        found: list[Any] = [self.kind(**entry) for entry in self.answers[cell].read()]
        found.sort(key=lambda one: (one.index, one.sample))
        return [one for one in found if one.index < self.options.problems]

    def missing(self, cell: C) -> list[tuple[int, int]]:
        """Return the (sample, problem) pairs without an answer, sample by sample."""
        there: set[Any] = {(one.sample, one.index) for one in self.read(cell)}
        every = ((s, i) for s in range(cell.samples) for i in range(self.options.problems))
        return [pair for pair in every if pair not in there]

    def remarks_of(self, cell: C) -> dict[tuple, dict[str, Any]]:
        """Return the evaluations of a cell's answers by `key_of`."""
        entries = self.remarks[cell].read()
        return {tuple(entry[name] for name in self.remark_key): entry for entry in entries}

    def without_remark(self, cell: C) -> list[A]:
        """Return the answers without an evaluation."""
        there = self.remarks_of(cell)
        return [one for one in self.read(cell) if self.key_of(one) not in there]

    def told(self, rows: list[Any]) -> str:
        """Write the report; return the text to print."""
        return self.report.write(self.options.output_dir, rows, self.settings(), self.note)

    def _answer(self) -> None:
        """Complete the selected cells, starting each needed engine once."""
        missing = {cell: len(self.missing(cell)) for cell in self.selected}
        todo = [cell for cell in self.selected if missing[cell]]
        with bar(total=sum(missing.values()), unit="answer", disable=not todo) as progress:
            for engine, group in groupby(todo, key=lambda cell: cell.engine):
                progress.set_description_str(f"starting the engine: {engine}")
                with self.start(engine) as asker:
                    for cell in group:
                        progress.set_description_str(cell.slug)
                        with self.answers[cell].writing() as write:
                            for one in self.ask(cell, asker):
                                write(asdict(one))
                                progress.update()

    def complete(self) -> list[C]:
        """Return every cell that is complete, by this run or an earlier one with equal settings."""
        logs = {cell: (self.answers[cell], self.remarks.get(cell)) for cell in self.cells}
        return [
            cell
            for cell, both in logs.items()
            if all(log is None or log.fits for log in both)
            and not self.missing(cell)
            and not (cell in self.remarks and self.without_remark(cell))
        ]

    def publish(self) -> None:
        """Copy the results to bench/results; raise BenchError unless they are complete."""
        self.require_all()
        self.report.publish(self.options.output_dir)

    def require_all(self) -> None:
        """Raise BenchError if a part of the grid is missing: partial results are not published."""
        there = set(self.complete())
        missing = [cell.slug for cell in self.cells if cell not in there]
        if missing:
            raise BenchError(
                f"Not published: {len(missing)} of {len(self.cells)} cells are not complete, as "
                f"{missing[0]}. Complete them with the same command without --only."
            )

    def status(self) -> str:
        """Return a line for each selected cell."""
        lines = []
        for cell in self.selected:
            there = len(self.read(cell))
            told = f"{there:5} of {self.options.problems * cell.samples} answered"
            if cell in self.remarks:
                told += f", {there - len(self.without_remark(cell))} scored"
            lines.append(f"{cell.slug:26} {told}")
        return "\n".join(lines)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on."""
        return {
            "problems": self.options.problems,
            "first_problem": self.first_problem,
            "max_new_tokens": MAX_TOKENS,
            "engines": {cell.engine: self.engine(cell.engine) for cell in self.cells},
            "code": self.code,
        }
