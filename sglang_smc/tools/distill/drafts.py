"""Compute the logits of the three kinds of drafts for training."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from sglang_smc.tools.distill import checkpoints
from sglang_smc.tools.distill.head_config import kind_of, read_settings
from sglang_smc.tools.distill.heads import DFlash, Eagle3
from sglang_smc.tools.distill.layers import at_columns
from sglang_smc.tools.distill.teacher import Lesson, Teacher, load_model, load_tokenizer


class Draft(Protocol):
    """A trainable draft."""

    @property
    def module(self) -> Any:
        """Return the trained `torch.nn.Module`, in float32."""
        ...

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Return the target's layers that the draft reads hidden states of."""
        ...

    @property
    def hot(self) -> torch.Tensor | None:
        """Return the target's ids of its tokens, ``[draft vocabulary]``; None if it drafts all."""
        ...

    @property
    def longest(self) -> int | None:
        """Return how many tokens it can draft behind an anchor; None for any number."""
        ...

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Return the logits ``[B, A, depth, draft vocabulary]`` of the tokens behind each anchor.

        Args:
            teacher: the target.
            lesson: its batch; the tokens behind an anchor stand in for the drafted ones.
            anchors: ``[B, A]`` int64, positions of the last kept tokens, from 1 on.
            depth: 1 or more.
        """
        ...

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a checkpoint that SGLang loads."""
        ...


class ModelDraft(NamedTuple):
    """A causal language model, loaded from ``folder``."""

    module: Any
    folder: Path
    layer_ids: tuple[int, ...] = ()
    hot: torch.Tensor | None = None
    longest: int | None = None

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Return the logits, see `Draft.logits`."""
        found = self.module(input_ids=lesson.batch.ids, use_cache=False).logits
        return behind(found, anchors, depth)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the model and its tokenizer, see `Draft.save`."""
        # Copy the model as a whole, so that tied weights stay tied.
        deepcopy(self.module).to(dtype).save_pretrained(folder)
        load_tokenizer(self.folder).save_pretrained(folder)


class Eagle3Draft(NamedTuple):
    """An EAGLE-3 head."""

    module: Eagle3
    settings: dict[str, Any]
    longest: int | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Return the target's layers that the head reads."""
        return self.module.shape.layer_ids

    @property
    def hot(self) -> torch.Tensor | None:
        """Return the target's ids of the head's tokens; None if it drafts all."""
        hot = self.module.hot
        return hot if len(hot) < self.module.shape.vocab_size else None

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Return the logits, see `Draft.logits`."""
        return self.module(teacher.embed(lesson.batch.ids), lesson.features, anchors, depth)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the head, see `Draft.save`."""
        checkpoints.save_head(self.module, self.settings, folder, dtype)


class DFlashDraft(NamedTuple):
    """A DFlash head."""

    module: DFlash
    settings: dict[str, Any]
    hot: torch.Tensor | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Return the target's layers that the head reads."""
        return self.module.shape.layer_ids

    @property
    def longest(self) -> int | None:
        """Return the block's number of drafted tokens."""
        return self.module.block_size - 1

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Return the logits of the block's first ``depth`` tokens, see `Draft.logits`."""
        token = teacher.embed(lesson.batch.ids.gather(1, anchors))
        mask = teacher.embed(anchors.new_full((), self.module.mask_token_id))
        states = self.module(token, mask, lesson.features, anchors)
        return teacher.head(states[:, :, :depth])

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the head, see `Draft.save`."""
        checkpoints.save_head(self.module, self.settings, folder, dtype)


def load_draft(folder: Path, target: Path, device: torch.device) -> Draft:
    """Return the draft in ``folder`` in float32, of the kind given by its config.json.

    Raises:
        ValueError: ``folder`` has no draft, or one that does not fit this target.
    """
    kind = kind_of(folder)
    settings = read_settings(folder)
    if kind == "eagle3":
        return Eagle3Draft(checkpoints.load_eagle3(folder, target).to(device), settings)
    if kind == "dflash":
        return DFlashDraft(checkpoints.load_dflash(folder, target).to(device), settings)
    model = load_model(folder, torch.float32, device)
    check_vocabulary(folder, target)
    return ModelDraft(model, folder)


@torch.no_grad()
def begin_as_target(draft: Draft, teacher: Teacher) -> None:
    """Initialise a new head from the target's weights, which shortens training.

    Its residual stream begins as the last hidden state that it reads, and its output becomes
    logits as the target's does, with the same last norm and, for an EAGLE-3 head, the same LM
    head.
    """
    head = draft.module
    size = head.fc.weight.shape[0]
    head.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size, device=head.fc.weight.device)
    norm = dict(teacher.model.base_model.named_parameters()).get("norm.weight")
    if norm is not None:  # its name in Llama and models derived from it
        head.norm.weight.copy_(norm)
    if isinstance(head, Eagle3):
        head.lm_head.weight.copy_(teacher.model.get_output_embeddings().weight[head.hot])


def check_vocabulary(draft: Path, target: Path) -> None:
    """Raise ValueError unless a draft model has the target's vocabulary."""
    theirs, ours = read_settings(target), read_settings(draft)
    sizes = ours.get("vocab_size"), theirs.get("vocab_size")
    words = load_tokenizer(draft).get_vocab(), load_tokenizer(target).get_vocab()
    if sizes[0] != sizes[1] or words[0] != words[1]:
        differing = len(words[0].items() ^ words[1].items())
        raise ValueError(
            f"--draft {draft} has another vocabulary than the target: vocab_size {sizes[0]} and "
            f"{sizes[1]}, {differing} tokens that are not in both with one id. Give a draft of the "
            "target's family, or a head: --new eagle3 or --new dflash."
        )


def behind(rows: torch.Tensor, anchors: torch.Tensor, depth: int) -> torch.Tensor:
    """Return ``rows`` ``[B, L, V]`` from each anchor: ``[B, A, depth, V]``, the last repeated."""
    steps = torch.arange(depth, device=anchors.device)
    columns = (anchors.unsqueeze(2) + steps).clamp_max(rows.shape[1] - 1)  # [B, A, depth]
    return at_columns(rows, columns.flatten(1)).unflatten(1, (-1, depth))


class Blocks(NamedTuple):
    """``depth`` columns behind each anchor: log-distributions, and the target's own tokens."""

    log_p: torch.Tensor  # [B, A, depth, V] float32
    log_q: torch.Tensor  # [B, A, depth, V] float32; -inf for tokens that q cannot draft
    tokens: torch.Tensor  # [B, A, depth] int64, drawn from p
    counted: torch.Tensor  # [B, A, depth] bool: the token belongs to the answer


def compare(
    draft: Draft, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
) -> Blocks:
    """Compute p and q behind ``anchors`` ``[B, A]`` int64, at the teacher's temperature."""
    batch = lesson.batch
    logits = draft.logits(teacher, lesson, anchors, depth)
    log_q = (logits.float() / teacher.temperature).log_softmax(-1)
    columns = anchors.unsqueeze(2) + torch.arange(depth, device=anchors.device)
    last = batch.ids.shape[1] - 1
    tokens = batch.ids.gather(1, (columns + 1).clamp_max(last).flatten(1)).view_as(columns)
    inside = columns + 1 < batch.lengths[:, None, None]
    counted = inside & (columns + 1 >= batch.prompts[:, None, None])
    return Blocks(behind(lesson.log_p, anchors, depth), log_q, tokens, counted)


def of_hot(blocks: Blocks, hot: torch.Tensor | None) -> Blocks:
    """Return blocks for training: p restricted to the tokens ``hot`` of q, renormalized."""
    if hot is None:
        return blocks
    return blocks._replace(log_p=blocks.log_p[..., hot].log_softmax(-1))


def of_all(blocks: Blocks, hot: torch.Tensor | None) -> Blocks:
    """Return blocks for measuring: q extended to all tokens."""
    if hot is None:
        return blocks
    log_q = torch.full_like(blocks.log_p, float("-inf"))
    log_q[..., hot] = blocks.log_q
    return blocks._replace(log_q=log_q)
