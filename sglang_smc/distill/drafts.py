"""The three kinds of drafts, as training sees them: logits of what they would draft."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from sglang_smc.distill import checkpoints
from sglang_smc.distill.head_config import kind_of, read_settings
from sglang_smc.distill.heads import DFlash, Eagle3
from sglang_smc.distill.layers import at_columns
from sglang_smc.distill.teacher import Lesson, Teacher, load_model, load_tokenizer


class Draft(Protocol):
    """A draft that learns."""

    @property
    def module(self) -> Any:
        """What is trained, in float32: a `torch.nn.Module`."""
        ...

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The target's layers whose outputs it reads."""
        ...

    @property
    def hot(self) -> torch.Tensor | None:
        """The target's ids of its tokens, ``[draft vocabulary]``; None where it drafts all."""
        ...

    @property
    def longest(self) -> int | None:
        """How many tokens it can draft behind an anchor; None: any number."""
        ...

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """``[B, A, depth, draft vocabulary]``: of the tokens behind each anchor, in turn.

        Args:
            teacher: the target.
            lesson: its batch; the tokens behind an anchor are what is taken to be drafted.
            anchors: ``[B, A]`` int64, positions of the last kept tokens, from 1 on.
            depth: 1 or more.
        """
        ...

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a checkpoint that SGLang loads."""
        ...


class ModelDraft(NamedTuple):
    """A causal language model; ``folder`` is where it came from."""

    module: Any
    folder: Path
    layer_ids: tuple[int, ...] = ()
    hot: torch.Tensor | None = None
    longest: int | None = None

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """As `Draft` says."""
        found = self.module(input_ids=lesson.batch.ids, use_cache=False).logits
        return behind(found, anchors, depth)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """As `Draft` says, with the tokenizer."""
        # A copy of the model and not of its weights: two that are tied stay one.
        deepcopy(self.module).to(dtype).save_pretrained(folder)
        load_tokenizer(self.folder).save_pretrained(folder)


class Eagle3Draft(NamedTuple):
    """An EAGLE-3 head."""

    module: Eagle3
    settings: dict[str, Any]
    longest: int | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """As `Draft` says."""
        return self.module.shape.layer_ids

    @property
    def hot(self) -> torch.Tensor | None:
        """As `Draft` says."""
        hot = self.module.hot
        return hot if len(hot) < self.module.shape.vocab_size else None

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """As `Draft` says."""
        return self.module(teacher.embed(lesson.batch.ids), lesson.features, anchors, depth)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """As `Draft` says."""
        checkpoints.save_head(self.module, self.settings, folder, dtype)


class DFlashDraft(NamedTuple):
    """A DFlash head."""

    module: DFlash
    settings: dict[str, Any]
    hot: torch.Tensor | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """As `Draft` says."""
        return self.module.shape.layer_ids

    @property
    def longest(self) -> int | None:
        """As `Draft` says."""
        return self.module.block_size - 1

    def logits(
        self, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """As `Draft` says; of fewer than all, the block's first."""
        token = teacher.embed(lesson.batch.ids.gather(1, anchors))
        mask = teacher.embed(anchors.new_full((), self.module.mask_token_id))
        states = self.module(token, mask, lesson.features, anchors)
        return teacher.head(states[:, :, :depth])

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """As `Draft` says."""
        checkpoints.save_head(self.module, self.settings, folder, dtype)


def load_draft(folder: Path, target: Path, device: torch.device) -> Draft:
    """The draft in ``folder``, of the kind that its config.json says, in float32.

    Raises:
        ValueError: there is none, or none for this target.
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
    """Give a new head what the target has for the same purpose: training is shorter.

    Its residual stream begins as the last state that it reads, and its output becomes logits as
    the target's does, with the same last norm and, of an EAGLE-3 head, the same LM head.
    """
    head = draft.module
    size = head.fc.weight.shape[0]
    head.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size, device=head.fc.weight.device)
    norm = dict(teacher.model.base_model.named_parameters()).get("norm.weight")
    if norm is not None:  # so it is called in Llama and what descends from it
        head.norm.weight.copy_(norm)
    if isinstance(head, Eagle3):
        head.lm_head.weight.copy_(teacher.model.get_output_embeddings().weight[head.hot])


def check_vocabulary(draft: Path, target: Path) -> None:
    """Raises ValueError where a draft model's ids are not the target's."""
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
    """``[B, A, depth, V]``: of ``rows`` ``[B, L, V]`` those from each anchor on, the last again."""
    steps = torch.arange(depth, device=anchors.device)
    columns = (anchors.unsqueeze(2) + steps).clamp_max(rows.shape[1] - 1)  # [B, A, depth]
    return at_columns(rows, columns.flatten(1)).unflatten(1, (-1, depth))


class Blocks(NamedTuple):
    """Behind each anchor, ``depth`` columns: log laws, and the target's own tokens."""

    log_p: torch.Tensor  # [B, A, depth, V] float32
    log_q: torch.Tensor  # [B, A, depth, V] float32; -inf where q drafts nothing
    tokens: torch.Tensor  # [B, A, depth] int64, drawn from p
    counted: torch.Tensor  # [B, A, depth] bool: the token is one of the answer


def compare(
    draft: Draft, teacher: Teacher, lesson: Lesson, anchors: torch.Tensor, depth: int
) -> Blocks:
    """Both laws behind ``anchors`` ``[B, A]`` int64, each at the teacher's temperature."""
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
    """For training: p, too, on the tokens ``hot`` that q can draft, made to sum to 1."""
    if hot is None:
        return blocks
    return blocks._replace(log_p=blocks.log_p[..., hot].log_softmax(-1))


def of_all(blocks: Blocks, hot: torch.Tensor | None) -> Blocks:
    """For measuring: q, too, on all tokens."""
    if hot is None:
        return blocks
    log_q = torch.full_like(blocks.log_p, float("-inf"))
    log_q[..., hot] = blocks.log_q
    return blocks._replace(log_q=log_q)
