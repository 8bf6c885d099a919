"""Compare steering by potentials with choices among as many plain samples.

    .venv/bin/python bench/steering                      # resumable at any point
    .venv/bin/python bench/steering --problems 20        # a quick run, in another --output-dir

The shipped pair answers held-out problems. A rule that checks each step of arithmetic, and the
trained reward model, score lines and answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import answers
import numpy as np
from answers import COMMON, Reply, Study, about, prompt_ids, tokenizer
from intervals import Interval, ratio, wilson
from pair.task import held_out
from results import Report, interval_cell, markdown_table, table
from steering.judge import Judge
from steering.steps import Steps
from study import PAIR, REPOSITORY, BenchError, digest, slug_of, write_between

from sglang_smc.potentials import Potential, Text

# --- Cells: model, potential, and number of particles

TEMPERATURE = 1.0
NUM_STEPS = 8
PARTICLES = (4, 8, 16)
#: Plain samples per problem, of which a vote or choice takes the first N.
SAMPLES = max(PARTICLES)
#: Models. For the target the draft proposes, weighed or verified, or the target itself, so that
#: particles are sampled from it.
TARGET, VERIFIED, ITSELF = MODELS = ("target", "target verified", "target itself")
DRAFT = "draft"
#: The potentials' names, with the arguments of requests.
POTENTIALS: dict[str, dict[str, Any]] = {"steps": {"cost": 5.0}, "judge": {}}
#: The last line of an answer.
ANSWER_PATTERN = r"#### (-?\d+)\s*$"
#: The end of a step.
DELIMITER = "\n"


@dataclass(frozen=True)
class SteeringCell(answers.Cell):
    """Answers of one model, plain or steered by a potential."""

    model: str = ""
    potential: str = ""  # empty for plain samples
    num_particles: int = 1

    @property
    def slug(self) -> str:
        """Return the name for files and patterns: ``smc-target-judge-n8``."""
        return slug_of(self.label)


def plain(model: str) -> SteeringCell:
    """Return the cell of a model's plain samples."""
    name = f"plain {model}"
    return SteeringCell(name, name, TEMPERATURE, samples=SAMPLES, model=model)


def steered(model: str, potential: str, num_particles: int) -> SteeringCell:
    """Return a cell of particles; all are returned, for every kind of choice."""
    asked = {"name": potential, "args": POTENTIALS[potential], "when": {"delimiter": DELIMITER}}
    smc = {
        "mode": "smc",
        "proposal": "verified" if model == VERIFIED else "draft",
        "num_steps": NUM_STEPS,
        "num_particles": num_particles,
        "potentials": [asked],
        "return_particles": True,
    }
    label = f"smc {model} {potential} N={num_particles}"
    engine = f"smc {TARGET if model == VERIFIED else model}"
    return SteeringCell(label, engine, TEMPERATURE, smc, 1, model, potential, num_particles)


def cells() -> list[SteeringCell]:
    """Return all cells, grouped by engine to start each once."""
    found = []
    for model in MODELS:
        if model not in (VERIFIED, ITSELF):  # their plain samples are the target's
            found.append(plain(model))
        found += [steered(model, name, count) for name in POTENTIALS for count in PARTICLES]
    return found


# --- Choices among texts

ONE = "one sample"
MAJORITY = "majority"
BEST = "best of N"
WEIGHTED = "weighted vote"
SMC_SAMPLE = "SMC, sample"
SMC_ARGMAX = "SMC, argmax"
SMC_VOTE = "SMC, vote"
METHODS = (ONE, MAJORITY, BEST, WEIGHTED, SMC_SAMPLE, SMC_ARGMAX, SMC_VOTE)
#: Marks of the generated part of the page.
MARKS = "<!-- made by bench/steering -->", "<!-- end -->"


@dataclass(frozen=True)
class Drawn:
    """The result of one request: a plain sample, or the particles of SMC."""

    index: int  # of the problem
    sample: int  # of the problem, from 0 on
    texts: list[str]
    weights: list[float]  # which sum to 1
    tokens: int  # of all texts
    passes: int  # of the model
    values: dict[str, float] = field(default_factory=dict)  # log phi, for plain samples
    ess: float | None = None  # of the particles over N, mean over rounds
    resampled: float | None = None  # share of the rounds


_ANSWER = re.compile(ANSWER_PATTERN)


def number_of(text: str) -> int | None:
    """Return the number that a text answers; None if it has no final answer."""
    found = _ANSWER.search(text)
    return int(found[1]) if found else None


#: Returns the probability that weighted texts answer a number, by one choice among them.
Choice = Callable[[Sequence[int | None], Sequence[float], int], float]


def first(numbers: Sequence[int | None], weights: Sequence[float], right: int) -> float:
    """Choose the first text."""
    return numbers[0] == right


def voted(numbers: Sequence[int | None], weights: Sequence[float], right: int) -> float:
    """Choose the number with the largest total weight (ties: the first)."""
    total: dict[int | None, float] = {}
    for number, weight in zip(numbers, weights, strict=True):
        if number is not None:
            total[number] = total.get(number, 0.0) + weight
    return max(total, key=total.__getitem__, default=None) == right


def best(numbers: Sequence[int | None], weights: Sequence[float], right: int) -> float:
    """Choose the text with the largest weight (ties: the first)."""
    return numbers[max(range(len(numbers)), key=weights.__getitem__)] == right


def drawn(numbers: Sequence[int | None], weights: Sequence[float], right: int) -> float:
    """Draw a text by weight."""
    return sum(one for number, one in zip(numbers, weights, strict=True) if number == right)


@dataclass(frozen=True)
class SteeringRow:
    """One way to answer, over all problems."""

    label: str
    model: str
    potential: str  # empty without one
    method: str
    num_particles: int  # or samples
    accuracy: Interval  # in the mean over draws, where a text is drawn
    tokens: float  # per problem, of all samples or particles
    passes: float  # per problem; samples run in parallel, so the longest counts
    ess: Interval | None  # over N, of particles
    resampled: Interval | None  # share of their rounds


def rows_of(answers: Mapping[SteeringCell, Sequence[Drawn]]) -> list[SteeringRow]:
    """Return the rows of all complete cells."""
    found: list[SteeringRow] = []
    counts = sorted({cell.num_particles for cell in answers if cell.potential})
    for cell, every in answers.items():
        if cell.potential:
            for method, choice in ((SMC_SAMPLE, drawn), (SMC_ARGMAX, best), (SMC_VOTE, voted)):
                here = cell.potential, method, cell.num_particles
                found.append(_row(cell.model, *here, every, choice))
            continue
        found.append(_row(cell.model, "", ONE, 1, every, first))
        for count in counts:  # choices among the first samples of each problem
            found.append(_row(cell.model, "", MAJORITY, count, every, voted))
            for name in POTENTIALS:
                valued = [replace(one, weights=[math.exp(one.values[name])]) for one in every]
                for method, choice in ((BEST, best), (WEIGHTED, voted)):
                    found.append(_row(cell.model, name, method, count, valued, choice))
    names = ["", *POTENTIALS]
    return sorted(
        found,
        key=lambda row: (
            MODELS.index(row.model),
            names.index(row.potential),
            METHODS.index(row.method),
            row.num_particles,
        ),
    )


def _row(
    model: str, potential: str, method: str, count: int, every: Sequence[Drawn], choice: Choice
) -> SteeringRow:
    taken = [list(some)[:count] for _, some in groupby(every, key=lambda one: one.index)]
    right = []
    for some in taken:
        numbers = [number_of(text) for one in some for text in one.texts]
        weights = [weight for one in some for weight in one.weights]
        right.append(choice(numbers, weights, held_out(some[0].index).number))
    asked = f" by {potential}" if potential else ""
    return SteeringRow(
        label=f"{model}: {method}{asked}, N={count}",
        model=model,
        potential=potential,
        method=method,
        num_particles=count,
        accuracy=ratio(np.array(right)) if choice is drawn else wilson(int(sum(right)), len(right)),
        tokens=sum(one.tokens for some in taken for one in some) / len(taken),
        passes=sum(max(one.passes for one in some) for some in taken) / len(taken),
        ess=_mean([some[0].ess for some in taken]),
        resampled=_mean([some[0].resampled for some in taken]),
    )


def _mean(values: Sequence[float | None]) -> Interval | None:
    return None if None in values else ratio(np.array(values, dtype=float))


COLUMNS: dict[str, Callable[[SteeringRow], str]] = {
    "": lambda row: row.label,
    "accuracy, %": lambda row: _percent(row),
    "tokens a problem": lambda row: f"{row.tokens:.0f}",
    "model passes a problem": lambda row: f"{row.passes:.1f}",
    "ESS / N": lambda row: interval_cell(row.ess, ".2f"),
    "rounds resampled, %": lambda row: interval_cell(row.resampled, ".0f", scale=100),
}


def markdown(rows: Sequence[SteeringRow], note: str) -> str:
    """Return a table for each model, and all rows."""
    return f"{note}\n\n{summaries(rows)}\n\n**All**\n\n{table(COLUMNS, rows)}\n"


def shown(rows: Sequence[SteeringRow]) -> list[SteeringRow]:
    """Return the rows of the page."""
    left_out = {"judge", BEST, SMC_ARGMAX}
    return [row for row in rows if not {row.model, row.potential, row.method} & left_out]


def summaries(rows: Sequence[SteeringRow]) -> str:
    """Return a table for each model."""
    models = dict.fromkeys(row.model for row in rows)
    return "\n\n".join(f"**{TITLES[model]}**\n\n{summary(rows, model)}" for model in models)


TITLES = {
    "target": "The target, drafted for by the draft",
    "target verified": "The target, drafted for by the draft, verified",
    "target itself": "The target, drafted for by itself",
}


def summary(rows: Sequence[SteeringRow], model: str) -> str:
    """Return one model's accuracies: a line per method and potential, a column per N."""
    here = [row for row in rows if row.model == model]
    counts = sorted({row.num_particles for row in here} - {1})
    lines = []
    for key in dict.fromkeys((row.potential, row.method) for row in here):
        of_line = {r.num_particles: r for r in here if (r.potential, r.method) == key}
        name = key[1] + (f" by {key[0]}" if key[0] else "")
        if 1 in of_line:
            name += f" ({_percent(of_line[1])})"
        lines.append([name, *(_percent(of_line[n]) if n in of_line else "" for n in counts)])
    return markdown_table(("accuracy, %", *(f"N = {count}" for count in counts)), lines)


def _percent(row: SteeringRow) -> str:
    return interval_cell(row.accuracy, ".1f", scale=100)


# --- The study

PAGE = REPOSITORY / "docs" / "potentials.md"
SMC: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": NUM_STEPS,
    "speculative_smc_num_particles": SAMPLES,
    "speculative_smc_potential": ["steps=steering.steps:Steps", "judge=steering.judge:Judge"],
    # On two shared cores a batch may take long.
    "speculative_smc_potential_timeout": 60.0,
    # Twice the particles of the fidelity study share its KV pool.
    "max_running_requests": 16,
}


@lru_cache
def shipped() -> Mapping[str, Potential]:
    """Open the two potentials of this study."""
    found: dict[str, Potential] = {"steps": Steps(), "judge": Judge()}
    for potential in found.values():
        potential.open()
    return found


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    return (
        f"The shipped pair, temperature {TEMPERATURE:g}, {about(origin)}"
        "`steps` is the rule that checks arithmetic, `judge` the trained "
        "reward model; SMC asks them at each line's end. The same N plain samples serve all that "
        "choose among samples, the same N particles all that choose among particles; a sample of "
        "these is the mean over draws. Tokens are of all texts there are in the end."
    )


@lru_cache
def code_of(potential: str) -> str:
    """Return the fingerprint of a potential's code and model."""
    paths = [Path(__file__).with_name(f"{potential}.py")]
    if potential == "judge":
        paths += [*(PAIR / "reward").iterdir(), PAIR / "reward_texts.py"]
    return digest(paths)


class Steering(Study[SteeringCell, Drawn]):
    """The study: plain samples get their values by the potentials as they come."""

    name = "steering"
    about = "Accuracy with potentials, beside votes and choices among as many plain samples."
    kind = Drawn
    report = Report("steering", SteeringRow, markdown)
    note = staticmethod(note)

    def grid(self) -> list[SteeringCell]:
        return cells()

    def engine(self, name: str) -> dict[str, Any]:
        return COMMON | (SMC if name.startswith("smc ") else {})

    def models(self, name: str) -> tuple[str, str | None]:
        """Return a model alone, or under SMC the target and what drafts for it."""
        kind, _, model = name.partition(" ")
        models = (TARGET, TARGET) if model == ITSELF else (model, DRAFT)
        return models if kind == "smc" else (models[0], None)

    def identity(self, cell: SteeringCell) -> dict[str, Any]:
        """Return what a cell's answers depend on; plain samples are stock SGLang's."""
        found = super().identity(cell)
        if cell.potential:
            return found | {"potential": code_of(cell.potential)}
        found["potentials"] = {name: code_of(name) for name in POTENTIALS}
        return {name: value for name, value in found.items() if name != "plugin"}

    def stored(self, cell: SteeringCell, reply: Reply, sample: int) -> Drawn:
        """Return the particles of SMC, or a plain sample with its value by each potential."""
        index = reply.index
        info = reply.meta_info
        if not cell.smc:
            tokens = info["completion_tokens"]
            ids = tokenizer()(reply.text)["input_ids"]
            prompt = prompt_ids(held_out(index))
            values = dict[str, float]()
            for name, potential in shipped().items():  # as servers pass a text to them
                text = Text(prompt, ids, potential.Args(**POTENTIALS[name]), _decode)
                (values[name],) = potential.complete([text])
            return Drawn(index, sample, [reply.text], [1.0], tokens, tokens, values)
        particles = info.get("spec_smc_particles")
        if not particles:
            raise BenchError(f"Problem {index} came without particles: {info}")
        return Drawn(
            index,
            sample,
            texts=[_decode(one["output_ids"]) for one in particles],
            weights=[one["weight"] for one in particles],
            tokens=sum(len(one["output_ids"]) for one in particles),
            passes=info["spec_verify_ct"],
            ess=info["spec_smc_ess_mean"] / len(particles),
            resampled=info["spec_smc_resample_ct"] / info["spec_smc_rounds_ct"],
        )

    def rows(self) -> list[SteeringRow]:
        return rows_of(self.complete())

    def publish(self) -> None:
        """Copy the results to bench/results, and the tables to the page."""
        super().publish()
        rows = self.report.read(self.options.output_dir)
        write_between(PAGE, MARKS, summaries(shown(rows)))


def _decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(list(ids), skip_special_tokens=True)


main = Steering.main
