"""Training: batches of the target's texts, its laws, and a loss between them and the draft's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import nn
from tqdm import tqdm

from sglang_smc.distill.drafts import Draft, compare, of_hot
from sglang_smc.distill.losses import Loss
from sglang_smc.distill.teacher import Teacher
from sglang_smc.distill.texts import Batch, Text, batches


class Course(msgspec.Struct, frozen=True):
    """How long and how fast a draft learns."""

    steps: int
    batch: int  # texts a step
    anchors: int  # of each text, drawn anew each time; a draft model learns at all of its tokens
    depth: int  # tokens behind an anchor that are compared
    decay: float  # what a column weighs, of the one before it
    learning_rate: float  # the peak: it rises for the first twentieth of all steps, then falls
    seed: int


def train(
    draft: Draft, teacher: Teacher, texts: Sequence[Text], loss: Loss, course: Course
) -> list[float]:
    """Train ``draft`` on ``texts``; returns the loss of each step."""
    rng = torch.Generator().manual_seed(course.seed)
    device = next(draft.module.parameters()).device
    supply = batches(texts, course.batch, device, rng)
    steppers = optimizers(draft.module.train(), course.learning_rate)
    found = []
    for step in (bar := tqdm(range(course.steps), desc="training", unit="step", mininterval=2)):
        for stepper in steppers:
            stepper.param_groups[0]["lr"] = course.learning_rate * _rate(step, course.steps)
        value = _loss(draft, teacher, next(supply), loss, course, rng)
        value.backward()
        nn.utils.clip_grad_norm_(draft.module.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        found.append(value.item())
        bar.set_postfix(loss=f"{found[-1]:.4f}", refresh=False)
    draft.module.eval()
    return found


def _loss(
    draft: Draft,
    teacher: Teacher,
    batch: Batch,
    loss: Loss,
    course: Course,
    rng: torch.Generator,
) -> torch.Tensor:
    """The mean over columns, each of which is the mean over anchors."""
    lesson = teacher.teach(batch, draft.layer_ids)
    anchors = draw_anchors(batch, course.anchors, rng) if draft.layer_ids else _every(batch)
    with torch.autocast(batch.ids.device.type, torch.bfloat16):
        blocks = of_hot(compare(draft, teacher, lesson, anchors, course.depth), draft.hot)
    values = loss(blocks.log_p, blocks.log_q).where(blocks.counted, 0.0)  # [B, A, depth]
    columns = values.sum((0, 1)) / blocks.counted.sum((0, 1)).clamp_min(1)
    weights = course.decay ** torch.arange(course.depth, device=columns.device)
    return (columns * weights).sum() / weights.sum()


def draw_anchors(batch: Batch, count: int, rng: torch.Generator) -> torch.Tensor:
    """``[B, count]`` int64: tokens of which the next one belongs to the answer.

    The first token of a text is none of them: a head knows nothing before it.
    """
    first = (batch.prompts - 1).clamp_min(1).unsqueeze(1)
    choices = (batch.lengths.unsqueeze(1) - 1 - first).clamp_min(1)
    drawn = torch.rand(len(batch.ids), count, generator=rng).to(batch.ids.device)
    return first + (drawn * choices).long()


def _every(batch: Batch) -> torch.Tensor:
    """``[B, L - 1]``: all that have a next token."""
    places = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
    return places.expand(len(batch.ids), -1)


def optimizers(module: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for embeddings, LM heads and norms."""
    weights = dict(module.named_parameters())
    edges = ("embed", "lm_head", "wte", "wpe")
    matrices = [
        weight
        for name, weight in weights.items()
        if weight.ndim == 2 and not any(edge in name for edge in edges)
    ]
    known = {id(weight) for weight in matrices}
    others = [weight for weight in weights.values() if id(weight) not in known]
    muon = torch.optim.Muon(
        matrices,
        lr=learning_rate,
        momentum=0.95,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


def _rate(step: int, steps: int) -> float:
    """The learning rate's factor."""
    warmup = max(1, steps // 20)
    return min(1.0, (step + 1) / warmup, (steps - step) / max(1, steps - warmup))
