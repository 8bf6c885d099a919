"""Stand-ins for what the benchmarks ask: engines with times that tests can work out, and scores."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import results
from answers import Reply, Request, Study
from fidelity.scoring import Batch, Score, answer_key
from speed.grid import AR, AR_STOCK, CHAIN, TREE, System
from speed.remote import EngineError, Sample, Work

#: Seconds a token of each family takes in a batch of one; SMC takes the default.
SECONDS = {AR: 0.10, AR_STOCK: 0.09, CHAIN: 0.05, TREE: 0.04}
SMC_SECONDS = 0.02
FIRST = 0.5
TOKENS_PER_ROUND = 5
ORIGIN = {"date": "2026-01-01", "git_sha": "abc", "hardware": "a CPU", "versions": {}}


def leave_out_what_takes_seconds(patch: pytest.MonkeyPatch, study: Any, folder: Path) -> None:
    """Have a study publish below ``folder``, without a picture or a look at git."""
    if study.report.plot:
        drawn = replace(study.report, plot=lambda _, path: path.write_text("a picture"))
        patch.setattr(study, "report", drawn)
    patch.setattr(results, "PUBLISHED", folder / "published")
    patch.setattr(results, "provenance", lambda settings: {**ORIGIN, "settings": settings})


class Caller:
    """Calls a benchmark, and remembers what it asked and started, and said.

    Args:
        main: takes the words of a command line.
        folder: where its files go.
        common: words of every command line.
    """

    def __init__(self, main: Callable[..., int], folder: Path, common: Sequence[str] = ()) -> None:
        self.main, self.folder, self.common = main, folder, common
        self.asked: list[tuple[str, Any]] = []
        self.started: list[str] = []
        self.budget, self.said = [0], ""

    def __call__(self, *arguments: str, last: int = 10**6) -> int:
        """Return the exit status; engines are interrupted after ``last`` answers."""
        self.asked, self.started, self.budget = [], [], [last]
        words = [*self.common, "--output-dir", str(self.folder), *arguments]
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = self.main(words)
        self.said = errors.getvalue()
        return status


class Runner(Caller):
    """Runs a study with stand-ins, of which ``reply`` is an engine's by its name."""

    def __init__(
        self,
        study: type[Study],
        folder: Path,
        reply: Callable[[str, Request], Reply],
        common: Sequence[str],
        **stand_ins: Any,
    ) -> None:
        super().__init__(partial(study.main, start=self.start, **stand_ins), folder, common)
        self.study, self.reply = study, reply

    @contextlib.contextmanager
    def start(self, engine: Any) -> Iterator[Any]:
        self.started.append(engine)
        yield self

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Answer in another order than asked."""
        for entry in reversed(requests):
            if self.budget[0] == 0:
                raise KeyboardInterrupt
            self.budget[0] -= 1
            self.asked.append((self.started[-1], entry))
            yield self.reply(self.started[-1], entry)

    def rows(self) -> dict[str, Any]:
        """Return the rows of the report by label."""
        return {row.label: row for row in self.study.report.read(self.folder)}

    def published(self) -> set[str]:
        """Return the names of published files."""
        folder = results.PUBLISHED / self.study.report.name
        return {path.name for path in folder.iterdir()} if folder.exists() else set()


def graded_reply(engine: str, entry: Request) -> Reply:
    """Answer rightly at even problems, with what an SMC server tells of a group of eight."""
    number = entry.item.number + entry.index % 2
    info: dict[str, Any] = {"completion_tokens": 3, "finish_reason": {"type": "stop"}, "id": "x"}
    if engine == "smc":
        info |= {
            "spec_smc_num_particles": 8,
            "spec_smc_rounds_ct": 10,
            "spec_smc_resample_ct": 5,
            "spec_smc_ess_mean": 4.0,
            "spec_smc_log_evidence": -1.5,
        }
    return Reply(entry.index, f"#### {number}", [5, entry.index, 1], info)


def canned_scores(batches: Sequence[Batch], jobs: int) -> Iterator[list[Score]]:
    """Scores of batches in any order, by the number of the problem alone."""
    for batch in reversed(batches):
        found = []
        for index, tokens in zip(batch.indices, batch.answers, strict=True):
            sums = (-20.0 - index, 0.1 * (-1) ** index, 0.2 * (-1) ** index, 1.0)
            found.append(Score(index, answer_key(tokens), len(tokens), *sums, log_ratios=[0.1] * 3))
        yield found


def sample(system: System, work: Work, slower: float = 1.0) -> Sample:
    """Every request has its first token after `FIRST` seconds, and ends with the others."""
    tokens = work.params[0]["max_new_tokens"]
    end = FIRST + (tokens - 1) * SECONDS.get(system.family, SMC_SECONDS) * slower
    info: dict[str, object] = {"completion_tokens": tokens}
    if system.family not in (AR, AR_STOCK):
        info["spec_verify_ct"] = -(-(tokens - 1) // TOKENS_PER_ROUND)
    batch = len(work.prompts)
    return Sample([FIRST] * batch, [end] * batch, [info] * batch)


class FakeEngine:
    """Answers for one system, each time 10 % slower; dies of batches of ``breaks_at``."""

    def __init__(
        self,
        system: System,
        asked: list[tuple[str, Work]],
        budget: list[int],
        breaks_at: int | None = None,
    ) -> None:
        self.system, self.asked, self.budget, self.breaks_at = system, asked, budget, breaks_at
        self.count = 0

    def ask(self, work: Work) -> Sample:
        if len(work.prompts) == self.breaks_at:
            raise EngineError("OutOfMemoryError: too large")
        if self.budget[0] == 0:
            raise KeyboardInterrupt
        self.budget[0] -= 1
        self.asked.append((self.system.slug, work))
        self.count += 1
        return sample(self.system, work, 1.0 + self.count / 10)
