"""What heads draft, by transformers and the heads of `sglang_smc.tools.distill`, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sglang_smc.tools.distill.checkpoints import load_head, new_head

EAGLE3, HOT, DFLASH = "eagle3", "eagle3 of hot tokens", "dflash"
KINDS = (EAGLE3, HOT, DFLASH)


def make_head(
    kind: str, target: str, folder: Path, *, scale: float = 1.0, seed: int = 3, num_steps: int = 3
) -> str:
    """An untrained head; of hot tokens it has three of four."""
    given: dict[str, Any] = {"dtype": torch.float32, "scale": scale, "seed": seed}
    if kind == DFLASH:
        made = new_head("dflash", target, folder, num_layers=2, block_size=num_steps + 1, **given)
    else:
        vocab_size = AutoModelForCausalLM.from_pretrained(target).config.vocab_size
        hot = [token for token in range(vocab_size) if token % 4 != 2]
        made = new_head("eagle3", target, folder, hot_tokens=hot if kind == HOT else None, **given)
    return str(made)


class Draft:
    """The law of a head's drafts.

    Args:
        kind: of `KINDS`.
        target, folder: of the checkpoints.
        num_steps: K, the tokens that a round drafts.
    """

    def __init__(self, kind: str, target: str, folder: str, num_steps: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.head: Any = load_head(folder, target).double().eval()
        self.is_block, self.num_steps = kind == DFLASH, num_steps

    def probs(self, text: list[int], anchor: int) -> torch.Tensor:
        """Of the K tokens behind ``text[anchor]``, ``[K, V]``; see `laws`."""
        return self.laws(torch.tensor([text]), torch.tensor([anchor]))[0]

    @torch.no_grad()
    def laws(self, texts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Of the K tokens behind ``anchors`` ``[R]`` of ``texts`` ``[R, L]``, ``[R, K, V]``.

        A chain's, given those in the text. The target has read what stands before the anchor.
        """
        states = self.model(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in self.head.layer_ids], -1)
        embed, columns = self.model.get_input_embeddings(), anchors.unsqueeze(1)
        if self.is_block:
            mask = embed(torch.tensor(self.head.mask_token_id))
            filled = self.head(embed(texts.gather(1, columns)), mask, features, columns)
            return self.model.lm_head(filled)[:, 0].softmax(-1)
        logits = self.head(embed(texts), features, columns, self.num_steps)[:, 0]
        probs = logits.new_zeros(*logits.shape[:2], len(self.model.lm_head.weight))
        return probs.index_copy(2, self.head.hot, logits.softmax(-1))
