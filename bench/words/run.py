"""Compare steering on real text with importance weights of as many plain samples, and of many.

    .venv/bin/python bench/words                  # resumable at any point
    .venv/bin/python bench/words --problems 4     # a quick run, in another --output-dir

SmolLM2 answers, and each use of a word multiplies an answer's weight by exp(`WEIGHT`). The steered
distribution itself is what the weights of many plain samples estimate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from answers import Reply
from intervals import Interval, mean_of
from real.run import MATCHES, PLAIN, USUAL, RealCell, RealStudy, Yielded, settings, tokenizer
from results import Report, interval_cell, table

PAIR = "smollm2"
TEMPERATURE = 1.0
MAX_TOKENS = 64
PATTERN = r"\b[Tt]he\b"
WEIGHT = -0.7
N, K = USUAL
DECLARED = f"words=sglang_smc.potentials.library:RegexCount(pattern={PATTERN!r})"
POTENTIAL = {"name": "words", "args": {"weight": WEIGHT}}


def cells() -> list[RealCell]:
    """Return plain samples, and particles with the potential."""

    def cell(label: str, engine: str, samples: int, smc: dict[str, Any] | None = None) -> RealCell:
        name = f"{PAIR} {engine}"
        return RealCell(label, name, TEMPERATURE, smc, samples, pair=PAIR)

    verified = {"proposal": "verified", "mode": "smc"}
    steered = {"num_particles": N, "num_steps": K, **verified, "potentials": [POTENTIAL]}
    return [cell("plain samples", PLAIN, 4 * N), cell("SMC", MATCHES, N // 4, steered)]


@dataclass(frozen=True)
class Counted(Yielded):
    """An answer's counters, and its uses of the word."""

    words: int = 0


@dataclass(frozen=True, kw_only=True)
class WordsRow:
    """A line of the table, over prompts."""

    label: str
    words: Interval  # an answer
    from_steered: Interval | None  # minus those of the steered distribution, on the same prompts


def rows_of(plain: Sequence[Counted], steered: Sequence[Counted]) -> list[WordsRow]:
    """Return a row for each way to choose an answer."""
    # [prompts, samples]
    samples = _by_prompt(plain)
    particles = _by_prompt(steered)
    truth = _weighted(samples)

    def row(label: str, words: np.ndarray) -> WordsRow:
        difference = None if words is truth else mean_of(words - truth)
        return WordsRow(label=label, words=mean_of(words), from_steered=difference)

    of_n = _weighted(samples.reshape(len(samples), -1, N)).mean(1)
    return [
        row("one plain sample", samples.mean(1)),
        row(f"one of {N} plain samples, by weight", of_n),
        row(f"SMC, N = {N}, verified n-grams", particles.mean(1)),
        row(f"the steered distribution, by {samples.shape[1]} plain samples", truth),
    ]


def _by_prompt(found: Sequence[Counted]) -> np.ndarray:
    """Return the words of each sample of each prompt, ``[prompts, samples]``."""
    words = np.array([one.words for one in found], dtype=float)  # by prompt and sample
    return words.reshape(len({one.index for one in found}), -1)


def _weighted(words: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis by importance weights."""
    weights = np.exp(WEIGHT * words)
    return (weights * words).sum(-1) / weights.sum(-1)


COLUMNS: dict[str, Callable[[WordsRow], str]] = {
    "": lambda row: row.label,
    "words an answer": lambda row: interval_cell(row.words, ".2f"),
    "from the steered distribution": lambda row: interval_cell(row.from_steered, "+.2f"),
}


def markdown(rows: Sequence[WordsRow], note: str) -> str:
    """Return the table."""
    return f"{note}\n\n{table(COLUMNS, rows)}\n"


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the table."""
    told = origin["settings"]
    (model,) = told["models"]
    return (
        f"{model['model']} ({model['quantisation']}), temperature {TEMPERATURE:g}, the first "
        f"{told['problems']} prompts of Spec-Bench, at most {told['max_new_tokens']} tokens an "
        f"answer, of which each match of `{PATTERN}` costs {-WEIGHT:g} nats; on "
        f"{origin['hardware']}, {origin['date'][:10]}. In brackets 95 % intervals, Student's over "
        "prompts."
    )


class Words(RealStudy):
    """The study, on models and engines of `RealStudy`."""

    name = "words"
    about = "Uses of a word that a potential discourages, beside those by weighted plain samples."
    problems = 14
    max_tokens = MAX_TOKENS
    kind = Counted
    report = Report("words", WordsRow, markdown)
    note = staticmethod(note)

    def grid(self) -> list[RealCell]:
        return cells()

    def engine(self, name: str) -> dict[str, Any]:
        declared = {"speculative_smc_potential": [DECLARED]} if name.endswith(MATCHES) else {}
        return settings(name) | declared

    def flushes(self, cell: RealCell) -> bool:
        """Keep the prompts' KV."""
        return False

    def stored(self, cell: RealCell, reply: Reply, sample: int) -> Counted:
        text = tokenizer(PAIR).decode(reply.output_ids, skip_special_tokens=True)
        stored = asdict(super().stored(cell, reply, sample))
        return Counted(**stored, words=len(re.findall(PATTERN, text)))

    def rows(self) -> list[WordsRow]:
        found = list(self.complete().values())
        return rows_of(*found) if len(found) == len(self.cells) else []


main = Words.main
