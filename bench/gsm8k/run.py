"""Measure accuracy on GSM8K, of plain decoding and of each mode, on the same problems.

    make gsm8k                                             # everything, resumable at any point
    .venv/bin/python bench/gsm8k --list                    # lists the cells
    .venv/bin/python bench/gsm8k --problems 60 --publish   # what is complete there

Models and engines are those of `bench/real`. A few hundred problems show no small loss; the tilt
to the draft does (docs/fidelity.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

from answers import Reply
from intervals import Interval, paired_difference, watched_tilt, wilson
from real.prompts import PromptSource
from real.run import (
    COMMON,
    PAIRS,
    PLAIN,
    SMC,
    USUAL,
    RealCell,
    RealStudy,
    Yielded,
    infos,
    tokenizer,
)
from results import Report, interval_cell, table, tokens_a_pass

GSM8K = PromptSource(
    name="gsm8k_test.jsonl",
    sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    where="grade_school_math/data/test.jsonl of github.com/openai/grade-school-math",
)
ASKED = "Reason in short lines of arithmetic, and put your final answer within \\boxed{}."
#: Questions and answers before each problem, which keep its answer short.
EXAMPLES = (
    (
        "Ann has 4 boxes of 6 eggs each. She breaks 5 eggs and sells the others for $2 each. How "
        "many dollars does she get?",
        "4 * 6 = 24 eggs\n24 - 5 = 19 eggs are left\n19 * 2 = 38 dollars\n\\boxed{38}",
    ),
    (
        "A train goes 60 miles in the first hour and half as far in each of the next 3 hours. How "
        "far does it go?",
        "60 / 2 = 30 miles in an hour\n30 * 3 = 90 miles\n60 + 90 = 150 miles\n\\boxed{150}",
    ),
)
TEMPERATURE = 0.7
MAX_TOKENS = 160
PAIR = "coder"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


# --- Answers


def answered(text: str) -> float | None:
    """Return the boxed number of an answer, or else its last; None without one."""
    boxed = text.rpartition("\\boxed{")[2] if "\\boxed{" in text else ""
    numbers = NUMBER.findall(boxed)[:1] or NUMBER.findall(text)[-1:]
    return float(numbers[0].replace(",", "")) if numbers else None


def is_right(text: str, problem: Mapping[str, str]) -> bool:
    """Return whether the number of an answer is the problem's."""
    found = answered(text)
    return found is not None and found == answered(problem["answer"].rpartition("####")[2])


def chat_ids(target: str, turns: Sequence[tuple[str, str]], question: str) -> list[int]:
    """Return the tokens of a question after worked examples, in a target's chat template."""
    chat: list[dict[str, str]] = []
    for asked, answer in turns:
        chat.append({"role": "user", "content": asked})
        chat.append({"role": "assistant", "content": answer})
    chat.append({"role": "user", "content": question})
    template = tokenizer(target).apply_chat_template
    return template(chat, add_generation_prompt=True)["input_ids"]


def problem_ids(target: str, question: str) -> list[int]:
    """Return the tokens of a problem of GSM8K after the worked examples."""
    turns = [(f"{asked}\n\n{ASKED}", answer) for asked, answer in EXAMPLES]
    return chat_ids(target, turns, f"{question}\n\n{ASKED}")


# --- Cells and rows


def cells() -> list[RealCell]:
    """Return plain decoding, and each mode at N = K = 8."""
    n, k = USUAL

    def cell(label: str, engine: str, **asked: Any) -> RealCell:
        smc = {"num_particles": n, "num_steps": k, **asked} if engine == SMC else None
        return RealCell(label, f"{PAIR} {engine}", TEMPERATURE, smc, pair=PAIR)

    return [
        cell("plain decoding", PLAIN),
        cell("exact", SMC, mode="exact"),
        cell("auto", SMC, mode="auto"),
        cell("default", SMC),
        cell("paper", SMC, mode="smc", resample_at="block", evidence_threshold=0.0),
    ]


@dataclass(frozen=True)
class Graded(Yielded):
    """An answer's counters, and whether it is right."""

    right: bool = False


Answered: TypeAlias = Sequence[Graded]


@dataclass(frozen=True, kw_only=True)
class Gsm8kRow:
    """A line of the table; None where a number does not apply."""

    label: str
    accuracy: Interval
    difference: Interval | None  # minus plain decoding's, on the same problems
    tokens_per_pass: Interval
    server_tilt: Interval | None
    plugin: str  # fingerprint of the code that answered


def _row(cell: RealCell, found: Answered, plain: Answered | None, plugin: str) -> Gsm8kRow:
    compared = cell.smc and plain
    return Gsm8kRow(
        label=cell.label,
        accuracy=wilson(sum(one.right for one in found), len(found)),
        difference=paired_difference(_right(found), _right(plain)) if compared else None,
        tokens_per_pass=tokens_a_pass(infos(found)),
        server_tilt=watched_tilt(infos(found)),
        plugin=plugin,
    )


def _right(found: Answered) -> dict[int, bool]:
    return {one.index: one.right for one in found}


COLUMNS: dict[str, Callable[[Gsm8kRow], str]] = {
    "": lambda row: row.label,
    "accuracy, %": lambda row: interval_cell(row.accuracy, ".1f", scale=100),
    "points from plain decoding": lambda row: interval_cell(row.difference, "+.1f", scale=100),
    "tokens / target pass": lambda row: interval_cell(row.tokens_per_pass, ".2f"),
    "the server's own tilt": lambda row: interval_cell(row.server_tilt, "+.3f"),
}


def markdown(rows: Sequence[Gsm8kRow], note: str) -> str:
    """Return a table for each temperature."""
    return f"{note}\n\n**Temperature {TEMPERATURE:g}**\n\n{table(COLUMNS, rows)}\n"


def models_of(origin: Mapping[str, Any]) -> str:
    """Return the models that were measured, with their quantisation."""
    models = origin["settings"]["models"]
    return "; ".join(f"{one['model']} ({one['quantisation']})" for one in models)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the table."""
    told = origin["settings"]
    models = models_of(origin)
    return (
        f"{models}; dequantized to bfloat16, N = K = 8. The first {told['problems']} problems of "
        f"GSM8K's test set after {len(EXAMPLES)} worked examples, at most {told['max_new_tokens']} "
        f"tokens an answer; one that is cut off is wrong. On {origin['hardware']}, "
        f"{origin['date'][:10]}. In brackets 95 % intervals: Wilson's, Bonett and Price's of "
        "differences on the same problems. The server's own tilt is 0 for the target's "
        "distribution and about 1 for the draft's."
    )


# --- The study


class Gsm8k(RealStudy):
    """The study, on models and engines of `RealStudy`."""

    name = "gsm8k"
    about = "Accuracy on GSM8K of plain decoding and of each mode, and each mode's tilt."
    problems = 150
    max_tokens = MAX_TOKENS
    kind = Graded
    report = Report("gsm8k", Gsm8kRow, markdown)
    note = staticmethod(note)
    source = GSM8K

    def grid(self) -> list[RealCell]:
        return cells()

    def engine(self, name: str) -> dict[str, Any]:
        return super().engine(name) | {"max_total_tokens": 2 * COMMON["max_total_tokens"]}

    @cached_property
    def _problems(self) -> list[dict[str, str]]:
        return self.source.rows(self.options.prompts)

    def prompt(self, cell: RealCell, index: int) -> list[int]:
        return problem_ids(PAIRS[PAIR].target, self._problems[index]["question"])

    def stored(self, cell: RealCell, reply: Reply, sample: int) -> Graded:
        done = reply.meta_info["finish_reason"]["type"] == "stop"
        right = done and is_right(reply.text, self._problems[reply.index])
        return Graded(**asdict(super().stored(cell, reply, sample)), right=right)

    def rows(self) -> list[Gsm8kRow]:
        complete = self.complete()
        plain = complete.get(self.cells[0])
        return [_row(cell, some, plain, self.plugin(cell)) for cell, some in complete.items()]


main = Gsm8k.main
