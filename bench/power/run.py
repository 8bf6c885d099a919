"""Measure powers of a real model: likelihood, accuracy, passes and CPU seconds, beside rivals.

    make power                                             # everything, resumable at any point
    .venv/bin/python bench/power --list                    # lists the cells
    .venv/bin/python bench/power --only 'smollm2-*'        # the small model alone
    .venv/bin/python bench/power --problems 20 --publish   # what is answered there

Problems are those of `bench/gsm8k`, and sums of two numbers for the small model. All settings
answer ten problems before the next ten, so that an interruption leaves paired answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import psutil
from answers import LOG, kept_of
from gsm8k.run import EXAMPLES, GSM8K, answered, chat_ids, models_of, problem_ids
from power.cells import (
    AT_ONCE,
    CODER,
    MCMC,
    SEED_PROBLEMS,
    SEEDS,
    SUM_EXAMPLES,
    PowerCell,
    cells,
    settings,
    sum_of,
)
from power.metropolis import BLOCK, STEPS, Chain
from power.rows import PowerAnswer, PowerRow, chart, markdown, rows_of, summary
from real.run import PAIRS, RealStudy, tokenizer
from results import Report
from speed.remote import FLUSH, RemoteEngine, running
from study import REPOSITORY, bar, write_between
from tqdm import tqdm

from sglang_smc_tools.demo.serving import Launch

MAX_TOKENS = 96
PAGE = REPOSITORY / "docs" / "powers.md"
MARKS = "<!-- power:begin -->", "<!-- power:end -->"
#: Log-probabilities of all answers are those of the target at temperature 1.
ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
#: CPU seconds are those of one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: What is stored of `answers.kept_of`; the files are published.
KEPT = (
    "completion_tokens",
    "spec_verify_ct",
    "spec_smc_log_evidence",
    "spec_smc_distinct_ancestors",
    "spec_smc_ess_min",
)


class CellBatch(NamedTuple):
    """Requests of a cell that are sent at once."""

    cell: PowerCell
    pairs: list[tuple[int, int]]  # samples and problems


def cpu_seconds() -> float:
    """Return the CPU seconds of all living processes that this one has started."""
    each = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in each)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    told = origin["settings"]
    models = models_of(origin)
    return (
        f"{models}; dequantized to bfloat16, K = 8, on {origin['hardware']} with one thread, "
        f"{origin['date'][:10]}. `coder`: GSM8K's test problems from the first on, after "
        f"{len(EXAMPLES)} worked examples; `smollm2`, whose drafts are n-gram matches: sums of two "
        f"numbers of two digits. At most {told['max_new_tokens']} tokens an answer; one that is "
        "cut off is wrong. Powers are at temperature 1, their proposals verified (the default) "
        "unless a row says `draft`. Differences and ratios are of the same problems; in brackets "
        "95 % intervals, of shares Wilson's, of their differences Bonett and Price's. log p is an "
        "answer's under the target at temperature 1. The variance of log Z is over "
        f"{SEEDS} seeds, a mean of {SEED_PROBLEMS} problems. Ancestors: of the particles, distinct "
        f"at the end. CPU seconds are the engine's after the prompt, an answer's share of "
        f"{AT_ONCE} problems at once, or of one problem alone. {MCMC}: blocks of {BLOCK} tokens, "
        f"{STEPS} steps after each (Karan and Du, 2025). Seconds on an H200 are those of so many "
        "passes of an 8B with a 1B draft, of one request, measured or modelled (`gpu.expected`)."
    )


class Power(RealStudy):
    """The study, on models and engines of `RealStudy`."""

    name = "power"
    about = "Powers of a real model: likelihood, accuracy and costs beside plain decoding."
    problems = 100
    max_tokens = MAX_TOKENS
    kind = PowerAnswer
    report = Report("power", PowerRow, markdown, chart)
    note = staticmethod(note)
    source = GSM8K

    def grid(self) -> list[PowerCell]:
        return cells()

    def engine(self, name: str) -> dict[str, Any]:
        return settings(name)

    def launch(self, name: str) -> Launch:
        launch = super().launch(name)
        return replace(launch, environment={**launch.environment, **ENVIRONMENT, **ONE_THREAD})

    def identity(self, cell: PowerCell) -> dict[str, Any]:
        chain = {"block": BLOCK, "steps": STEPS} if cell.proposal == MCMC else {}
        return super().identity(cell) | {"environment": ENVIRONMENT} | chain

    # Problems

    @cached_property
    def _problems(self) -> list[dict[str, str]]:
        return self.source.rows(self.options.prompts)

    def prompt(self, cell: PowerCell, index: int) -> list[int]:
        target = PAIRS[cell.pair].target
        if cell.pair == CODER:
            return problem_ids(target, self._problems[index]["question"])
        turns = [(one.question, one.answer) for one in SUM_EXAMPLES]
        return chat_ids(target, turns, sum_of(index).question)

    def truth(self, cell: PowerCell, index: int) -> float:
        """Return the number that a problem asks for."""
        if cell.pair != CODER:
            return sum_of(index).total
        found = answered(self._problems[index]["answer"].rpartition("####")[2])
        assert found is not None
        return found

    # Answers

    def pairs(self, cell: PowerCell) -> list[tuple[int, int]]:
        return cell.pairs(self.options.problems)

    def _batches(self) -> Iterator[CellBatch]:
        """Yield what is missing, ten problems at a time; engines take turns to begin."""
        for pair in PAIRS:
            missing = {c: self.missing(c) for c in self.selected if c.pair == pair}
            engines = list(dict.fromkeys(cell.engine for cell in missing))
            for start in range(0, self.options.problems, AT_ONCE):
                for cell in sorted(missing, key=lambda cell: engines.index(cell.engine)):
                    here = [at for at in missing[cell] if start <= at[1] < start + AT_ONCE]
                    here.sort(key=partial(_place, cell))
                    for _, some in groupby(here, key=partial(_place, cell)):
                        yield CellBatch(cell, list(some))
                engines.reverse()

    def _answer(self) -> None:
        """Answer all that is missing, in rounds of problems."""
        batches = list(self._batches())
        total = sum(len(batch.pairs) for batch in batches)
        with bar(total=total, unit="answer", disable=not total) as progress:
            for name, group in groupby(batches, key=lambda batch: batch.cell.engine):
                progress.set_description_str(f"starting the engine: {name}")
                with running(self.launch(name), self.options.output_dir / LOG) as engine:
                    self._play(engine, list(group), progress)

    def _play(self, engine: RemoteEngine, batches: list[CellBatch], progress: tqdm) -> None:
        read: set[int] = set()
        for cell, pairs in batches:
            progress.set_description_str(cell.slug)
            if self.flushes(cell):  # matches would find the answers of other cells
                engine.post(FLUSH)
                read.clear()
            unread = list({index: None for _, index in pairs if index not in read})
            read |= {*unread}
            self._read_prompts(engine, cell, unread)
            began = cpu_seconds()
            pool = ThreadPoolExecutor(len(pairs))
            try:
                found = list(pool.map(partial(self._ask_one, engine, cell), pairs))
            finally:  # an interruption does not wait for answers
                pool.shutdown(wait=False, cancel_futures=True)
            each = (cpu_seconds() - began) / len(pairs)
            with self.answers[cell].writing() as write:
                for one in found:
                    write(asdict(replace(one, cpu_seconds=each)))
            progress.update(len(found))

    def _read_prompts(self, engine: RemoteEngine, cell: PowerCell, indices: list[int]) -> None:
        """Bring prompts into the engine's prefix cache, the first before others that share it."""
        prompts = [self.prompt(cell, index) for index in indices]
        for some in filter(None, (prompts[:1], prompts[1:])):
            engine.generate(input_ids=some, sampling_params={"max_new_tokens": 1})

    def _ask_one(self, engine: RemoteEngine, cell: PowerCell, pair: tuple[int, int]) -> PowerAnswer:
        sample, index = pair
        prompt = self.prompt(cell, index)
        params = self.params_of(cell, sample, index)
        if cell.proposal == MCMC:
            return self._sampled(Chain(engine, prompt, cell.power, index), cell, index)
        told = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        info = told["meta_info"]
        has_ended = info["finish_reason"]["type"] == "stop"
        number = answered(told["text"]) if has_ended else None
        particles = info.get("spec_smc_particles") or []
        whole = (len(one["output_ids"]) < self.max_tokens for one in particles)
        numbers = [
            answered(one["text"]) if ends else None
            for one, ends in zip(particles, whole, strict=True)
        ]
        return PowerAnswer(
            index=index,
            info={key: value for key, value in kept_of(info).items() if key in KEPT},
            output_ids=told["output_ids"],
            sample=sample,
            right=number == self.truth(cell, index),
            log_p=sum(log_p for log_p, *_ in info["output_token_logprobs"]),
            numbers=numbers or [number],
            weights=[one["weight"] for one in particles] or [1.0],
        )

    def _sampled(self, chain: Chain, cell: PowerCell, index: int) -> PowerAnswer:
        """Return the last text of a Metropolis-Hastings chain."""
        text = chain.run(self.max_tokens)
        decode = tokenizer(PAIRS[cell.pair].target).decode
        said = decode(text.ids, skip_special_tokens=True)
        number = answered(said) if text.has_ended else None
        return PowerAnswer(
            index=index,
            info={
                "completion_tokens": len(text.ids),
                "spec_verify_ct": chain.passes,
                "proposed": chain.proposed,
                "accepted": chain.accepted,
            },
            output_ids=text.ids,
            right=number == self.truth(cell, index),
            log_p=sum(token.log_p for token in text.tokens),
            numbers=[number],
            weights=[1.0],
        )

    # Results

    def rows(self) -> list[PowerRow]:
        fitting = [cell for cell in self.cells if self.answers[cell].fits]
        found = {cell: some for cell in fitting if (some := self.read(cell))}
        return rows_of(found, self.truth, self.plugin)

    def publish(self) -> None:
        """Copy what is answered, and the table to the page."""
        super().publish()
        write_between(PAGE, MARKS, summary(self.report.read(self.options.output_dir)))


def _place(cell: PowerCell, pair: tuple[int, int]) -> tuple[int, int]:
    """Return what pairs have in common that are asked at once: samples of a problem, not seeds."""
    sample, index = pair
    return index // cell.at_once, sample if cell.samples == 1 else 0


main = Power.main
