"""Compare the vocabularies of target and draft: the same tokens, with logits of any padded width.

Some families pad their vocabularies by model size: Qwen2.5 has 151,936 logits in its small models
and 152,064 in its large ones, for the same 151,665 tokens. V is the width of the target's.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_smc import upstream

logger = logging.getLogger(__name__)


class Vocabulary(NamedTuple):
    """The tokens of one model, and the width of its logits."""

    tokens: Mapping[str, int] | None  # of its tokenizer; None where there is none
    width: int  # of its logits
    added: frozenset[str] = frozenset()  # special tokens among these, which a model may lack

    @classmethod
    def of(cls, tokenizer: Any, width: int) -> "Vocabulary":
        """Return the vocabulary of a tokenizer, or of None, for logits of a width."""
        if tokenizer is None:
            return cls(None, width)
        return cls(tokenizer.get_vocab(), width, frozenset(tokenizer.get_added_vocab()))

    @property
    def num_ids(self) -> int:
        """Return one more than the highest id of an ordinary token."""
        tokens = self.tokens or {}
        return 1 + max((i for token, i in tokens.items() if token not in self.added), default=-1)


def num_missing(target: TpModelWorker, draft: TpModelWorker) -> int:
    """Return by how many ids a draft's logits are narrower than the target's; below 0: wider.

    Raises ValueError for a draft that has other tokens.
    """
    widths = [worker.model_runner.model_config.vocab_size for worker in (target, draft)]
    of_draft = None if target.tokenizer is None else _tokenizer_of(draft)
    check_tokens(Vocabulary.of(target.tokenizer, widths[0]), Vocabulary.of(of_draft, widths[1]))
    return widths[0] - widths[1]


def _tokenizer_of(draft: TpModelWorker) -> Any:
    """Load the draft's tokenizer, or return None: SGLang loads the target's alone."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    resolved = upstream.resolved(draft.server_args)
    try:
        return get_tokenizer(
            draft.model_runner.model_config.model_path,
            tokenizer_mode=resolved.tokenizer_mode,
            trust_remote_code=resolved.trust_remote_code,
            revision=resolved.speculative_draft_model_revision,
        )
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning(
            "The draft's tokenizer cannot be read, so that its tokens are not compared with the "
            "target's: %s",
            error,
        )
        return None


def problem(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Return why a draft's tokens are not the target's, by their ids; None if they are."""
    widths = f"vocab_size is {target.width} in the target and {draft.width} in the draft"
    if target.tokens is None or draft.tokens is None:
        if target.width == draft.width:
            return None
        return (
            f"{widths}, and without tokenizers it is unknown whether by padding alone; allowed: "
            "the same. Have a tokenizer beside each model, and leave out --skip-tokenizer-init"
        )
    differing = _differing(target, draft) - target.added - draft.added
    if differing:
        first = min(differing)
        return (
            f"{len(differing)} tokens differ: {first!r} is {target.tokens.get(first)} in the "
            f"target and {draft.tokens.get(first)} in the draft; allowed: one id for each token, "
            "since drafts are scored by their ids"
        )
    if target.width != draft.width and target.num_ids > min(target.width, draft.width):
        return (
            f"{widths}, and text has ids up to {target.num_ids - 1}; allowed: widths that differ "
            "by padding, behind all of these"
        )
    return None


def _differing(target: Vocabulary, draft: Vocabulary) -> set[str]:
    """Return the tokens with a missing or different id on either side."""
    of_target = target.tokens or {}
    of_draft = draft.tokens or {}
    return {token for token, _ in of_target.items() ^ of_draft.items()}


def check_tokens(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise ValueError for a draft that has other tokens.

    Special tokens may differ, as those of R1-Distill-Llama and Llama 3.2 do: their ids are scored
    as any.
    """
    found = problem(target, draft)
    if found is not None:
        raise ValueError(
            f"--speculative-draft-model-path: {found}. Choose a draft of the target's family."
        )
    if target.tokens and draft.tokens and (markers := _differing(target, draft)):
        logger.warning(
            "%d special tokens differ between target and draft, such as %r. The draft predicts "
            "the target's own badly: slower at these tokens, and no error in modes that verify.",
            len(markers),
            min(markers),
        )
