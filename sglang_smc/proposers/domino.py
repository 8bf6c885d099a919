"""Draft with Domino heads: DFlash blocks corrected by the tokens of a chain.

A GRU reads the last token and the drafted ones, as the target embeds them; an MLP of its state and
of a row's output adds to that row's logits. The first drafted token has no correction. Every
particle has a state, from zeros on in each round. SGLang drafts greedily (`domino_greedy_rollout`);
here q is the softmax of the same logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_smc import upstream
from sglang_smc.drafts.heads.base import block_options
from sglang_smc.drafts.heads.domino import DOMINO
from sglang_smc.proposers.base import DraftContext
from sglang_smc.proposers.dflash import BlockForward, BlockHead


class DominoHead(BlockHead):
    """A draft by a block head with a GRU; arguments but the last two as of `BlockHead`.

    Args:
        gru: SGLang's, of one layer and without biases.
        correct: maps outputs and states ``[G, N, H + h]`` to what is added ``[G, N, V]``.
    """

    projector = DOMINO
    shown = "Domino"
    releases = upstream.NEWER

    def __init__(
        self, forward: BlockForward, mask: int, *, gru: Any, correct: Any, **more: Any
    ) -> None:
        super().__init__(forward, mask, **more)
        self._gru = gru
        self._correct = correct
        self.num_unread = 1 - self._first  # blocks are as long as without shifted labels
        self._carried: torch.Tensor  # [G * N, h] states in the running round

    @classmethod
    def first_row(cls, config: ModelConfig) -> int:
        """Return the row that drafts the first token: 0 where labels are shifted."""
        return 1 - bool(block_options(config.hf_config.to_dict()).get("shift_label"))

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield another vocabulary than the target's; see `BlockHead.problems`."""
        if config.vocab_size != target.vocab_size:
            yield f"has vocab_size {config.vocab_size}, and the target {target.vocab_size}"
        yield from super().problems(config, target, num_steps)

    @classmethod
    def most_steps(cls, config: ModelConfig, block: int) -> int:
        return block - 1

    @classmethod
    def _parts(cls, context: DraftContext) -> dict[str, Any]:
        model: Any = context.runner.model
        return {"gru": model.prefix_gru, "correct": model.embed_proj}

    def _logits_after(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._steps[step]
        read = self._forward.embed(tokens.flatten())  # [G * N, H]
        gru = self._gru
        carried = self._carried if step else read.new_zeros(len(read), gru.hidden_size)
        weights = gru.weight_ih_l0, gru.weight_hh_l0
        self._carried = torch.gru_cell(read.to(weights[0].dtype), carried, *weights)
        if not step:
            return logits
        states = self._states[step]
        both = torch.cat([states, self._carried.view(*tokens.shape, -1).to(states.dtype)], 2)
        return logits + self._correct(both)
