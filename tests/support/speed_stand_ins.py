"""Stand-ins for what the benchmarks ask: engines with times that tests can work out, and scores."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import answers
import pytest
import results
import study as frame
from answers import MAX_PROBLEMS, Study
from fidelity.scoring import AnswerScores
from pair.task import held_out
from speed.grid import AR, AR_STOCK, CHAIN, TREE, System
from speed.remote import EngineError, TimedBatch, Work

from sglang_smc_tools.demo.serving import Launch

#: Seconds a token of each family takes in a batch of one; SMC takes the default.
SECONDS = {AR: 0.10, AR_STOCK: 0.09, CHAIN: 0.05, TREE: 0.04}
SMC_SECONDS = 0.02
FIRST = 0.5
TOKENS_PER_ROUND = 5
ORIGIN = {"date": "2026-01-01", "git_sha": "abc", "hardware": "a CPU", "versions": {}}


class Caller:
    """Calls a benchmark, with the same ``common`` words each time; remembers what it asks."""

    def __init__(self, main: Callable[..., int], folder: Path, common: Sequence[str] = ()) -> None:
        self.main = main
        self.folder = folder
        self.common = common
        self.asked: list[tuple[str, Any]] = []
        self.started: list[str] = []
        self.budget = [0]
        self.said = ""

    def __call__(self, *arguments: str, last: int = 10**6) -> int:
        """Return the exit status; engines are interrupted after ``last`` answers."""
        self.asked = []
        self.started = []
        self.budget = [last]
        words = [*self.common, "--output-dir", str(self.folder), *arguments]
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = self.main(words)
        self.said = errors.getvalue()
        return status


#: Returns the content of an answer, by the engine's models, the problem and the parameters.
Replying = Callable[[str, int, dict[str, Any]], dict[str, Any]]


class Runner(Caller):
    """Runs a study with engines that ``reply``, without a picture or a look at git."""

    def __init__(
        self,
        study: type[Study],
        folder: Path,
        patch: pytest.MonkeyPatch,
        reply: Replying,
        common: Sequence[str],
    ) -> None:
        super().__init__(study.main, folder / "out", common)
        self.study = study
        self.reply = reply
        self._published = folder / "published"
        if study.report.plot:
            drawn = replace(study.report, plot=lambda _, path: path.write_text("a picture"))
            patch.setattr(study, "report", drawn)
        patch.setattr(answers, "running", self.running)
        patch.setattr(answers, "prompt_ids", lambda item: [1])
        patch.setattr(frame, "PUBLISHED", self._published)
        patch.setattr(results, "provenance", lambda settings: {**ORIGIN, "settings": settings})

    @contextlib.contextmanager
    def running(self, launch: Launch, log: Path) -> Iterator[Runner]:
        models = (launch.arguments.get(f"{kind}model_path") for kind in ("", "speculative_draft_"))
        self.started.append("+".join(Path(model).name for model in models if model))
        yield self

    def each(self, work: Work) -> Iterator[dict[str, Any]]:
        """Answer in another order than asked."""
        for place in reversed(range(len(work.prompts))):
            if self.budget[0] == 0:
                raise KeyboardInterrupt
            self.budget[0] -= 1
            params = work.params[place]
            self.asked.append((self.started[-1], params))
            index = params["sampling_seed"] % MAX_PROBLEMS
            yield {"place": place, **self.reply(self.started[-1], index, params)}

    def rows(self) -> dict[str, Any]:
        """Return the rows of the report by label."""
        return {row.label: row for row in self.study.report.read(self.folder)}

    def published(self) -> set[str]:
        folder = self._published / self.study.name
        return {path.name for path in folder.iterdir()} if folder.exists() else set()


def graded_reply(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
    """Answer rightly at even problems, with the figures of an SMC server for a group of eight."""
    info: dict[str, Any] = {"completion_tokens": 3, "finish_reason": {"type": "stop"}, "id": "x"}
    if "+" in engine:
        info |= {
            "spec_smc_num_particles": 8,
            "spec_smc_rounds_ct": 10,
            "spec_smc_resample_ct": 5,
            "spec_smc_ess_mean": 4.0,
            "spec_smc_log_evidence": -1.5,
        }
    text = f"#### {held_out(index).number + index % 2}"
    return {"text": text, "output_ids": [5, index, 1], "meta_info": info}


def canned_scores(prompt: Sequence[int], *_: object) -> AnswerScores:
    """Return scores of an answer by its prompt alone."""
    number = sum(prompt) % 100
    sign = (-1) ** number
    return AnswerScores(
        -20.0 - number, 0.1 * sign, 0.2 * sign, information=1.0, log_ratios=[0.1] * 3
    )


def sample(system: System, work: Work, slower: float = 1.0) -> TimedBatch:
    """Every request has its first token after `FIRST` seconds, and ends with the others."""
    tokens = work.params[0]["max_new_tokens"]
    end = FIRST + (tokens - 1) * SECONDS.get(system.family, SMC_SECONDS) * slower
    info: dict[str, object] = {"completion_tokens": tokens}
    if system.family not in (AR, AR_STOCK):
        info["spec_verify_ct"] = -(-(tokens - 1) // TOKENS_PER_ROUND)
    batch = len(work.prompts)
    return TimedBatch([FIRST] * batch, [end] * batch, [info] * batch)


class FakeEngine:
    """Answers for one system, each time 10 % slower; dies of batches of ``breaks_at``."""

    def __init__(
        self,
        system: System,
        asked: list[tuple[str, Work]],
        budget: list[int],
        breaks_at: int | None = None,
    ) -> None:
        self.system = system
        self.asked = asked
        self.budget = budget
        self.breaks_at = breaks_at
        self.count = 0

    def internal_state(self) -> dict[str, Any]:
        return {"smc": {"costs": {}}}

    def ask(self, work: Work) -> TimedBatch:
        if len(work.prompts) == self.breaks_at:
            raise EngineError("OutOfMemoryError: too large")
        if self.budget[0] == 0:
            raise KeyboardInterrupt
        self.budget[0] -= 1
        self.asked.append((self.system.slug, work))
        self.count += 1
        return sample(self.system, work, 1.0 + self.count / 10)
