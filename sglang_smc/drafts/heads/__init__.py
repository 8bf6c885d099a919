"""List the kinds of heads: a file each, with classes, keys, sizes and tensors of checkpoints.

The drafter that runs a head is named by its path, as `--speculative-smc-draft-class` names a
user's. What is refused is a row with its reason. Servers, `doctor`, `plan`, `convert` and `distill`
read this list.
"""

from sglang_smc.drafts.heads import (
    dflash,
    dflash2,
    domino,
    dspark,
    eagle,
    eagle3,
    lilicorr,
    mtp,
)
from sglang_smc.drafts.heads.base import (
    Config,
    HeadKind,
    Kind,
    Refused,
    architecture,
    block_options,
)

INTERFACE = "sglang_smc.proposers.base:DraftProposer"
LANGUAGE_MODEL = "sglang_smc.proposers.base:LanguageModel"
"""The drafter of a checkpoint that is of no kind of head."""

FILES = (eagle, eagle3, dflash, domino, dflash2, lilicorr, dspark, mtp)

_OF_GEMMA = "a Gemma 4 assistant, which attends to the target's own KV"
_OTHER = "a draft of a kind that is not supported"

HEADS: tuple[HeadKind, ...] = tuple(head for file in FILES for head in file.HEADS)
REFUSED: tuple[Refused, ...] = (
    Refused(_OF_GEMMA, part="Gemma4Assistant"),
    Refused(_OF_GEMMA, part="Gemma4UnifiedAssistant"),
    Refused("an XPress head, of a kind that is not supported", part="XPress", type="xpress"),
    *(row for file in FILES for row in file.REFUSED),
    Refused(_OTHER, part="Draft"),
    Refused(_OTHER, part="Assistant"),
)

BY_CLASS = {name: head for head in HEADS for name in head.classes if head.projector is None}
"""Heads by SGLang's class."""

BY_TYPE = {head.speculators.type: head for head in HEADS if head.speculators is not None}
"""Heads by the type that `speculators` has for them."""


def head_of(config: Config) -> HeadKind | None:
    """Return the kind of head that a configuration is of, if any."""
    name = architecture(config)
    projector = block_options(config).get("projector_type")
    fits = (one for one in HEADS if name in one.classes and one.projector == projector)
    return next(fits, BY_CLASS.get(name))


def kind_of(name: str) -> Kind:
    """Return the kind of a draft whose configuration names this class."""
    found = BY_CLASS.get(name)
    return "model" if found is None else found.kind


def reason_of_class(name: str) -> str | None:
    """Return what a draft of this class is, if it is refused by its name."""
    fits = [row for row in REFUSED if row.part is not None and row.part in name]
    return max(fits, key=lambda row: len(row.part or "")).what if fits else None


def reason_of_type(name: str) -> str | None:
    """Return what a head of this type of `speculators` is, if it is refused by it."""
    return next((row.what for row in REFUSED if row.type == name), None)
