"""Read prompts, and store the texts that the target samples from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Text(NamedTuple):
    """Token ids of a prompt and its answer, and the prompt's length."""

    ids: list[int]
    prompt: int


class Batch(NamedTuple):
    """Texts padded on the right, which causal attention ignores."""

    ids: torch.Tensor  # [B, L] int64
    prompts: torch.Tensor  # [B] int64: prompt lengths
    lengths: torch.Tensor  # [B] int64: total lengths


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each prompt.

    Args:
        path: ``.jsonl``, each line with ``prompt`` (a string to continue) or
            ``messages`` (a chat to answer); any other suffix: one prompt per line.
        tokenizer: the target's.

    Raises:
        ValueError: the file or a line has no prompt.
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
    """Write texts to a file for `read_texts`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"temperature": temperature}, *(text._asdict() for text in texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_texts(path: Path, temperature: float) -> list[Text]:
    """Read texts of `write_texts`; raise ValueError if they have another temperature."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if head["temperature"] != temperature:
        raise ValueError(
            f"--texts {path} was sampled at temperature {head['temperature']}, and --temperature "
            f"is {temperature}; name another file, which is then written."
        )
    return [Text(**line) for line in lines]


def collate(texts: Sequence[Text], device: torch.device) -> Batch:
    """Return ``texts`` as one padded batch."""
    length = max(len(text.ids) for text in texts)
    ids = torch.tensor([text.ids + [0] * (length - len(text.ids)) for text in texts])
    prompts = torch.tensor([text.prompt for text in texts])
    lengths = torch.tensor([len(text.ids) for text in texts])
    return Batch(ids.to(device), prompts.to(device), lengths.to(device))


def batches(
    texts: Sequence[Text], size: int, device: torch.device, rng: torch.Generator
) -> Iterator[Batch]:
    """Yield endless batches of ``size`` texts of similar lengths, which reduces padding."""
    by_length = sorted(texts, key=lambda text: len(text.ids))
    while True:
        # The grouping varies a little between epochs.
        shift = int(torch.randint(size, (), generator=rng))
        turned = by_length[shift:] + by_length[:shift]
        chunks = [turned[start : start + size] for start in range(0, len(turned), size)]
        for index in torch.randperm(len(chunks), generator=rng).tolist():
            yield collate(chunks[index], device)
