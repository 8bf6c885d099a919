"""Provide pairs of trained models with real prompts, whose answers have lengths of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from answers import MAX_TOKENS, prompt_ids
from pair.task import held_out
from speed.grid import DRAFT, HEAD, TARGET
from study import PAIR, PUBLISHED, whole_lines

from sglang_smc.options.request import Budget

TEMPERATURE = 0.7
#: Held-out problems beyond those of other benchmarks.
FIRST_PROBLEM = 4_000_000
#: Of the mixture's texts, which have no end: tokens of the pieces that it goes on with, and the
#: answers whose lengths its own take.
CONTEXT = 64
LENGTHS = PUBLISHED / "gsm8k" / "answers" / "coder-exact-t0.7.jsonl"
TRAINING_STEPS = 300


class Question(NamedTuple):
    """A prompt in tokens, and what is asked besides it."""

    prompt: list[int]
    params: dict[str, Any]


class ModelFolders(NamedTuple):
    """The folders of a target and of its draft."""

    target: Path
    draft: Path


class ServedPair(NamedTuple):
    """ModelFolders, prompts for them, and what is measured.

    Attributes:
        models: returns the checkpoints, which it may make in a folder.
        questions: returns so many of a seed, with the folder of the models.
        users: that ask at once, each ``per_user`` times.
        grid: fixed settings.
        seconds: the most that a cell of two servers takes.
    """

    name: str
    title: str
    models: Callable[[Path], ModelFolders]
    questions: Callable[[Path, str, int], list[Question]]
    users: tuple[int, ...]
    grid: tuple[Budget, ...]
    seconds: float
    per_user: int = 2


# --- The shipped pair: word problems


def _shipped(draft: str) -> Callable[[Path], ModelFolders]:
    return lambda _: ModelFolders(PAIR / TARGET, PAIR / draft)


def _problems(_: Path, seed: str, count: int) -> list[Question]:
    draw = random.Random(seed)
    items = [held_out(FIRST_PROBLEM + draw.randrange(1_000_000)) for _ in range(count)]
    return [Question(prompt_ids(item), {"max_new_tokens": MAX_TOKENS}) for item in items]


# --- The coder pair of `make real-models`: problems of GSM8K


def _coder(_: Path) -> ModelFolders:
    from sglang_smc_tools.real.models import checkpoint

    return ModelFolders(checkpoint("coder-1.5b"), checkpoint("coder-0.5b"))


def _gsm8k(_: Path, seed: str, count: int) -> list[Question]:
    from gsm8k.run import problem_ids

    chosen = random.Random(seed).choices(_gsm8k_rows(), k=count)
    params = {"max_new_tokens": MAX_TOKENS}
    return [Question(problem_ids("coder-1.5b", row["question"]), params) for row in chosen]


@lru_cache
def _gsm8k_rows() -> Sequence[dict[str, Any]]:
    from gsm8k.run import GSM8K

    from sglang_smc_tools.real.models import CACHE

    return GSM8K.rows(CACHE / GSM8K.name)


# --- The tiny mixture of `bench/experts`: Python's standard library


def _mixture(models: Path) -> ModelFolders:
    """Train the mixture and its dense draft, unless that is done."""
    found = ModelFolders(models / "mixture" / TARGET, models / "mixture" / DRAFT)
    if not (found.draft / "model.safetensors").exists():
        from dummies import word_tokenizer
        from experts import models as made  # imports torch

        texts = made.texts()
        for model, folder in ((made.mixture(), found.target), (made.dense(), found.draft)):
            made.train(model, texts.train, TRAINING_STEPS, f"the mixture's {folder.name}")
            word_tokenizer(made.VOCAB).save_pretrained(folder)
            (folder / "texts.json").write_text(json.dumps(texts.held_out.tolist()))
            model.bfloat16().save_pretrained(folder)
    return found


def _library(models: Path, seed: str, count: int) -> list[Question]:
    draw = random.Random(seed)
    texts = _held_out(models / "mixture" / TARGET / "texts.json")
    starts = [draw.randrange(len(texts) - CONTEXT) for _ in range(count)]
    lengths = draw.choices(_lengths(), k=count)
    return [
        Question(texts[at : at + CONTEXT], {"max_new_tokens": length, "ignore_eos": True})
        for at, length in zip(starts, lengths, strict=True)
    ]


@lru_cache
def _held_out(path: Path) -> list[int]:
    return json.loads(path.read_text())


@lru_cache
def _lengths() -> Sequence[int]:
    _, *entries = whole_lines(LENGTHS)
    return [one["info"]["completion_tokens"] for one in entries]


USERS = (1, 4, 8, 16, 32)
GRID = tuple(Budget(*sizes) for sizes in ((1, 4), (1, 8), (4, 8), (8, 8), (4, 16)))
OF_EXPERTS = tuple(Budget(*sizes) for sizes in ((1, 2), (1, 4), (2, 4), (4, 4)))
OF_CODER = tuple(Budget(*sizes) for sizes in ((1, 4), (4, 4), (4, 8), (8, 8)))
PAIRS = (
    ServedPair("head", "shipped EAGLE-3 head", _shipped(HEAD), _problems, USERS, GRID, 70.0),
    ServedPair("model", "shipped draft model", _shipped(DRAFT), _problems, USERS, GRID, 70.0),
    ServedPair("coder", "Qwen2.5-Coder 1.5B + 0.5B", _coder, _gsm8k, (1, 4, 8), OF_CODER, 240.0, 1),
    ServedPair("mixture", "tiny mixture", _mixture, _library, USERS, OF_EXPERTS, 70.0),
)
