"""Draft with DSpark blocks (DeepSpec, arXiv 2607.05147): DFlash blocks with a Markov head.

What a Markov head adds to a row's logits depends on the token before, so q is a chain. A gated head
weighs the token's embedding by the row's own output. An rnn head has a state, which it updates by
each token of a chain: every particle has its own, from zeros on in each round.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_smc.proposers.base import DraftContext
from sglang_smc.proposers.dflash import BlockForward, BlockHead

_HEADS = ("vanilla", "gated", "rnn")


class DSparkHead(BlockHead):
    """A draft by a block head with a Markov head; arguments but the last as of `BlockHead`.

    Args:
        markov: SGLang's Markov head.
    """

    from_anchor = True
    projector = "dspark"

    def __init__(self, forward: BlockForward, mask: int, *, markov: Any, **more: Any) -> None:
        super().__init__(forward, mask, **more)
        self._markov = markov
        self._carried: torch.Tensor  # [G, N, r] states of an rnn head in the running round

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield Markov heads of other types; see `BlockHead.problems`."""
        markov = config.hf_config.to_dict().get("markov_head_type", "vanilla")
        if markov not in _HEADS:
            yield f"has a Markov head of type {markov!r}; allowed: {', '.join(_HEADS)}"
        yield from super().problems(config, target, num_steps)

    @classmethod
    def _parts(cls, context: DraftContext) -> dict[str, Any]:
        model: Any = context.runner.model
        return {"markov": model.markov_head}

    def _logits_after(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        markov = self._markov
        states = self._states[step]
        before = markov.get_prev_embeddings(tokens)  # [G, N, r]
        if hasattr(markov, "joint_proj"):
            carried = self._carried if step else torch.zeros_like(before)
            self._carried, bias = markov._rnn_step(carried, before, states)
        elif hasattr(markov, "gate_proj"):
            gate = markov.compute_gate(tokens, states).to(before.dtype)
            bias = markov.project_bias(gate * before)
        else:
            bias = markov.project_bias(before)
        return self._steps[step] + bias
