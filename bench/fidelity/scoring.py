"""Score each token of an answer by the plain models: no engine, no cache, float32.

p is the target's distribution of the next token and q the draft's, both at the temperature that
the answer was sampled at, given its prompt and the tokens before. EOS counts as a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from answers import Cell, Record, Reply, Study, grade, prompt_ids
from pair.task import held_out
from study import PAIR, digest

TEMPERATURES = (0.7, 1.0)
#: Decimal digits of a stored log-ratio.
DIGITS = 6


@dataclass(frozen=True)
class AnswerScores:
    """Sums over an answer's tokens by the plain models, in nats; l is log q/p.

    Under the target the tokens' terms of innovation and tilt have mean 0, given the tokens before.
    """

    log_p: float
    innovation: float  # log p + the entropy of p
    tilt: float  # l minus its mean under p
    information: float  # the variance of l under p
    log_ratios: list[float]  # l, token by token


@dataclass(frozen=True)
class ScoredAnswer(AnswerScores, Record):
    """A graded answer with its scores."""

    @property
    def tokens(self) -> int:
        return len(self.output_ids)


def score(
    prompt: Sequence[int], tokens: Sequence[int], temperature: float, models: Sequence[Any]
) -> AnswerScores:
    """Return the scores of an answer by the ``models`` target and draft."""
    import torch

    ids = torch.tensor([[*prompt, *tokens]])  # [1, L]
    own = slice(len(prompt) - 1, ids.shape[1] - 1)
    with torch.inference_mode():
        logits = [model(input_ids=ids).logits[0, own].double() for model in models]
    log_p, log_q = ((one / temperature).log_softmax(-1).numpy() for one in logits)  # [T, V]
    at = (np.arange(len(tokens)), np.asarray(tokens))
    p = np.exp(log_p)
    ratio = log_q - log_p
    mean = (p * ratio).sum(-1)
    return AnswerScores(
        log_p=float(log_p[at].sum()),
        innovation=float((log_p[at] - (p * log_p).sum(-1)).sum()),
        tilt=float((ratio[at] - mean).sum()),
        information=float((p * (ratio - mean[:, None]) ** 2).sum()),
        log_ratios=[round(value, DIGITS) for value in ratio[at].tolist()],
    )


@lru_cache(maxsize=1)
def load(*folders: Path) -> list[Any]:
    """Return the models of these folders in float32."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    torch.set_num_threads(1)  # the engine needs the other cores
    logging.disable_progress_bar()
    found = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders]
    return [model.eval() for model in found]


def scorer() -> dict[str, str]:
    """Return what scores depend on beside the answers and models."""
    return {"scorer": digest([Path(__file__)]), "transformers": version("transformers")}


C = TypeVar("C", bound=Cell)


class ScoredStudy(Study[C, ScoredAnswer]):
    """A study of answers that plain models score as they come."""

    kind = ScoredAnswer

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        temperatures = {"type": float, "nargs": "+", "default": list(TEMPERATURES)}
        made.add_argument("--temperatures", metavar="T", **temperatures)
        return made

    def identity(self, cell: C) -> dict[str, Any]:
        return super().identity(cell) | scorer()

    def stored(self, cell: C, reply: Reply, sample: int) -> ScoredAnswer:
        record = grade(reply)
        prompt = prompt_ids(held_out(record.index))
        pair = load(PAIR / "target", PAIR / "draft")
        scores = score(prompt, record.output_ids, cell.temperature, pair)
        return ScoredAnswer(**asdict(record), **asdict(scores))
