"""Define the two kinds of heads, with the parameter names of SGLang's checkpoints.

*EAGLE-3*: one layer that reads a token and the target's hidden states before it. Column i holds
the pair (token i + 1, the target's states at i) at position i, and predicts token i + 2. Behind
the last kept token the target's states are not available: there the head reads its own output of
the column before, taken ahead of its last norm. Training does the same for as many columns as a
round drafts ("training-time test", Li et al. 2025, arXiv 2503.01840).

*DFlash*: a few layers that fill a block of masks in one pass. A block is the last kept token and
masks behind it. It attends to the kept columns before it, with keys and values computed from
the target's states, and to all of itself, in both directions. Its output at a mask predicts the
token of that position, so that a block's distribution is the product of its columns'
distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang_smc.tools.distill.layers import (
    HeadShape,
    KeysValues,
    Mlp,
    Projections,
    Turns,
    at_columns,
    attend,
)


class Midlayer(nn.Module):
    """EAGLE-3's decoder layer; its attention reads token and state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Projections(shape, 2 * shape.hidden_size, norms=False)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def read(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the attention input ``[B, T, 2 D]`` from tokens and states ``[B, T, D]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)

    def finish(self, attended: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output ``[B, T, D]`` from the attention output."""
        states = states + self.self_attn.o_proj(attended)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3(nn.Module):
    """An EAGLE-3 head; ``hot`` ``[draft vocabulary]`` int64: the target's ids of its tokens."""

    hot: torch.Tensor

    def __init__(
        self, shape: HeadShape, rotary: LlamaRotaryEmbedding, hot: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.shape, self.rotary = shape, [rotary]  # in a list, so that it is no submodule
        whole = torch.arange(shape.vocab_size)
        self.register_buffer("hot", whole if hot is None else hot, persistent=False)
        self.fc = nn.Linear(len(shape.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(self.hot), bias=False)

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Return the logits ``[B, A, depth, draft vocabulary]`` of the tokens behind each anchor.

        Args:
            embedded: ``[B, L, D]``, the texts' tokens; those behind an anchor count as drafted.
            features: ``[B, L, layers * D]``, the target's states, of which those before an anchor
                are read.
            anchors: ``[B, A]`` int64 in 1..L - 1, the last kept tokens.
            depth: number of drafted tokens, 1 or more.
        """
        columns = anchors - 1
        states, context = self._whole(embedded[:, 1:], features[:, :-1])
        seen = torch.arange(states.shape[1], device=anchors.device) <= columns.unsqueeze(2)
        drafts = [at_columns(states, columns)]  # each [B, A, D]
        own: list[KeysValues] = []
        for step in range(1, depth):
            token = at_columns(embedded, (anchors + step).clamp_max(embedded.shape[1] - 1))
            drafts.append(self._next(token, drafts[-1], columns + step, context, seen, own))
        return self.lm_head(self.norm(torch.stack(drafts, 2)))

    def _whole(
        self, embedded: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, KeysValues]:
        """Run all columns on the target's states: outputs ``[B, L - 1, D]``, keys and values."""
        states = self.fc(features)
        positions = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        turns = Turns(*self.rotary[0](states, positions))
        layer = self.midlayer
        read = layer.read(embedded, states)
        context = layer.self_attn.keys_values(read, turns)
        attended = scaled_dot_product_attention(
            layer.self_attn.queries(read, turns), *context, is_causal=True, enable_gqa=True
        )
        return layer.finish(attended.transpose(1, 2).flatten(2), states), context

    def _next(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        context: KeysValues,
        seen: torch.Tensor,
        own: list[KeysValues],
    ) -> torch.Tensor:
        """Return one more column ``[B, A, D]`` behind each anchor, and append its KV to ``own``."""
        turns = Turns(*self.rotary[0](states, positions))
        layer = self.midlayer
        read = layer.read(embedded, states)
        own.append(layer.self_attn.keys_values(read, turns))
        remembered = KeysValues(
            torch.stack([one.keys for one in own], 3), torch.stack([one.values for one in own], 3)
        )
        queries = layer.self_attn.queries(read, turns).unsqueeze(3)
        return layer.finish(attend(queries, context, seen, remembered), states)


class DFlashLayer(nn.Module):
    """A DFlash layer; the context's keys and values are computed from the target's states."""

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
        """Return the layer's output ``[B, A * S, D]`` for A blocks of S columns.

        Args:
            hidden: the layer's input, ``[B, A * S, D]``.
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
    """A DFlash head; the target embeds its tokens and turns its states into logits."""

    def __init__(
        self, shape: HeadShape, rotary: LlamaRotaryEmbedding, mask_token_id: int, block_size: int
    ) -> None:
        super().__init__()
        self.shape, self.rotary = shape, [rotary]  # in a list, so that it is no submodule
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
        """Return normed states ``[B, A, block size - 1, D]`` of the masks behind each anchor.

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
        """Return the input of the context's KV, ``[B, L, D]``, and its rotary embedding."""
        read = self.hidden_norm(self.fc(features))
        positions = torch.arange(read.shape[1], device=read.device).unsqueeze(0)
        return read, Turns(*self.rotary[0](read, positions))
