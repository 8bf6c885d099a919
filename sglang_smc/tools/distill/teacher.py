"""Run the target as a teacher: answers, distributions, hidden states, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

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


class Sampling(NamedTuple):
    """Sampling settings: ``batch`` at a time, up to ``max_new_tokens`` or a token of ``ends``."""

    temperature: float
    max_new_tokens: int
    batch: int
    ends: frozenset[int]


def sample_answers(
    target: Any, prompts: Sequence[list[int]], settings: Sampling, rng: torch.Generator
) -> list[Text]:
    """Sample an answer to each prompt, in their order; ``rng`` is on the target's device."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found: list[Text | None] = [None] * len(prompts)
    with tqdm(total=len(prompts), desc="sampling", unit="text", mininterval=2) as bar:
        for start in range(0, len(order), settings.batch):
            chunk = order[start : start + settings.batch]
            texts = _answer(target, [prompts[place] for place in chunk], settings, rng)
            for place, text in zip(chunk, texts, strict=True):
                found[place] = text
            bar.update(len(chunk))
    return [text for text in found if text is not None]


@torch.no_grad()
def _answer(
    target: Any, prompts: list[list[int]], settings: Sampling, rng: torch.Generator
) -> list[Text]:
    """Sample one batch; rows that have ended leave it once they are half of all."""
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # indices of the answers that have a cache row
    cache = DynamicCache(config=target.config)
    length = max(map(len, prompts))
    padded = [[0] * (length - len(prompt)) + prompt for prompt in prompts]
    kept = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    unread = torch.tensor(padded, device=target.device)  # [B, T] int64
    mask = torch.tensor(kept, device=target.device)  # [B, L] int64: 0 on padding

    def goes_on(row: int) -> bool:
        return not answers[row] or answers[row][-1] not in settings.ends

    for _ in range(settings.max_new_tokens):
        logits = target(
            input_ids=unread,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0)[:, -unread.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        law = (logits.float() / settings.temperature).softmax(-1)
        unread = torch.multinomial(law, 1, generator=rng)  # [B, 1]
        mask = torch.cat([mask, torch.ones_like(unread)], 1)
        for row, token in zip(rows, unread[:, 0].tolist(), strict=True):
            if goes_on(row):
                answers[row].append(token)
        going = [place for place, row in enumerate(rows) if goes_on(row)]
        if not going:
            break
        if len(going) <= len(rows) // 2:
            places = torch.tensor(going, device=mask.device)
            cache.batch_select_indices(places)
            mask, unread = mask[places], unread[places]
            rows = [rows[place] for place in going]
    pairs = zip(prompts, answers, strict=True)
    return [Text(prompt + answer, len(prompt)) for prompt, answer in pairs]
