"""Compute the logits of the kinds of drafts for training, beside the target's."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_smc_tools.distill.checkpoints import kind_of, load_head, save_head
from sglang_smc_tools.distill.heads import MTP, DFlash, DSpark, Eagle3, Head, at_columns
from sglang_smc_tools.distill.teacher import Lesson, Teacher, load_model, load_tokenizer
from sglang_smc_tools.plan.shapes import contents


class TrainableDraft:
    """A trainable draft, loaded from ``folder``: a causal language model, or a head."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.module = module  # in float32
        self.folder = folder
        # Of the target, whose hidden states the draft reads; none for a model.
        self.layer_ids = module.layer_ids if isinstance(module, Head) else ()
        # The longest block; None for any. The target's ids of the drafted tokens; None for all.
        is_block = isinstance(module, DFlash)
        self.longest = module.block_size - module.first if is_block else None
        self.hot = module.hot if isinstance(module, Eagle3) and module.is_hot else None

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
        ids = lesson.batch.ids
        if isinstance(self.module, Eagle3):
            return self.module(teacher.embed(ids), lesson.features, anchors, depth)
        if isinstance(self.module, MTP):
            return teacher.head(self.module(teacher.embed(ids), lesson.features, anchors, depth))
        if isinstance(self.module, DFlash):
            mask = teacher.embed(anchors.new_full((), self.module.mask_token_id))
            tokens = teacher.embed(ids.gather(1, anchors))
            states = self.module(tokens, mask, lesson.features, anchors)
            logits = teacher.head(states[:, :, :depth])
            if isinstance(self.module, DSpark):
                logits = logits + self.module.bias(following(ids, anchors, depth))
            return logits
        return behind(self.module(input_ids=ids, use_cache=False).logits, anchors, depth)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a checkpoint that SGLang loads."""
        if isinstance(self.module, Head):
            save_head(self.module, folder, dtype)
            return
        # Copy the model as a whole, so that tied weights stay tied.
        deepcopy(self.module).to(dtype).save_pretrained(folder)
        load_tokenizer(self.folder).save_pretrained(folder)


def load_draft(folder: Path, target: Path, device: torch.device) -> TrainableDraft:
    """Return the draft in ``folder`` in float32, of the kind given by its config.json.

    Raises ValueError if ``folder`` has no draft, or one that does not fit this target.
    """
    if kind_of(folder) != "model":
        return TrainableDraft(load_head(folder, target).to(device), folder)
    model = load_model(folder, torch.float32, device)
    check_vocabulary(folder, target)
    return TrainableDraft(model, folder)


@torch.no_grad()
def begin_as_target(draft: TrainableDraft, teacher: Teacher) -> None:
    """Initialise a new head from the target's weights, which shortens training.

    Its residual stream begins as the last hidden state that it reads. Its output becomes logits as
    the target's does: with the same last norm, which an MTP layer's state has had before, and for
    an EAGLE-3 head with the same LM head.
    """
    head = draft.module
    size = draft.module.config.hidden_size
    is_mtp = isinstance(head, MTP)
    weight = head.layer.input_proj.weight if is_mtp else head.fc.weight
    own = slice(size) if is_mtp else slice(-size, None)
    weight.mul_(0.1)[:, own] += torch.eye(size, device=weight.device)
    if is_mtp:
        return
    norm = dict(teacher.model.base_model.named_parameters()).get("norm.weight")
    if norm is not None:  # its name in Llama and models derived from it
        head.norm.weight.copy_(norm)
    if isinstance(head, DSpark):
        added: Any = head.markov_head["markov_w2"]
        added.weight.zero_()
    if isinstance(head, Eagle3):
        head.lm_head.weight.copy_(teacher.model.get_output_embeddings().weight[head.hot])


def check_vocabulary(draft: Path, target: Path) -> None:
    """Raise ValueError unless a draft model has the target's vocabulary."""
    sizes = [contents(folder).get("vocab_size") for folder in (draft, target)]
    words = [load_tokenizer(folder).get_vocab() for folder in (draft, target)]
    if sizes[0] != sizes[1] or words[0] != words[1]:
        differing = len(words[0].items() ^ words[1].items())
        raise ValueError(
            f"--draft {draft} has another vocabulary than the target: vocab_size {sizes[0]} and "
            f"{sizes[1]}, {differing} tokens that are not in both with one id. Give a draft of the "
            "target's family, or a head: --new eagle3 or --new dspark."
        )


def behind(rows: torch.Tensor, anchors: torch.Tensor, depth: int) -> torch.Tensor:
    """Return ``rows`` ``[B, L, V]`` from each anchor: ``[B, A, depth, V]``, the last repeated."""
    steps = torch.arange(depth, device=anchors.device)
    columns = (anchors.unsqueeze(2) + steps).clamp_max(rows.shape[1] - 1)  # [B, A, depth]
    return at_columns(rows, columns.flatten(1)).unflatten(1, (-1, depth))


def following(ids: torch.Tensor, anchors: torch.Tensor, depth: int) -> torch.Tensor:
    """Return the tokens ``[B, A, depth]`` of ``ids`` ``[B, L]`` from each anchor on."""
    places = anchors.unsqueeze(2) + torch.arange(depth, device=anchors.device)
    places = places.clamp_max(ids.shape[1] - 1)
    return ids.gather(1, places.flatten(1)).view_as(places)


class DraftBlocks(NamedTuple):
    """``depth`` columns behind each anchor: log-distributions, and the target's own tokens."""

    log_p: torch.Tensor  # [B, A, depth, V] float32
    log_q: torch.Tensor  # [B, A, depth, V] float32; -inf for tokens that q cannot draft
    tokens: torch.Tensor  # [B, A, depth] int64, drawn from p
    counted: torch.Tensor  # [B, A, depth] bool: the token belongs to the answer

    def on_hot(self, hot: torch.Tensor | None) -> DraftBlocks:
        """Return blocks with p restricted to the tokens ``hot`` of q, renormalized."""
        if hot is None:
            return self
        return self._replace(log_p=self.log_p[..., hot].log_softmax(-1))

    def on_all(self, hot: torch.Tensor | None) -> DraftBlocks:
        """Return blocks for measuring: q extended to all tokens."""
        if hot is None:
            return self
        log_q = torch.full_like(self.log_p, float("-inf"))
        log_q[..., hot] = self.log_q
        return self._replace(log_q=log_q)


def compare(
    draft: TrainableDraft,
    teacher: Teacher,
    lesson: Lesson,
    anchors: torch.Tensor,
    depth: int,
    hot: torch.Tensor | None = None,
) -> DraftBlocks:
    """Compute p and q behind ``anchors`` ``[B, A]`` int64, at the teacher's temperature.

    With ``hot``, ids of tokens, p is restricted to them and renormalized.
    """
    batch = lesson.batch
    logits = draft.logits(teacher, lesson, anchors, depth)
    log_q = (logits.float() / teacher.temperature).log_softmax(-1)
    tokens = following(batch.ids, anchors + 1, depth)
    places = anchors.unsqueeze(2) + torch.arange(1, depth + 1, device=anchors.device)
    counted = (places < batch.lengths[:, None, None]) & (places >= batch.prompts[:, None, None])
    log_p = teacher.log_p(behind(lesson.states, anchors, depth), hot)
    return DraftBlocks(log_p, log_q, tokens, counted)
