"""Provide the prompts of Spec-Bench, in turns by kind.

They are Apache-2.0, from github.com/hemingkx/Spec-Bench, `data/spec_bench/question.jsonl`, and not
part of the tree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from study import BenchError

#: Spec-Bench's categories, by the kind of text that they ask for.
KINDS = {
    "chat": ("writing", "roleplay", "reasoning", "stem", "humanities", "extraction"),
    "code": ("coding",),
    "maths": ("math_reasoning", "math"),
    "summaries": ("summarization",),
    "translation": ("translation",),
    "questions": ("qa",),
    "retrieval": ("rag",),
}
NAMES = tuple(KINDS)
#: Tokens; longer prompts, of summaries mostly, are left out: a CPU reads them for long.
LONGEST = 800
Row: TypeAlias = dict[str, Any]


class PromptSource(NamedTuple):
    """Name a published file of JSON lines."""

    name: str  # of the file in the cache of models
    sha256: str
    where: str

    def rows(self, path: Path) -> list[Row]:
        """Return the lines of the file at ``path``; raise BenchError unless it is this one."""
        content = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise BenchError(
                f"{path} is not there, or its SHA-256 is not {self.sha256}. Get {self.where}, and "
                "name it by --prompts."
            )
        return [json.loads(line) for line in content.splitlines()]


SPEC_BENCH = PromptSource(
    name="question.jsonl",
    sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    where="data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
)


def kind_of(index: int) -> str:
    """Return the kind of the prompt at this place of `prompts`."""
    return NAMES[index % len(NAMES)]


def prompts(path: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Return the tokens of ``count`` prompts, kinds in turn; raise BenchError if not there.

    They are first turns, in the model's chat template. The categories of a kind take turns, too.
    """
    return [_read(row, tokenizer) for row in _chosen(SPEC_BENCH.rows(path), tokenizer, count)]


def others(path: Path, tokenizer: Any, count: int) -> list[str]:
    """Return the first turns that `prompts` does not, and no longer, as text."""
    rows = SPEC_BENCH.rows(path)
    chosen = _chosen(rows, tokenizer, count)
    left = [row for row in rows if row not in chosen]
    return [row["turns"][0] for row in left if len(_read(row, tokenizer)) <= LONGEST]


def _chosen(rows: Sequence[Row], tokenizer: Any, count: int) -> list[Row]:
    turns = [_of_kind(kind, rows) for kind in KINDS.values()]
    found: list[Row] = []
    for index in range(count):
        fitting = (
            row for row in turns[index % len(turns)] if len(_read(row, tokenizer)) <= LONGEST
        )
        row = next(fitting, None)
        if row is None:
            raise BenchError(f"Spec-Bench has no {count} prompts, kinds in turn: ask for fewer.")
        found.append(row)
    return found


def _of_kind(categories: Sequence[str], rows: Sequence[Row]) -> Iterator[Row]:
    """Return an iterator over the rows of these categories, which take turns."""
    columns = [[row for row in rows if row["category"] == name] for name in categories]
    longest = max(map(len, columns))
    return iter([column[i] for i in range(longest) for column in columns if i < len(column)])


def _read(row: Row, tokenizer: Any) -> list[int]:
    chat = [{"role": "user", "content": row["turns"][0]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
