"""Describe the drafts: a language model, an EAGLE-3 head, a DFlash block, or n-gram matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang_smc.tools.plan import heads, shapes
from sglang_smc.tools.plan.heads import DFlash, Eagle3, Head
from sglang_smc.tools.plan.passes import Pass, Rows, forward
from sglang_smc.tools.plan.shapes import ModelShape

DEFAULT_STEPS = (4, 8, 16)
NGRAM, BESIDE = "ngram", "ngram+"


@dataclass(frozen=True)
class Ngram:
    """N-gram matches of the last tokens in the sequence so far, alone or beside a draft model.

    They need no device pass, weights or KV. The lookup takes the host microseconds per chain,
    which is left out, as is all host time.
    """

    kind: ClassVar = NGRAM
    model: ModelShape | None = None

    @property
    def num_parameters(self) -> float:
        return self.model.num_parameters if self.model else 0

    @property
    def weight_bytes(self) -> float | None:
        """Return the model's bytes per weight; None without a model."""
        return self.model.weight_bytes if self.model else None

    @property
    def streamed_bytes(self) -> float:
        return self.model.streamed_bytes if self.model else 0.0

    @property
    def resident_bytes(self) -> float:
        return self.model.resident_bytes if self.model else 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        return self.model.kv_bytes_per_token if self.model else 0.0


Proposal = ModelShape | Head | Ngram
"""The type of the draft in `roofline.smc_round` and its callers."""

KINDS = tuple(one.kind for one in (ModelShape, Eagle3, DFlash, Ngram))
#: Names that `from_config` resolves.
NAMES = (*shapes.BUILT_IN, *heads.BUILT_IN, NGRAM)


def is_name(source: str) -> bool:
    """Return whether `from_config` resolves the name without a file."""
    name = source.lower()
    return name in NAMES or name.removeprefix(BESIDE) in shapes.BUILT_IN


def from_config(
    source: str | Path | Mapping[str, Any], weight_bytes: float | None = None
) -> Proposal:
    """Return the draft, parsed like `shapes.from_config`.

    ``source`` is a ``config.json`` of a model or a head, its folder, its contents, one of `NAMES`,
    or ``ngram+`` followed by any of these that is a model.

    Raises ValueError for unsupported configurations.
    """
    if isinstance(source, str) and source.lower() == NGRAM:
        return Ngram()
    if isinstance(source, str) and source.lower().startswith(BESIDE):
        return _beside(from_config(source[len(BESIDE) :], weight_bytes))
    head = shapes.built_in(source, heads.BUILT_IN)
    if head is None and shapes.built_in(source, shapes.BUILT_IN) is None:
        config = shapes.contents(source, NAMES)
        parse = heads.ARCHITECTURES.get(shapes.architecture(config))
        if parse is None:
            return shapes.from_config(config, weight_bytes)
        head = parse(config)
    if head is None:
        return shapes.from_config(source, weight_bytes)
    return heads.in_precision(head, weight_bytes)


def _beside(draft: Proposal) -> Ngram:
    if not isinstance(draft, ModelShape):
        raise ValueError(
            f"n-gram matches go alone ({NGRAM}) or beside a draft model ({BESIDE}llama-3.2-1b); "
            f"given is {draft.kind}."
        )
    return Ngram(draft)


def passes(target: ModelShape, draft: Proposal, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
    """Return a round's passes except the target's: ``draft`` before it, ``follow`` after it.

    Raises ValueError if the draft does not fit the target, or cannot draft K tokens.
    """
    if isinstance(draft, Head):
        return draft.passes(target, rows, num_steps)
    model = draft.model if isinstance(draft, Ngram) else draft
    return () if model is None else _of_model(model, rows, num_steps)


def _of_model(draft: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
    """Return one pass per step; the first reads two tokens.

    They are the last round's last draft token, not yet in the draft model's KV, and the bonus
    token.
    """
    found = []
    for num_tokens in (2, *[1] * (num_steps - 1)):
        found.append(forward("draft", draft, rows, num_tokens, 1))
        rows = rows._replace(tail=rows.tail + num_tokens)
    return tuple(found)


def default_steps(draft: Proposal) -> tuple[int, ...]:
    """Return the candidates for K that are within a head's block."""
    most = draft.max_steps if isinstance(draft, Head) else None
    within = tuple(steps for steps in DEFAULT_STEPS if most is None or steps <= most)
    return within or (most or 1,)


def lowest_precision(target: ModelShape, *drafts: Proposal) -> float:
    """Return the fewest bytes per weight of all models; its FLOP/s bound each of them."""
    found = (draft.weight_bytes for draft in drafts)
    return min([target.weight_bytes, *(one for one in found if one is not None)])


def on_devices(draft: Proposal, count: int) -> Proposal:
    """Return the draft on ``count`` devices that split every pass."""
    if isinstance(draft, ModelShape):
        return draft.on_devices(count)
    if isinstance(draft, Ngram) and draft.model:
        return Ngram(draft.model.on_devices(count))
    return draft
