"""The two kinds of heads, with the names that SGLang's checkpoints have.

*EAGLE-3*: one layer that reads a token and what the target thought before it. Column i holds the
pair (token i + 1, the target's states at i) at position i, and tells of token i + 2. Behind the
last kept token no states of the target's are known: there the head goes on with its own output of
the column before, taken ahead of its last norm. Training does the same for as many columns as a
round drafts ("training-time test", Li et al. 2025, arXiv 2503.01840).

*DFlash*: a few layers that fill a block of masks in one pass. A block is the last kept token and
masks behind it. It sees the kept columns before it as keys and values of the target's states, and
all of itself, in both directions. Its output at a mask tells of the token that belongs there, so
that a block's law is the product of its columns' laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang_smc.distill.layers import (
    HeadShape,
    KeysValues,
    Mlp,
    Projections,
    Turns,
    at_columns,
    attend,
)


class Midlayer(nn.Module):
    """The layer; its attention reads token and state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Projections(shape, 2 * shape.hidden_size, norms=False)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def read(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """``[B, T, 2 D]`` of tokens and states ``[B, T, D]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)

    def finish(self, attended: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The layer's output ``[B, T, D]``, behind attention."""
        states = states + self.self_attn.o_proj(attended)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3(nn.Module):
    """The head; ``hot`` ``[draft vocabulary]`` int64 are the target's ids of its tokens."""

    hot: torch.Tensor

    def __init__(
        self, shape: HeadShape, rotary: LlamaRotaryEmbedding, hot: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.shape, self.rotary = shape, [rotary]  # in a list: it has no parameters to be saved
        whole = torch.arange(shape.vocab_size)
        self.register_buffer("hot", whole if hot is None else hot, persistent=False)
        self.fc = nn.Linear(len(shape.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(self.hot), bias=False)

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Logits ``[B, A, depth, draft vocabulary]`` of the tokens behind each anchor.

        Args:
            embedded: ``[B, L, D]``, the texts' tokens. What stands behind an anchor is drafted.
            features: ``[B, L, layers * D]``, the target's states, of which those before an anchor
                are read.
            anchors: ``[B, A]`` int64 in 1..L - 1, the last kept tokens.
            depth: how many tokens are drafted, 1 or more.
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
        """All columns on the target's states: outputs ``[B, L - 1, D]``, and what they remember."""
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
        """One more column ``[B, A, D]`` behind each anchor, which ``own`` remembers, too."""
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
