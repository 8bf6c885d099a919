"""A DFlash head: a few layers that fill a block of masks in one pass.

A block is the last kept token and masks behind it. It sees the kept columns before it as keys and
values of the target's states, and all of itself, in both directions. Its output at a mask tells of
the token that belongs there, so that a block's law is the product of its columns' laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang_smc.distill.layers import HeadShape, KeysValues, Mlp, Projections, Turns, attend


class DFlashLayer(nn.Module):
    """One layer; keys and values of the context are made of the target's states."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Projections(shape, shape.hidden_size, norms=True)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        hidden: torch.Tensor,
        turns: Turns,
        context: KeysValues,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """``[B, A * S, D]`` of the same: A blocks of S columns.

        Args:
            hidden: what the layer reads.
            turns: of the blocks' positions.
            context: ``[B, kv heads, L, head_dim]``.
            seen: ``[B, A, L]`` bool, as in `attend`.
        """
        attention, blocks = self.self_attn, seen.shape[1]
        read = self.input_layernorm(hidden)
        own = attention.keys_values(read, turns)
        queries = attention.queries(read, turns).unflatten(2, (blocks, -1))
        own = KeysValues(*(part.unflatten(2, (blocks, -1)) for part in own))
        hidden = hidden + attention.o_proj(attend(queries, context, seen, own))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlash(nn.Module):
    """The head. Tokens are embedded, and states made logits, by the target."""

    def __init__(
        self, shape: HeadShape, rotary: LlamaRotaryEmbedding, mask_token_id: int, block_size: int
    ) -> None:
        super().__init__()
        self.shape, self.rotary = shape, [rotary]  # in a list: it has no parameters to be saved
        self.mask_token_id, self.block_size = mask_token_id, block_size
        self.fc = nn.Linear(len(shape.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        embedded: torch.Tensor,
        mask: torch.Tensor,
        features: torch.Tensor,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """Normed states ``[B, A, block size - 1, D]`` of the masks behind each anchor.

        Args:
            embedded: ``[B, A, D]``, the tokens at the anchors.
            mask: ``[D]``, the mask's embedding.
            features: ``[B, L, layers * D]``, the target's states, of which those before an anchor
                are read.
            anchors: ``[B, A]`` int64 in 0..L - 1, the last kept tokens.
        """
        size, blocks = anchors.shape
        columns = torch.arange(self.block_size, device=anchors.device)
        masks = mask.expand(size, blocks, self.block_size - 1, -1)
        hidden = torch.cat([embedded.unsqueeze(2), masks], 2).flatten(1, 2)
        turns = Turns(*self.rotary[0](hidden, (anchors.unsqueeze(2) + columns).flatten(1)))
        read, far = self._context(features)
        seen = torch.arange(read.shape[1], device=anchors.device) < anchors.unsqueeze(2)
        for layer in cast("Sequence[DFlashLayer]", self.layers):
            context = layer.self_attn.keys_values(read, far)
            hidden = layer(hidden, turns, context, seen)
        return self.norm(hidden).unflatten(1, (blocks, -1))[:, :, 1:]

    def _context(self, features: torch.Tensor) -> tuple[torch.Tensor, Turns]:
        """What keys and values are made of, ``[B, L, D]``, and its positions."""
        read = self.hidden_norm(self.fc(features))
        positions = torch.arange(read.shape[1], device=read.device).unsqueeze(0)
        return read, Turns(*self.rotary[0](read, positions))
