"""Score each token of an answer by the plain models: no engine, no cache, float32.

p is the target's distribution of the next token and q the draft's, both at the temperature that
the answer was sampled at, given its prompt and the tokens before. EOS counts as a token.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from answers import Cell, Record, Start, Study, prompt_ids
from study import PAIR, Log, bar, digest, positive

from sglang_smc.cpu.threads import usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEMPERATURES = (0.7, 1.0)
#: Number of answers in a forward pass.
BATCH = 32
#: Decimal digits of a stored log-ratio.
DIGITS = 6


@dataclass(frozen=True)
class Score:
    """An answer's score by the plain models: sums over its tokens, in nats; l is log q/p.

    Under the target the tokens' terms of innovation and tilt have mean 0, given the tokens before.
    """

    index: int
    answer: int  # `answer_key` of the scored tokens
    tokens: int
    log_p: float
    innovation: float  # log p + the entropy of p
    tilt: float  # l minus its mean under p
    information: float  # the variance of l under p
    log_ratios: list[float]  # l, token by token


def score_of(index: int, tokens: Sequence[int], log_p: np.ndarray, log_q: np.ndarray) -> Score:
    """Return the score of an answer from both distributions of each of its tokens, ``[T, V]``."""
    at, p, ratio = (np.arange(len(tokens)), np.asarray(tokens)), np.exp(log_p), log_q - log_p
    mean = (p * ratio).sum(-1)
    return Score(
        index,
        answer_key(tokens),
        len(tokens),
        log_p=float(log_p[at].sum()),
        innovation=float((log_p[at] - (p * log_p).sum(-1)).sum()),
        tilt=float((ratio[at] - mean).sum()),
        information=float((p * (ratio - mean[:, None]) ** 2).sum()),
        log_ratios=[round(value, DIGITS) for value in ratio[at].tolist()],
    )


def answer_key(tokens: Sequence[int]) -> int:
    """Return a checksum that distinguishes answers to the same problem."""
    return zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes())


# --- The answers of cells


class Batch(NamedTuple):
    """Answers to problems, sampled at a temperature."""

    temperature: float
    indices: list[int]
    answers: list[list[int]]


#: Scores batches in so many threads; yields their scores in any order.
Scorer = Callable[[Sequence[Batch], int], Iterator[list[Score]]]


def by_threads(batches: Sequence[Batch], jobs: int) -> Iterator[list[Score]]:
    """Score batches by the plain models, which are too small to use several cores at a time."""
    import torch

    load()
    with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for done in as_completed([pool.submit(score_batch, batch) for batch in batches]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def score_batch(batch: Batch) -> list[Score]:
    """Score answers behind their prompts, in one batch of each model."""
    import torch

    pair, tokenizer = load()
    prompts = [prompt_ids(tokenizer, index) for index in batch.indices]
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, batch.answers, strict=True)]
    longest = max(map(len, rows))
    # Padding follows a text, where causal attention ignores it.
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])  # [B, L]
    with torch.inference_mode():
        logits = [model(input_ids=ids).logits for model in pair]  # [B, L, V] each
    found = []
    for row, (index, answer) in enumerate(zip(batch.indices, batch.answers, strict=True)):
        own = slice(len(prompts[row]) - 1, len(rows[row]) - 1)
        log_p, log_q = (
            (x[row, own].double() / batch.temperature).log_softmax(-1).numpy() for x in logits
        )
        found.append(score_of(index, answer, log_p, log_q))
    return found


@lru_cache(maxsize=1)
def load() -> tuple[list[PreTrainedModel], PreTrainedTokenizerBase]:
    """Return the shipped target and draft in float32, with their tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    folders = [PAIR / name for name in ("target", "draft")]
    found = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders]
    return [model.eval() for model in found], AutoTokenizer.from_pretrained(folders[0])


C = TypeVar("C", bound=Cell)


class ScoredStudy(Study[C, Record]):
    """A study of answers that plain models score.

    Args:
        score: scores batches of answers.
    """

    def __init__(
        self, options: argparse.Namespace, start: Start | None = None, score: Scorer = by_threads
    ) -> None:
        self._score = score
        super().__init__(options, start)

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        add = made.add_argument
        add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T")
        add("--jobs", type=positive, default=usable_cores(), help="threads that score answers")
        return made

    remark_key = ("index", "answer")

    def remarks_on(self, cell: C) -> Log:
        identity = {
            **self.identity(cell),
            "scorer": digest([Path(__file__)]),
            "transformers": version("transformers"),
        }
        return Log(self.path("scores", cell), identity)

    def key_of(self, one: Record) -> tuple[int, int]:
        """Return the problem of an answer, and its tokens' checksum."""
        return one.index, answer_key(one.output_ids)

    def evaluate(self, todo: Sequence[tuple[C, list[Record], Log]]) -> None:
        """Score these answers, with a progress bar."""
        total = sum(len(records) for _, records, _ in todo)
        if not total:
            return
        with bar(total=total, desc="scoring", unit="answer") as line:
            for cell, records, log in todo:
                with log.writing() as write:
                    for found in self._score(_batches(cell, records), self.options.jobs):
                        for entry in found:
                            write(asdict(entry))
                        line.update(len(found))

    def scored(self) -> dict[C, list[tuple[Record, Score]]]:
        """Return the answers of every complete cell with their scores."""
        found = {}
        for cell in self.complete():
            scores = self.remarks_of(cell)
            found[cell] = [(one, Score(**scores[self.key_of(one)])) for one in self.read(cell)]
        return found


def _batches(cell: Cell, records: Sequence[Record]) -> list[Batch]:
    """Return batches of similar length, which reduces padding."""
    ordered = sorted(records, key=lambda record: len(record.output_ids))
    some = (ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH))
    return [
        Batch(cell.temperature, [one.index for one in few], [one.output_ids for one in few])
        for few in some
    ]
