"""Draft the token that mostly follows the last one, by a table: a drafter of one's own.

Where this file can be imported:

    FOLLOWERS=table.pt sglang serve --model-path TARGET --speculative-algorithm SMC \
        --speculative-smc-draft-class followers:Followers

`table.pt` is a tensor ``[V]`` int64 that `torch.save` wrote: the follower of each token.
"""

import math
import os

import torch

from sglang_smc.models.attention import ParticleAttention
from sglang_smc.proposers.base import DraftContext, DraftProposer, DraftSlots


class Followers(DraftProposer):
    """Give half of q to the follower of the last token, and the rest to all other tokens alike.

    Args:
        table: ``[V]`` int64.
    """

    def __init__(self, attn_backend: ParticleAttention, table: torch.Tensor) -> None:
        self.attn_backend = attn_backend
        self._table = table

    @classmethod
    def build(cls, context: DraftContext) -> "Followers":
        table = torch.load(os.environ["FOLLOWERS"], weights_only=True)
        if len(table) != context.vocab_size:
            raise ValueError(
                f"FOLLOWERS has {len(table)} tokens; allowed: the target's {context.vocab_size}. "
                "Count the followers with its tokenizer."
            )
        device = context.target.model_runner.device
        return cls(context.passes.attn_backend, table.to(device))

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        return self._logits_after(last_two[:, :, 1])

    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        return self._logits_after(tokens)

    def _logits_after(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return new logits ``[G, N, V]`` after ``tokens`` ``[G, N]``; a round writes into them."""
        width = len(self._table)
        logits = torch.zeros(*tokens.shape, width, device=tokens.device)
        return logits.scatter(2, self._table[tokens].unsqueeze(2), math.log(width - 1))
