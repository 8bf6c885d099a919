"""Score each token of an answer by the plain models: no engine, no cache, float32.

p is the target's distribution of the next token and q the draft's, both at the temperature that
the answer was sampled at, given its prompt and the tokens before. EOS counts as a token.
"""

from __future__ import annotations

import argparse
import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from answers import AnswersStudy, Cell, Record, Remarks, Start, Todo, prompt_ids
from study import PAIR, Log, bar, digest, in_processes, positive

from sglang_smc.cpu.threads import usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEMPERATURES = (0.7, 1.0)
#: Number of answers in a forward pass.
BATCH = 32
#: Decimal digits of a stored log-ratio.
DIGITS = 6


class TokenStatistics(NamedTuple):
    """Statistics per token, each ``[T]`` float64; l is log q/p.

    Under the target the second and fourth have mean 0 at every token, given the tokens before, and
    the third and fifth are their variances.
    """

    log_p: np.ndarray
    innovation: np.ndarray  # log p + the entropy of p
    variance: np.ndarray  # of log p, under p
    tilt: np.ndarray  # l minus its mean under p
    information: np.ndarray  # the variance of l under p
    log_ratio: np.ndarray  # l


def token_statistics(log_p: np.ndarray, log_q: np.ndarray, tokens: np.ndarray) -> TokenStatistics:
    """Return the statistics of tokens ``[T]`` under both distributions."""
    at, p = np.arange(len(tokens)), np.exp(log_p)
    ratio = log_q - log_p
    mean_log, mean_ratio = (p * log_p).sum(-1), (p * ratio).sum(-1)
    return TokenStatistics(
        log_p=log_p[at, tokens],
        innovation=log_p[at, tokens] - mean_log,
        variance=(p * (log_p - mean_log[:, None]) ** 2).sum(-1),
        tilt=ratio[at, tokens] - mean_ratio,
        information=(p * (ratio - mean_ratio[:, None]) ** 2).sum(-1),
        log_ratio=ratio[at, tokens],
    )


@dataclass(frozen=True)
class Score:
    """An answer's score by the plain models: sums over its tokens, in nats."""

    index: int
    answer: int  # `answer_key` of the scored tokens
    tokens: int
    log_p: float
    innovation: float
    variance: float
    tilt: float
    information: float
    log_ratios: list[float]  # log q/p, token by token


def score_of(index: int, tokens: Sequence[int], found: TokenStatistics) -> Score:
    """Sum an answer's token statistics."""
    *sums, log_ratio = found
    return Score(
        index,
        answer_key(tokens),
        len(tokens),
        *(float(values.sum()) for values in sums),
        log_ratios=[round(value, DIGITS) for value in log_ratio.tolist()],
    )


def answer_key(tokens: Sequence[int]) -> int:
    """Return a checksum that distinguishes answers to the same problem."""
    return zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes())


def score_answers(
    pair: Sequence[PreTrainedModel],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    temperature: float,
) -> list[TokenStatistics]:
    """Score answers behind their prompts in one batch by ``pair``: the target and the draft."""
    import torch

    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    # Padding follows a text, where causal attention ignores it.
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])  # [B, L]
    with torch.inference_mode():
        logits = [model(input_ids=ids).logits for model in pair]  # [B, L, V] each
    found = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        own = slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        log_p, log_q = (
            (x[row, own].double() / temperature).log_softmax(-1).numpy() for x in logits
        )
        found.append(token_statistics(log_p, log_q, np.array(answer)))
    return found


# --- The answers of cells, in processes


class Batch(NamedTuple):
    """Answers of one cell; ``place`` is the cell's index."""

    place: int
    temperature: float
    indices: list[int]
    answers: list[list[int]]


#: Scores batches with so many processes; yields (place of the cell, scores) in any order.
Scorer = Callable[[Sequence[Batch], int], Iterator[tuple[int, list[Score]]]]


def by_processes(batches: Sequence[Batch], jobs: int) -> Iterator[tuple[int, list[Score]]]:
    """Score batches by the plain models, in processes."""
    return in_processes(_score_batch, batches, jobs)


def _score_batch(batch: Batch) -> tuple[int, list[Score]]:
    models, tokenizer = load()
    prompts = [prompt_ids(tokenizer, index) for index in batch.indices]
    found = score_answers(models, prompts, batch.answers, batch.temperature)
    each = zip(batch.indices, batch.answers, found, strict=True)
    return batch.place, [score_of(*one) for one in each]


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


class ScoredStudy(AnswersStudy[C, Record]):
    """A study of answers that plain models score.

    Args:
        score: scores batches of answers.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        start: Start | None = None,
        score: Scorer = by_processes,
    ) -> None:
        self._score = score
        super().__init__(options, start)

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        add = made.add_argument
        add("--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T")
        add("--jobs", type=positive, default=usable_cores(), help="processes that score answers")
        return made

    def remarks_on(self, cell: C) -> Remarks[Record]:
        identity = {
            **self.identity(cell),
            "scorer": digest([Path(__file__)]),
            "transformers": version("transformers"),
        }
        log = Log(self.path("scores", cell), identity)
        return Remarks(log, ("index", "answer"), key_of)

    def evaluate(self, todo: Todo) -> None:
        score_cells(todo, self._score, self.options.jobs)

    def scored(self) -> dict[C, list[tuple[Record, Score]]]:
        """Return the answers of every complete cell with their scores."""
        found = {}
        for cell in self.complete():
            scores = self.remarks[cell].read()
            records = self.answers[cell].read()
            found[cell] = [(one, Score(**scores[key_of(one)])) for one in records]
        return found


def key_of(record: Record) -> tuple[int, int]:
    """Return what distinguishes an answer from others: its problem, and its tokens' checksum."""
    return record.index, answer_key(record.output_ids)


def score_cells(todo: Todo, score: Scorer, jobs: int) -> None:
    """Score these answers, with a progress bar."""
    batches = [
        batch
        for place, (cell, records, _) in enumerate(todo)
        for batch in _batches(place, cell, records)
    ]
    if not batches:
        return
    total = sum(len(batch.indices) for batch in batches)
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(bar(total=total, desc="scoring", unit="answer"))
        places = {batch.place for batch in batches}
        write = {place: stack.enter_context(todo[place][2].log.writing()) for place in places}
        for place, found in score(batches, jobs):
            for entry in found:
                write[place](asdict(entry))
            line.update(len(found))


def _batches(place: int, cell: Cell, records: list[Record]) -> Iterator[Batch]:
    """Yield batches of similar length, which reduces padding."""
    records = sorted(records, key=lambda record: len(record.output_ids))
    for start in range(0, len(records), BATCH):
        some = records[start : start + BATCH]
        indices, answers = [r.index for r in some], [r.output_ids for r in some]
        yield Batch(place, cell.temperature, indices, answers)
