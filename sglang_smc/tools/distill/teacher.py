"""Run the target as a teacher: answers, distributions, hidden states, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sglang_smc.tools.distill.checkpoints import target_config
from sglang_smc.tools.distill.texts import Batch, Text


class Lesson(NamedTuple):
    """The target's outputs on a batch."""

    batch: Batch
    log_p: torch.Tensor  # [B, L, V] float32: of the next token at each position
    features: torch.Tensor  # [B, L, layers * D]: hidden states of ``layer_ids``


class Teacher:
    """A target at a temperature, with frozen weights."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model, self.temperature = model.eval().requires_grad_(False), temperature

    @torch.no_grad()
    def teach(self, batch: Batch, layer_ids: tuple[int, ...]) -> Lesson:
        """Run the target on ``batch``; features are hidden states of ``layer_ids``, from 0 on."""
        found = self.model(
            input_ids=batch.ids, output_hidden_states=bool(layer_ids), use_cache=False
        )
        log_p = (found.logits.float() / self.temperature).log_softmax(-1)
        # hidden_states[0] is the embedding.
        states = [found.hidden_states[layer + 1].float() for layer in layer_ids]
        none = log_p.new_zeros(*batch.ids.shape, 0)
        return Lesson(batch, log_p, torch.cat(states, -1) if states else none)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[..., D]`` float32 of ``ids`` ``[...]`` int64."""
        return self.model.get_input_embeddings()(ids).float()

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[..., V]`` of normed states ``[..., D]``; gradients flow through."""
        return self.model.get_output_embeddings()(states.to(self.model.dtype))


def load_model(folder: str | Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    """Load a causal language model with transformers; raise ValueError if it cannot be loaded."""
    target_config(folder)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    return model.to(device)


def load_tokenizer(folder: str | Path) -> Any:
    """Load a tokenizer with transformers; raise ValueError if it cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no tokenizer, which prompts need: {error}") from error


@torch.no_grad()
def sample_answers(
    target: Any,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    batch: int,
    ends: frozenset[int],
) -> list[Text]:
    """Sample an answer to each prompt from the target's own distribution, in their order.

    By torch's global generator, ``batch`` at a time, each up to a token of ``ends``.
    """
    target.generation_config = GenerationConfig()  # of a checkpoint: its filters and penalties
    settings = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
    )
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found = dict.fromkeys(range(len(prompts)), Text([], 0))
    for start in tqdm(range(0, len(order), batch), desc="sampling", unit="batch", mininterval=2):
        chunk = order[start : start + batch]
        length = len(prompts[chunk[-1]])
        ids = [[0] * (length - len(prompts[place])) + prompts[place] for place in chunk]
        read = [[0] * (length - len(prompts[place])) + [1] * len(prompts[place]) for place in chunk]
        told = target.generate(
            input_ids=torch.tensor(ids, device=target.device),
            attention_mask=torch.tensor(read, device=target.device),
            generation_config=settings,
        )
        for place, row in zip(chunk, told[:, length:].tolist(), strict=True):
            end = next((count for count, token in enumerate(row, 1) if token in ends), len(row))
            found[place] = Text(prompts[place] + row[:end], len(prompts[place]))
    return list(found.values())
