"""Train a draft on texts of the target, by a loss between p and q, and measure it on others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from tqdm import tqdm

from sglang_smc.dtype import default_dtype
from sglang_smc_tools.distill.drafts import DraftBlocks, TrainableDraft, compare
from sglang_smc_tools.distill.losses import LOSSES, chi2, forward_kl, rejection, rejection_of_all
from sglang_smc_tools.distill.teacher import (
    Example,
    Lesson,
    Lessons,
    Teacher,
    TextBatch,
    batches,
    collate,
)

#: Of a batch that is measured, by which several numbers in memory are as many.
MOST_PROBABILITIES = 1 << 25
SAVED = 50  # steps, of a minute or so


class Course(msgspec.Struct, frozen=True):
    """Hyperparameters of training."""

    loss: str  # a name of `LOSSES`
    steps: int
    batch: int  # texts per step
    anchors: int  # of each text, drawn anew each step; a draft model trains at all positions
    depth: int  # columns behind an anchor that are compared
    decay: float  # a column's weight, relative to the one before it
    learning_rate: float  # the peak; warmup over the first 1/20 of the steps, then decay
    seed: int


class Progress:
    """Training so far; with a path, it is saved there every `SAVED` steps and read again.

    Args:
        course: what must be equal for training to go on from the file.
    """

    def __init__(
        self,
        path: Path | None,
        course: dict[str, Any],
        module: nn.Module,
        steppers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.losses: list[float] = []  # of each step
        self.seconds = 0.0  # of all runs, up to the last step
        self.rng = torch.Generator().manual_seed(course["seed"])
        self._path = path
        self._course = course
        self._module = module
        self._steppers = steppers
        if path is not None and path.is_file():
            self._load(path)
        self._began = time.monotonic() - self.seconds

    def _load(self, path: Path) -> None:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        if found["course"] != self._course:
            raise ValueError(
                f"{path} was left by training with {found['course']}; asked for is "
                f"{self._course}. Go on with its options, or delete it."
            )
        self.losses = found["losses"]
        self.seconds = found["seconds"]
        self.rng.set_state(found["rng"])
        self._module.load_state_dict(found["module"])
        for stepper, state in zip(self._steppers, found["steppers"], strict=True):
            stepper.load_state_dict(state)

    def add(self, loss: float) -> None:
        """Count a step."""
        self.losses.append(loss)
        self.seconds = time.monotonic() - self._began
        if self._path is not None and len(self.losses) % SAVED == 0:
            self._save(self._path)

    def _save(self, path: Path) -> None:
        state = {
            "course": self._course,
            "losses": self.losses,
            "seconds": self.seconds,
            "rng": self.rng.get_state(),
            "module": self._module.state_dict(),
            "steppers": [stepper.state_dict() for stepper in self._steppers],
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)


def train(
    draft: TrainableDraft,
    teacher: Teacher,
    texts: Sequence[Example],
    course: Course,
    path: Path | None = None,
) -> Progress:
    """Train ``draft`` on ``texts``; with ``path``, go on from where an earlier run stopped."""
    device = next(draft.module.parameters()).device
    lessons = Lessons(teacher, draft.layer_ids, device)
    steppers = optimizers(draft.module.train(), course.learning_rate)
    settings = msgspec.to_builtins(course) | {"texts": len(texts)}
    progress = Progress(path, settings, draft.module, steppers)
    done = len(progress.losses)
    supply = batches(texts, course.batch, torch.Generator().manual_seed(course.seed))
    supply = islice(supply, done, None)
    warmup = max(1, course.steps // 20)
    steps = range(done, course.steps)
    bar = tqdm(steps, "training", course.steps, unit="step", mininterval=2, initial=done)
    for step in bar:
        left = (course.steps - step) / max(1, course.steps - warmup)
        for stepper in steppers:
            rate = min(1.0, (step + 1) / warmup, left)
            stepper.param_groups[0]["lr"] = course.learning_rate * rate
        value = _loss(draft, teacher, lessons.of(next(supply)), course, progress.rng)
        value.backward()
        nn.utils.clip_grad_norm_(draft.module.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        progress.add(value.item())
        bar.set_postfix(loss=f"{progress.losses[-1]:.4f}", refresh=False)
    draft.module.eval()
    return progress


def _loss(
    draft: TrainableDraft,
    teacher: Teacher,
    lesson: Lesson,
    course: Course,
    rng: torch.Generator,
) -> torch.Tensor:
    """Return the loss: the weighted mean over columns of the means over anchors.

    A draft model trains at all positions that have a next token.
    """
    batch = lesson.batch
    if draft.layer_ids:
        anchors = draw_anchors(batch, course.anchors, rng)
    else:
        places = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
        anchors = places.expand(len(batch.ids), -1)
    products = products_of(batch.ids.device)
    with torch.autocast(batch.ids.device.type, products, enabled=products != torch.float32):
        blocks = compare(draft, teacher, lesson, anchors, course.depth, draft.hot)
    values = LOSSES[course.loss](blocks.log_p, blocks.log_q)  # [B, A, depth]
    values = values.where(blocks.counted, 0.0)
    columns = values.sum((0, 1)) / blocks.counted.sum((0, 1)).clamp_min(1)
    weights = course.decay ** torch.arange(course.depth, device=columns.device)
    return (columns * weights).sum() / weights.sum()


def draw_anchors(batch: TextBatch, count: int, rng: torch.Generator) -> torch.Tensor:
    """Draw positions ``[B, count]`` int64 with a next token that belongs to the answer.

    The first token of a text is excluded: a head reads the states of the position before it.
    """
    first = (batch.prompts - 1).clamp_min(1).unsqueeze(1)
    choices = (batch.lengths.unsqueeze(1) - 1 - first).clamp_min(1)
    drawn = torch.rand(len(batch.ids), count, generator=rng).to(batch.ids.device)
    return first + (drawn * choices).long()


def optimizers(module: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of layers, and AdamW for all other weights."""
    weights = dict(module.named_parameters())
    edges = ("embed", "lm_head", "wte", "wpe", "markov")
    matrices = [
        weight
        for name, weight in weights.items()
        if weight.ndim == 2 and not any(edge in name for edge in edges)
    ]
    known = {id(weight) for weight in matrices}
    others = [weight for weight in weights.values() if id(weight) not in known]
    is_exact = products_of(next(module.parameters()).device) == torch.float32
    how = {"momentum": 0.95, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    kind = Float32Muon if is_exact else torch.optim.Muon
    muon = kind(matrices, lr=learning_rate, **how)
    adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


class Float32Muon(torch.optim.Muon):
    """Muon with matrix products in float32, where torch's always rounds to bfloat16."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] -- no closures
        """Take a step like torch's with Nesterov momentum and `match_rms_adamw`."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(
                    weight.grad.lerp(mean, group["momentum"]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                )
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * group["lr"] * max(weight.shape) ** 0.5)


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    """Return about U Vᵀ of a matrix U S Vᵀ, by Newton-Schulz steps in the matrix's dtype."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def products_of(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: float32 if the CPU only emulates bfloat16."""
    return torch.bfloat16 if device.type != "cpu" else getattr(torch, default_dtype())


# --- Measures


class Worth(NamedTuple):
    """Means over blocks that lie within an answer; lists are by column of the block.

    If the draft's vocabulary is smaller, the divergences are over its own tokens.
    """

    accepted: float  # tokens of a block that SGLang's chain rule (N = 1) accepts, without the bonus
    accepted_error: float  # its standard error over texts
    forward_kl: list[float]  # nats
    chi2: list[float]  # log E_q[(p / q)^2], nats
    rejection: list[float]  # 1 - sum min(p, q): total variation
    rejection_of_all: list[float]  # of ``particles`` independent drafts, at best
    particles: int
    blocks: int
    texts: int


@torch.no_grad()
def validate(
    draft: TrainableDraft,
    teacher: Teacher,
    texts: Sequence[Example],
    *,
    depth: int,
    anchors: int,
    batch: int,
    particles: int,
) -> Worth:
    """Measure ``draft`` on ``texts``, with ``anchors`` blocks of ``depth`` tokens of each.

    Raises ValueError if no answer is as long as a block.
    """
    texts = sorted((t for t in texts if len(t.ids) - t.prompt >= depth), key=lambda t: len(t.ids))
    if not texts:
        raise ValueError(f"no held-out answer has {depth} tokens; lower --depth.")
    rng = torch.Generator().manual_seed(0)
    device = next(draft.module.parameters()).device
    sums = torch.zeros(4, depth, dtype=torch.float64)
    means: list[float] = []  # accepted tokens per block, for each text
    vocab_size = teacher.model.get_output_embeddings().weight.shape[0]
    batch = max(1, min(batch, MOST_PROBABILITIES // (anchors * depth * vocab_size)))
    starts = range(0, len(texts), batch)
    for start in tqdm(starts, desc="validating", unit="batch", mininterval=2):
        ids = collate(texts[start : start + batch], device)
        within = ids._replace(lengths=ids.lengths - depth + 1)  # a whole block fits behind
        lesson = teacher.teach(ids, draft.layer_ids)
        drawn = draw_anchors(within, anchors, rng)
        blocks = compare(draft, teacher, lesson, drawn, depth)
        on_hot = blocks.on_hot(draft.hot)
        on_all = blocks.on_all(draft.hot)
        sums += _divergences(on_hot, on_all, particles)
        means += accepted(on_all).mean(1).tolist()
    count = len(texts) * anchors
    each = torch.tensor(means, dtype=torch.float64)
    error = float(each.std() / len(each) ** 0.5) if len(each) > 1 else float("inf")
    kl, moment, one, all_ = (sums / count).tolist()
    return Worth(
        accepted=float(each.mean()),
        accepted_error=error,
        forward_kl=kl,
        chi2=moment,
        rejection=one,
        rejection_of_all=all_,
        particles=particles,
        blocks=count,
        texts=len(texts),
    )


def _divergences(on_hot: DraftBlocks, on_all: DraftBlocks, particles: int) -> torch.Tensor:
    """Return sums over blocks of `Worth`'s four divergences, ``[4, depth]`` float64 on the CPU."""
    found = (
        forward_kl(on_hot.log_p, on_hot.log_q),
        chi2(on_hot.log_p, on_hot.log_q),
        rejection(on_all.log_p, on_all.log_q),
        rejection_of_all(on_all.log_p, on_all.log_q, particles),
    )
    return torch.stack([values.double().sum((0, 1)) for values in found]).cpu()


def accepted(blocks: DraftBlocks) -> torch.Tensor:
    """Return ``[B, A]``, the expected number of a block's tokens that the chain rule accepts.

    A drafted prefix x is accepted with probability prod min(1, p / q), so that all prefixes of j
    tokens together have sum over x of prod min(p, q) = E_p[prod min(1, q / p)]. The target's own
    tokens are a draw for that mean; its last factor is computed over all tokens: sum min(p, q).
    """
    chosen = blocks.tokens.unsqueeze(3)
    odds = (blocks.log_q - blocks.log_p).gather(3, chosen).squeeze(3).clamp_max(0.0)
    reached = torch.cat([torch.zeros_like(odds[..., :1]), odds.cumsum(2)[..., :-1]], 2).exp()
    return (reached * (1 - rejection(blocks.log_p, blocks.log_q))).sum(2)
