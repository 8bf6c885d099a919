"""Provide engines, stored answers and cells for the studies on held-out problems."""

from __future__ import annotations

import argparse
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import study
from pair.task import Problem, check, held_out, messages
from results import Report
from speed.grid import DRAFT, TARGET
from speed.remote import RemoteEngine, Work, running

from sglang_smc_tools.demo.serving import Launch

#: The task's longest reference answers have about 130 tokens.
MAX_TOKENS = 160
#: Problems below this belong to the tables, each with its number as the seed; all others, such as
#: the demos', are larger.
MAX_PROBLEMS = 10_000
#: What is kept of ``meta_info``.
KEPT = ("completion_tokens", "spec_verify_ct")
KEPT_PREFIX = "spec_smc_"
CONCURRENCY = 64
LOG = "engine.log"
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


# --- Engines


class Reply(NamedTuple):
    """One answer of an engine."""

    index: int  # of the problem in its study
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """Return the pair's tokenizer."""
    from transformers import AutoTokenizer  # slow to import

    return AutoTokenizer.from_pretrained(study.PAIR / TARGET)


def prompt_ids(item: Problem) -> list[int]:
    """Return the token ids of a problem's prompt."""
    return tokenizer().apply_chat_template(messages(item), add_generation_prompt=True)["input_ids"]


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
        """Return the name for files and patterns: ``auto-c1-t0.7``."""
        return f"{study.slug_of(self.label)}-t{self.temperature:g}"


@dataclass(frozen=True)
class Record:
    """One graded answer."""

    index: int
    right: bool
    output_ids: list[int]  # including EOS
    info: dict[str, Any]
    sample: int = field(default=0, kw_only=True)


def grade(reply: Reply) -> Record:
    """Return the record of a reply; raise BenchError if some of its tokens are missing."""
    info = reply.meta_info
    index = reply.index
    if len(reply.output_ids) != info["completion_tokens"]:
        raise study.BenchError(
            f"Problem {index} was answered with {info['completion_tokens']} tokens, of which "
            f"{len(reply.output_ids)} came: they cannot be scored."
        )
    # An answer cut off by the length limit may end in a right number by chance.
    right = info["finish_reason"]["type"] == "stop" and check(reply.text, held_out(index))
    return Record(index, right, reply.output_ids, kept_of(info))


def kept_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stored of ``meta_info``, with the target's passes."""
    kept = {key: info[key] for key in info if key in KEPT or key.startswith(KEPT_PREFIX)}
    if "spec_smc_rounds_ct" in kept:  # each is one target pass
        kept.setdefault("spec_verify_ct", kept["spec_smc_rounds_ct"])
    return kept


def about(origin: Mapping[str, Any]) -> str:
    """Return the start of a study's note: problems, machine and date."""
    last = origin["settings"]["problems"] - 1
    return (
        f"held-out problems 0 to {last}, each with its number as the seed; on "
        f"{origin['hardware']}, {origin['date'][:10]}. In brackets 95 % intervals, over answers. "
    )


C = TypeVar("C", bound=Cell)
A = TypeVar("A")


class Study(ABC, Generic[C, A]):
    """A resumable study of answers to held-out problems.

    Attributes:
        name: of the command, the output folder and the files.
        about: one sentence of its help.
        kind: the dataclass of a stored answer, with its ``index`` and ``sample``.
        note: returns the text above the report's tables, by its provenance.
        max_tokens: of an answer.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    problems: ClassVar[int] = 200
    max_tokens: ClassVar[int] = MAX_TOKENS
    kind: ClassVar[type]
    report: ClassVar[Report]
    note: ClassVar[Callable[[Mapping[str, Any]], str]]

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.code = self.fingerprint()
        self.cells: list[C] = self.grid()
        self.selected = study.selected(self.cells, options.only)
        self.answers = {c: study.Log(self.path(c), self.identity(c)) for c in self.cells}

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        """Return the parser; studies add their own options."""
        made = study.parser(cls.name, cls.about)
        study.add_selection(made)
        # One problem has no interval.
        problems = {"type": study.number(int, 2, MAX_PROBLEMS), "default": cls.problems}
        made.add_argument("--problems", help="held-out problems for each cell", **problems)
        return made

    @classmethod
    def main(cls, argv: Sequence[str] | None = None) -> int:
        """Run the study; return exit status 0 if it completes."""
        options = cls.parser().parse_args(argv)
        return study.main_of(lambda: cls(options).run(), study.GOES_ON)

    def run(self) -> None:
        """Do what the options select."""
        options = self.options
        began = time.monotonic()
        for log in map(self.answers.__getitem__, self.selected):
            if options.fresh and not options.list:
                log.drop()
            log.read()  # raises if it was measured otherwise, before anything starts
        if options.list:
            for cell in self.selected:
                every = len(self.pairs(cell))
                print(f"{cell.slug:26} {len(self.read(cell)):5} of {every} answered")
            return
        study.prepare_folder(options.output_dir)
        self._answer()
        text = self.report.write(options.output_dir, self.rows(), self.settings(), self.note)
        seconds = time.monotonic() - began
        print(f"\n{text}\n\n{seconds:.0f} s. All is in {options.output_dir}/.")
        if options.publish:
            self.publish()

    # A study defines these

    @abstractmethod
    def grid(self) -> list[C]:
        """Return all cells, grouped by engine to start each once."""

    @abstractmethod
    def engine(self, name: str) -> dict[str, Any]:
        """Return the keywords of an engine except the models."""

    @abstractmethod
    def models(self, name: str) -> tuple[str, str | None]:
        """Return the folders of an engine's target and draft, in the pair unless absolute."""

    @abstractmethod
    def rows(self) -> list[Any]:
        """Return the rows of all complete cells."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the code and models that answers depend on."""
        models = [path for name in (TARGET, DRAFT) for path in (study.PAIR / name).iterdir()]
        return {**study.code_fingerprint(), "pair": study.digest([*models, study.PAIR / "task.py"])}

    def identity(self, cell: C) -> dict[str, Any]:
        """Return the settings and code that the answers of a cell depend on."""
        return {
            **self.code,
            "cell": cell.slug,
            "smc": cell.smc,
            "engine": self.engine(cell.engine),
            "temperature": cell.temperature,
            "max_new_tokens": self.max_tokens,
        }

    @abstractmethod
    def stored(self, cell: C, reply: Reply, sample: int) -> A:
        """Return what is stored of a reply."""

    # All have these in common

    def prompt(self, cell: C, index: int) -> list[int]:
        """Return the token ids of a problem's prompt for the target of a cell."""
        return prompt_ids(held_out(index))

    def params_of(self, cell: C, sample: int, index: int) -> dict[str, Any]:
        """Return the parameters of a sample of problem ``index``, whose seed is its number."""
        params: dict[str, Any] = {
            "temperature": cell.temperature,
            "max_new_tokens": self.max_tokens,
            "sampling_seed": index + MAX_PROBLEMS * sample,
        }
        return params if cell.smc is None else {**params, "custom_params": {"smc": cell.smc}}

    def launch(self, name: str) -> Launch:
        """Return the launch of the engine with this name; its potentials are found in bench/."""
        target, draft = self.models(name)
        models = {"model_path": str(study.PAIR / target)}
        if draft is not None:
            models["speculative_draft_model_path"] = str(study.PAIR / draft)
        path = os.pathsep.join([str(study.PAIR.parent), os.environ.get("PYTHONPATH", "")])
        return Launch({**self.engine(name), **models}, {"PYTHONPATH": path.rstrip(os.pathsep)})

    def path(self, cell: C) -> Path:
        """Return the path of a cell's file."""
        return self.options.output_dir / "answers" / f"{cell.slug}.jsonl"

    def flushes(self, cell: C) -> bool:
        """Return whether an engine's caches are flushed before it answers for a cell."""
        return True

    def plugin(self, cell: C) -> str:
        """Return the code of a cell; of one that is not selected, what its file names."""
        is_selected = study.matching([cell], self.options.only)
        there = {} if is_selected else study.Log(self.path(cell), {}).header()
        return there.get("plugin", self.code["plugin"])

    def read(self, cell: C) -> list[A]:
        """Return the stored answers to the requested problems, by problem and sample."""
        found: list[Any] = [self.kind(**entry) for entry in self.answers[cell].read()]
        found.sort(key=lambda one: (one.index, one.sample))
        return [one for one in found if one.index < self.options.problems]

    def pairs(self, cell: C) -> list[tuple[int, int]]:
        """Return the (sample, problem) pairs that a cell answers, sample by sample."""
        return [(s, i) for s in range(cell.samples) for i in range(self.options.problems)]

    def missing(self, cell: C) -> list[tuple[int, int]]:
        """Return the (sample, problem) pairs without an answer, sample by sample."""
        there: set[Any] = {(one.sample, one.index) for one in self.read(cell)}
        return [pair for pair in self.pairs(cell) if pair not in there]

    def _answer(self) -> None:
        """Complete the selected cells, starting each needed engine once."""
        todo = {cell: n for cell in self.selected if (n := len(self.missing(cell)))}
        with study.bar(total=sum(todo.values()), unit="answer", disable=not todo) as progress:
            for engine, group in groupby(todo, key=lambda cell: cell.engine):
                progress.set_description_str(f"starting the engine: {engine}")
                with running(self.launch(engine), self.options.output_dir / LOG) as remote:
                    for cell in group:
                        progress.set_description_str(cell.slug)
                        with self.answers[cell].writing() as write:
                            for one in self._ask(cell, remote):
                                write(asdict(one))
                                progress.update()

    def _ask(self, cell: C, engine: RemoteEngine) -> Iterator[Any]:
        """Yield the missing answers of one cell, one sample of each problem at a time."""
        for sample, group in groupby(self.missing(cell), key=lambda pair: pair[0]):
            numbers = [index for _, index in group]
            prompts = [self.prompt(cell, index) for index in numbers]
            params = [self.params_of(cell, sample, index) for index in numbers]
            for found in engine.each(Work(prompts, params, self.flushes(cell))):
                answer = (found[key] for key in Reply._fields[1:])
                yield self.stored(cell, Reply(numbers[found["place"]], *answer), sample)

    def complete(self) -> dict[C, list[A]]:
        """Return the answers of cells completed by this run or an earlier one like it."""
        fitting = [cell for cell in self.cells if self.answers[cell].fits]
        return {cell: self.read(cell) for cell in fitting if not self.missing(cell)}

    def publish(self) -> None:
        """Copy the results to bench/results; raise BenchError unless they are complete."""
        there = self.complete()
        missing = [cell.slug for cell in self.cells if cell not in there]
        if missing:
            raise study.BenchError(
                f"Not published: {len(missing)} of {len(self.cells)} cells are not complete, as "
                f"{missing[0]}. Complete them with the same command without --only."
            )
        self.report.publish(self.options.output_dir, study.PUBLISHED / self.name)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on."""
        return {
            "problems": self.options.problems,
            "max_new_tokens": self.max_tokens,
            "engines": {cell.engine: self.engine(cell.engine) for cell in self.cells},
            "code": self.code,
        }
