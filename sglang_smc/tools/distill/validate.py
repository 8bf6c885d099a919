"""Measure a draft on held-out texts of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from sglang_smc.tools.distill.drafts import Blocks, Draft, compare
from sglang_smc.tools.distill.losses import chi2, forward_kl, rejection, rejection_of_all
from sglang_smc.tools.distill.teacher import Teacher
from sglang_smc.tools.distill.texts import Text, collate
from sglang_smc.tools.distill.train import draw_anchors


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
    draft: Draft,
    teacher: Teacher,
    texts: Sequence[Text],
    *,
    depth: int,
    anchors: int,
    batch: int,
    particles: int,
    seed: int = 0,
) -> Worth:
    """Measure ``draft`` on ``texts``, with ``anchors`` blocks of ``depth`` tokens of each.

    Raises:
        ValueError: no answer is as long as a block.
    """
    texts = sorted((t for t in texts if len(t.ids) - t.prompt >= depth), key=lambda t: len(t.ids))
    if not texts:
        raise ValueError(f"no held-out answer has {depth} tokens; lower --depth.")
    rng = torch.Generator().manual_seed(seed)
    device = next(draft.module.parameters()).device
    sums = torch.zeros(4, depth, dtype=torch.float64)
    means: list[float] = []  # accepted tokens per block, for each text
    starts = range(0, len(texts), batch)
    for start in tqdm(starts, desc="validating", unit="batch", mininterval=2):
        ids = collate(texts[start : start + batch], device)
        within = ids._replace(lengths=ids.lengths - depth + 1)  # a whole block fits behind
        lesson = teacher.teach(ids, draft.layer_ids)
        drawn = draw_anchors(within, anchors, rng)
        blocks = compare(draft, teacher, lesson, drawn, depth)
        on_hot, on_all = blocks.on_hot(draft.hot), blocks.on_all(draft.hot)
        found = (
            forward_kl(on_hot.log_p, on_hot.log_q),
            chi2(on_hot.log_p, on_hot.log_q),
            rejection(on_all.log_p, on_all.log_q),
            rejection_of_all(on_all.log_p, on_all.log_q, particles),
        )
        sums += torch.stack([values.double().sum((0, 1)) for values in found]).cpu()
        means += accepted(on_all).mean(1).tolist()
    count = len(texts) * anchors
    each = torch.tensor(means, dtype=torch.float64)
    error = float(each.std() / len(each) ** 0.5) if len(each) > 1 else float("inf")
    kl, moment, one, all_ = (sums / count).tolist()
    mean = float(each.mean())
    return Worth(mean, error, kl, moment, one, all_, particles, blocks=count, texts=len(texts))


def accepted(blocks: Blocks) -> torch.Tensor:
    """Return ``[B, A]``, the expected number of a block's tokens that the chain rule accepts.

    A drafted prefix x is accepted with probability prod min(1, p / q), so that all prefixes of j
    tokens together have sum over x of prod min(p, q) = E_p[prod min(1, q / p)]. The target's own
    tokens are a draw for that mean; its last factor is computed over all tokens: sum min(p, q).
    """
    chosen = blocks.tokens.unsqueeze(3)
    odds = (blocks.log_q - blocks.log_p).gather(3, chosen).squeeze(3).clamp_max(0.0)
    reached = torch.cat([torch.zeros_like(odds[..., :1]), odds.cumsum(2)[..., :-1]], 2).exp()
    return (reached * (1 - rejection(blocks.log_p, blocks.log_q))).sum(2)
