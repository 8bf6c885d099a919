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

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    rotate_half,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

#: Cosines and sines ``[B, 1, T, head_dim]`` of positions; keys and values ``[B, kv heads, ...,
#: head_dim]``.
Rotation = KeysValues = tuple[torch.Tensor, torch.Tensor]


def rotated(heads: torch.Tensor, at: Rotation) -> torch.Tensor:
    """Apply the rotary embedding to queries or keys ``[B, H, T, head_dim]``."""
    cos, sin = at
    return heads * cos + rotate_half(heads) * sin


def queries_of(attention: Any, read: torch.Tensor, at: Rotation) -> torch.Tensor:
    """Return the queries ``[B, heads, T, head_dim]`` of ``read`` ``[B, T, read size]``."""
    return rotated(attention.q_norm(_by_head(attention, attention.q_proj(read))), at)


def keys_values_of(attention: Any, read: torch.Tensor, at: Rotation) -> KeysValues:
    """Return the KV, ``[B, kv heads, T, head_dim]`` each, of ``read`` ``[B, T, read size]``."""
    keys = attention.k_norm(_by_head(attention, attention.k_proj(read)))
    return rotated(keys, at), _by_head(attention, attention.v_proj(read))


def _by_head(attention: Any, projected: torch.Tensor) -> torch.Tensor:
    return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def output_of(layer: Any, attended: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return a layer's output ``[B, T, D]`` from the attention output."""
    states = states + layer.self_attn.o_proj(attended)
    return states + layer.mlp(layer.post_attention_layernorm(states))


class Midlayer(LlamaDecoderLayer):
    """EAGLE-3's layer, which reads token and state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, layer_idx=0)
        attention: Any = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            size = attention.get_submodule(name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, size, bias=False))
        attention.q_norm = attention.k_norm = nn.Identity()
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def read(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the attention input ``[B, T, 2 D]`` from tokens and states ``[B, T, D]``."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)


class Head(nn.Module):
    """The parts that both kinds have, by the ``settings`` of a config.json.

    Args:
        layer_ids: of the target's layers whose hidden states the head reads.
    """

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.settings, self.layer_ids = settings, layer_ids
        config: Any = AutoConfig.for_model(**settings)
        try:
            self._rotary = [LlamaRotaryEmbedding(config)]  # in a list, so that it is no submodule
        except KeyError as error:
            raise ValueError(f"config.json: rotary embedding {error} is not known.") from error
        size, self.config = config.hidden_size, config
        self.fc = nn.Linear(len(layer_ids) * size, size, bias=False)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)

    def rotation(self, states: torch.Tensor, positions: torch.Tensor | None = None) -> Rotation:
        """Return the rotation at ``positions`` ``[B, T]``, those from 0 on for None."""
        if positions is None:
            positions = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        cos, sin = self._rotary[0](states, positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)


class Eagle3(Head):
    """An EAGLE-3 head; ``hot`` ``[draft vocabulary]`` int64: the target's ids of its tokens."""

    hot: torch.Tensor

    def __init__(
        self,
        settings: Mapping[str, Any],
        layer_ids: tuple[int, ...],
        hot: torch.Tensor | None = None,
    ) -> None:
        super().__init__(settings, layer_ids)
        whole = torch.arange(self.config.vocab_size)
        self.register_buffer("hot", whole if hot is None else hot, persistent=False)
        self.midlayer = Midlayer(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, len(self.hot), bias=False)

    @property
    def is_hot(self) -> bool:
        """Return whether the head drafts some of the target's tokens alone."""
        return len(self.hot) < self.config.vocab_size

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
        states, layer = self.fc(features), self.midlayer
        read, at = layer.read(embedded, states), self.rotation(states)
        context = keys_values_of(layer.self_attn, read, at)
        queries = queries_of(layer.self_attn, read, at)
        attended = scaled_dot_product_attention(queries, *context, is_causal=True, enable_gqa=True)
        return output_of(layer, attended.transpose(1, 2).flatten(2), states), context

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
        layer, at = self.midlayer, self.rotation(states, positions)
        read = layer.read(embedded, states)
        own.append(keys_values_of(layer.self_attn, read, at))
        keys, values = (torch.stack(parts, 3) for parts in zip(*own, strict=True))
        queries = queries_of(layer.self_attn, read, at).unsqueeze(3)
        return output_of(layer, attend(queries, context, seen, (keys, values)), states)


class DFlashLayer(Qwen3DecoderLayer):
    """A DFlash layer; the context's keys and values are computed from the target's states."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] -- of blocks
        self, hidden: torch.Tensor, at: Rotation, context: KeysValues, seen: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's output ``[B, A * S, D]`` for A blocks of S columns.

        Args:
            hidden: the layer's input, ``[B, A * S, D]``.
            at: of the blocks' positions.
            context: ``[B, kv heads, L, head_dim]``.
            seen: ``[B, A, L]`` bool, as in `attend`.
        """
        attention, blocks = self.self_attn, (seen.shape[1], -1)
        read = self.input_layernorm(hidden)
        keys, values = (part.unflatten(2, blocks) for part in keys_values_of(attention, read, at))
        queries = queries_of(attention, read, at).unflatten(2, blocks)
        return output_of(self, attend(queries, context, seen, (keys, values)), hidden)


class DFlash(Head):
    """A DFlash head; the target embeds its tokens and turns its states into logits."""

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__(settings, layer_ids)
        flat, config = flattened(settings), self.config
        self.mask_token_id, self.block_size = flat["mask_token_id"], flat["block_size"]
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, n) for n in range(config.num_hidden_layers))

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
        near = self.rotation(hidden, (anchors.unsqueeze(2) + columns).flatten(1))
        read = self.hidden_norm(self.fc(features))
        far = self.rotation(read)
        seen = torch.arange(read.shape[1], device=anchors.device) < anchors.unsqueeze(2)
        for layer in cast("Sequence[DFlashLayer]", self.layers):
            hidden = layer(hidden, near, keys_values_of(layer.self_attn, read, far), seen)
        return self.norm(hidden).unflatten(1, (blocks, -1))[:, :, 1:]


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of a head's own section among them."""
    sections = (settings.get(name) or {} for name in ("eagle_config", "dflash_config"))
    return dict(settings) | {key: value for one in sections for key, value in one.items()}


def attend(
    queries: torch.Tensor, context: KeysValues, seen: torch.Tensor, own: KeysValues
) -> torch.Tensor:
    """Compute attention of A short blocks to a masked context and to themselves.

    Args:
        queries: ``[B, H, A, S, head_dim]``, S columns in each block.
        context: ``[B, kv heads, L, head_dim]``.
        seen: ``[B, A, L]`` bool: the context's columns that a block attends to.
        own: ``[B, kv heads, A, T, head_dim]``, all of which the block's queries attend to.

    Returns:
        ``[B, A * S, H * head_dim]``.
    """
    _, _, blocks, width, _ = queries.shape
    both = zip(context, own, strict=True)
    keys, values = (torch.cat([far, near.flatten(2, 3)], 2) for far, near in both)
    itself = torch.eye(blocks, dtype=torch.bool, device=seen.device)
    itself = itself.repeat_interleave(own[0].shape[3], 1)  # [A, A * T]
    mask = torch.cat([seen, itself.expand(len(seen), -1, -1)], 2)
    mask = mask.repeat_interleave(width, 1).unsqueeze(1)  # [B, 1, A * S, L + A * T]
    queries = queries.flatten(2, 3)
    found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return found.transpose(1, 2).flatten(2)


def at_columns(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[B, A, D]`` of ``rows`` ``[B, L, D]`` at ``columns`` ``[B, A]`` int64."""
    return rows.gather(1, columns.unsqueeze(2).expand(-1, -1, rows.shape[2]))
