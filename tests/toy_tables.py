"""A toy language whose texts can be enumerated: a table for each position and last token."""

from typing import NamedTuple

import torch


class Pair(NamedTuple):
    """Log-probabilities ``[position, last token, next token]``; position 0 follows token 0."""

    target: torch.Tensor
    draft: torch.Tensor


def mild_pair(length: int, vocab: int) -> Pair:
    """A draft that is a perturbed target, on all tokens."""
    logits = _random_logits(length, vocab, 1.0, seed=0)
    draft = logits + _random_logits(length, vocab, 0.7, seed=1)
    return Pair(logits.log_softmax(2), draft.log_softmax(2))


def _random_logits(length: int, vocab: int, spread: float, seed: int) -> torch.Tensor:
    """Normal logits ``[length, vocab, vocab]`` with standard deviation ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, vocab, vocab, generator=generator) * spread
