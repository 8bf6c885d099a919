"""Draft with DFlash2 blocks: DFlash blocks with convolutions, and a selector of candidates.

The likeliest tokens of each row, 16 or so, are its candidates. A selector adds to their logits what
depends on the token before: the inner product of their embeddings, weighted by the row's output
(speculators 0.9.0, models/dflash2; `CandidateSelector` in SGLang's models/dflash.py). q is the
softmax over these, and 0 elsewhere; the token before may be any.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_smc import upstream
from sglang_smc.models.chains import Chains
from sglang_smc.proposers.base import DraftContext
from sglang_smc.proposers.dflash import BlockForward, BlockHead, among


class ConvolvedForward(BlockForward):
    """A block head whose layers may convolve each block's rows with those before them."""

    def block_logits(self, blocks: Chains, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self._model.layers:
            for convolution in filter(None, (layer.attention_conv, layer.mlp_conv)):
                convolution.block_size = blocks.tokens.shape[2]  # where the next block begins
        return super().block_logits(blocks, rows)


class DFlash2Head(BlockHead):
    """A draft by a block head with a selector; arguments but the last two as of `BlockHead`.

    Args:
        selector: SGLang's `CandidateSelector`.
        transform: maps candidates' logits to those that the selector adds to.
    """

    shown = "DFlash2"
    releases = upstream.NEWER
    forward_class = ConvolvedForward
    has_parts = (
        *("selector_rank", "conv_kernel_size"),
        *("output_multiplier", "final_logit_softcapping"),
    )

    def __init__(
        self, forward: BlockForward, mask: int, *, selector: Any, transform: Any, **more: Any
    ) -> None:
        super().__init__(forward, mask, **more)
        self._selector = selector
        self._transform = transform
        # Of the running round, with c candidates of a row.
        self._candidates: torch.Tensor  # [K, G, N, c] int64
        self._unary: torch.Tensor  # [K, G, N, c] their logits, whatever the token before is
        self._projected: torch.Tensor  # [K, G, N, r]

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield the lack of a selector; see `BlockHead.problems`."""
        given = config.hf_config.to_dict().get("dflash_config") or {}
        if not given.get("selector_rank"):
            yield "has no selector_rank in dflash_config"
        yield from super().problems(config, target, num_steps)

    @classmethod
    def _parts(cls, context: DraftContext) -> dict[str, Any]:
        model: Any = context.runner.model
        return {"selector": model.candidate_selector, "transform": model._transform_unary_logits}

    def _begin(self) -> None:
        likeliest = self._steps.topk(self._selector.top_k)
        self._candidates = likeliest.indices
        self._unary = self._transform(likeliest.values)
        self._projected = self._selector.hidden_projection(self._states)

    def _logits_after(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        candidates = self._candidates[step]
        before = self._selector.predecessor_codebook[tokens] * self._projected[step]  # [G, N, r]
        after = self._selector.successor_codebook[candidates]  # [G, N, c, r]
        scores = self._unary[step] + torch.einsum("gnr,gncr->gnc", before, after)
        return among(candidates, scores, self._steps[step])
