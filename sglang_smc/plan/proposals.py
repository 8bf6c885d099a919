"""What drafts: a language model, an EAGLE-3 head, a DFlash block, or n-gram matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang_smc.plan import heads, shapes
from sglang_smc.plan.heads import DFlash, Eagle3, Head
from sglang_smc.plan.passes import Pass, Rows, forward
from sglang_smc.plan.shapes import ModelShape

DEFAULT_STEPS = (4, 8, 16)
NGRAM, BESIDE = "ngram", "ngram+"


@dataclass(frozen=True)
class Ngram:
    """Matches of the text's end in what came before, alone or beside a draft model.

    They have no pass of the device, no weights and no KV. Looking them up takes the host
    microseconds a chain, which is left out, as is all that the host does.
    """

    kind: ClassVar = NGRAM
    model: ModelShape | None = None

    @property
    def num_parameters(self) -> float:
        return self.model.num_parameters if self.model else 0

    @property
    def weight_bytes(self) -> float | None:
        """Of the model; None alone."""
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
"""What `roofline.smc_round` and all built on it take for the draft."""

KINDS = tuple(one.kind for one in (ModelShape, Eagle3, DFlash, Ngram))
#: What `from_config` knows by name.
NAMES = (*shapes.BUILT_IN, *heads.BUILT_IN, NGRAM)


def is_name(source: str) -> bool:
    """Whether `from_config` knows it without a file."""
    name = source.lower()
    return name in NAMES or name.removeprefix(BESIDE) in shapes.BUILT_IN


def from_config(
    source: str | Path | Mapping[str, Any], weight_bytes: float | None = None
) -> Proposal:
    """What drafts, as `shapes.from_config` has models.

    ``source`` is a ``config.json`` of a model or a head, its folder, its contents, one of `NAMES`,
    or ``ngram+`` and any of these that is a model.

    Raises ValueError for what is not planned for.
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
    """All of a round but the target's: ``draft`` before it, and ``follow`` after it.

    Raises ValueError where the draft does not fit the target, or proposes no K tokens.
    """
    if isinstance(draft, Head):
        return draft.passes(target, rows, num_steps)
    model = draft.model if isinstance(draft, Ngram) else draft
    return () if model is None else _of_model(model, rows, num_steps)


def _of_model(draft: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
    """One a step; the first takes two tokens.

    They are the last round's last draft, whose KV the draft still lacks, and the bonus token.
    """
    found = []
    for num_tokens in (2, *[1] * (num_steps - 1)):
        found.append(forward("draft", draft, rows, num_tokens, 1))
        rows = rows._replace(tail=rows.tail + num_tokens)
    return tuple(found)


def default_steps(draft: Proposal) -> tuple[int, ...]:
    """Candidates for K, those beyond a block left out."""
    most = draft.max_steps if isinstance(draft, Head) else None
    within = tuple(steps for steps in DEFAULT_STEPS if most is None or steps <= most)
    return within or (most or 1,)


def lowest_precision(target: ModelShape, *drafts: Proposal) -> float:
    """Bytes of a weight, the lowest of all: a device that computes so keeps a bound for each."""
    found = (draft.weight_bytes for draft in drafts)
    return min([target.weight_bytes, *(one for one in found if one is not None)])


def on_devices(draft: Proposal, count: int) -> Proposal:
    """The draft on so many devices that split every pass."""
    if isinstance(draft, ModelShape):
        return draft.on_devices(count)
    if isinstance(draft, Ngram) and draft.model:
        return Ngram(draft.model.on_devices(count))
    return draft
