"""Prompts as they are given, and the texts that the target makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Text(NamedTuple):
    """Ids of a prompt and its answer, and how many of them are prompt."""

    ids: list[int]
    prompt: int


class Batch(NamedTuple):
    """Texts padded on the right, which causal attention does not see."""

    ids: torch.Tensor  # [B, L] int64
    prompts: torch.Tensor  # [B] int64: tokens of the prompt
    lengths: torch.Tensor  # [B] int64: tokens in all


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """The ids of each prompt.

    Args:
        path: ``.jsonl``, each line with ``prompt`` (a string that the target goes on with) or
            ``messages`` (chat messages that it answers); any other name: a prompt a line.
        tokenizer: the target's.

    Raises:
        ValueError: a file or line that holds none.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path}: there is no such file.")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {path} is empty; give a prompt a line.")
    if path.suffix != ".jsonl":
        return [tokenizer(line)["input_ids"] for line in lines]
    return [_prompt(path, number, line, tokenizer) for number, line in enumerate(lines, 1)]


def _prompt(path: Path, number: int, line: str, tokenizer: Any) -> list[int]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"--prompts {path}, line {number} is not JSON: {error}.") from error
    found = entry if isinstance(entry, dict) else {}
    if isinstance(found.get("prompt"), str):
        return tokenizer(found["prompt"])["input_ids"]
    if isinstance(found.get("messages"), list):
        if tokenizer.chat_template is None:
            raise ValueError(
                f"--prompts {path}, line {number} has messages, but the target's tokenizer has no "
                "chat template; give it as a prompt."
            )
        text = tokenizer.apply_chat_template(
            found["messages"], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    raise ValueError(
        f'--prompts {path}, line {number} has neither "prompt", a string, nor "messages", a list.'
    )


def write_texts(path: Path, texts: Sequence[Text], temperature: float) -> None:
    """A file for `read_texts`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"temperature": temperature}, *(text._asdict() for text in texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_texts(path: Path, temperature: float) -> list[Text]:
    """What `write_texts` wrote; raises ValueError where it was sampled at another temperature."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if head["temperature"] != temperature:
        raise ValueError(
            f"--texts {path} was sampled at temperature {head['temperature']}, and --temperature "
            f"is {temperature}; name another file, which is then written."
        )
    return [Text(**line) for line in lines]


def collate(texts: Sequence[Text], device: torch.device) -> Batch:
    """``texts`` as one batch."""
    length = max(len(text.ids) for text in texts)
    ids = torch.tensor([text.ids + [0] * (length - len(text.ids)) for text in texts])
    prompts = torch.tensor([text.prompt for text in texts])
    lengths = torch.tensor([len(text.ids) for text in texts])
    return Batch(ids.to(device), prompts.to(device), lengths.to(device))


def batches(
    texts: Sequence[Text], size: int, device: torch.device, rng: torch.Generator
) -> Iterator[Batch]:
    """Endless batches of ``size`` texts of like lengths, to spare padding; each text in turn."""
    by_length = sorted(texts, key=lambda text: len(text.ids))
    while True:
        # Which texts stand together differs between epochs, a little.
        shift = int(torch.randint(size, (), generator=rng))
        turned = by_length[shift:] + by_length[:shift]
        chunks = [turned[start : start + size] for start in range(0, len(turned), size)]
        for index in torch.randperm(len(chunks), generator=rng).tolist():
            yield collate(chunks[index], device)
