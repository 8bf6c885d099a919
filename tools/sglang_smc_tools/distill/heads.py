"""Define the kinds of heads, with the parameter names of SGLang's checkpoints.

*EAGLE-3*: one layer that reads a token and the target's hidden states before it. Column i holds
the pair (token i + 1, the target's states at i) at position i, and predicts token i + 2. Behind
the last kept token the target's states are not available: there the head reads its own output of
the column before, taken ahead of its last norm. Training does the same for as many columns as a
round drafts ("training-time test", Li et al. 2025, arXiv 2503.01840).

*MTP* (multi-token prediction, arXiv 2412.19437, section 2.2; here MiMo's layer): the same, but it
reads the target's last hidden state alone, and its own behind its last norm; the target embeds its
tokens and turns its states into logits.

*DFlash*: a few layers that fill a block of masks in one pass. A block is the last kept token and
masks behind it. It attends to the kept columns before it, with keys and values computed from
the target's states, and to all of itself, in both directions. Its output at a mask predicts the
token of that position, so that a block's distribution is the product of its columns'
distributions.

*DSpark* (arXiv 2607.05147): a DFlash block with a Markov head, which adds to a column's logits by
the token before it; the first column, that of the last kept token, drafts as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    rotate_half,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``[B, T, head_dim]`` of some positions."""


class Midlayer(LlamaDecoderLayer):
    """EAGLE-3's layer, which reads token and state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, layer_idx=0)
        attention: Any = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            size = attention.get_submodule(name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, size, bias=False))
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] -- of tokens and states
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        at: Rotation,
        cache: DynamicCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output ``[B, T, D]`` from tokens and states ``[B, T, D]``.

        Args:
            cache: the columns before, to which these are added.
            mask: ``[B, 1, T, columns]`` bool, those that each attends to; None for all before it.
        """
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        attended, _ = self.self_attn(read, at, mask, past_key_values=cache)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class MTPLayer(Qwen2DecoderLayer):
    """MiMo's MTP layer, which reads state and token side by side and norms its output."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, layer_idx=0)
        size = config.hidden_size
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        norms = (nn.RMSNorm(size, config.rms_norm_eps) for _ in range(3))
        self.hidden_layernorm, self.token_layernorm, self.final_layernorm = norms

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] -- of tokens and states
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        at: Rotation,
        cache: DynamicCache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output ``[B, T, D]``; arguments as for `Midlayer.forward`."""
        read = torch.cat([self.hidden_layernorm(states), self.token_layernorm(embedded)], -1)
        of_layer = {"past_key_values": cache, "position_embeddings": at}
        return self.final_layernorm(super().forward(self.input_proj(read), mask, **of_layer))


class Head(nn.Module):
    """The parts that all kinds have, by the ``settings`` of a config.json.

    Args:
        layer_ids: of the target's layers whose hidden states the head reads.
    """

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.settings = settings
        self.layer_ids = layer_ids
        config: Any = AutoConfig.for_model(**settings, attn_implementation="sdpa")
        try:
            self._rotary = [LlamaRotaryEmbedding(config)]  # in a list, so that it is no submodule
        except KeyError as error:
            raise ValueError(f"config.json: rotary embedding {error} is not known.") from error
        self.config = config

    def rotation(self, states: torch.Tensor, positions: torch.Tensor | None = None) -> Rotation:
        """Return the rotation at ``positions`` ``[B, T]``, those from 0 on for None."""
        if positions is None:
            positions = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        return self._rotary[0](states, positions)

    def drafted(
        self,
        layer: nn.Module,
        embedded: torch.Tensor,
        states: torch.Tensor,
        anchors: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Return a layer's outputs ``[B, A, depth, D]`` for the tokens behind each anchor.

        Args:
            layer: as `Midlayer`.
            embedded: ``[B, L, D]``, the texts' tokens; those behind an anchor count as drafted.
            states: ``[B, L, D]``, of which those before an anchor are read.
            anchors: ``[B, A]`` int64 in 1..L - 1, the last kept tokens.
            depth: number of drafted tokens, 1 or more.
        """
        columns = anchors - 1
        cache = DynamicCache()
        states = states[:, :-1]
        states = layer(embedded[:, 1:], states, self.rotation(states), cache)
        drafts = [at_columns(states, columns)]  # each [B, A, D]
        seen, own = visible(anchors, states.shape[1], 1)
        for step in range(1, depth):
            token = at_columns(embedded, (anchors + step).clamp_max(embedded.shape[1] - 1))
            seen = torch.cat([seen, own], 3)
            at = self.rotation(token, columns + step)
            drafts.append(layer(token, drafts[-1], at, cache, seen))
        return torch.stack(drafts, 2)


class LayersHead(Head):
    """A head over the states of several layers of the target, projected to its width."""

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__(settings, layer_ids)
        size = self.config.hidden_size
        self.fc = nn.Linear(len(layer_ids) * size, size, bias=False)
        self.norm = nn.RMSNorm(size, self.config.rms_norm_eps)


class MTP(Head):
    """An MTP layer; the target embeds its tokens and turns its states into logits."""

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__(settings, layer_ids)
        self.layer = MTPLayer(self.config)

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Return normed states ``[B, A, depth, D]``; arguments as for `Head.drafted`."""
        # SGLang's class masks the token of the pair at position 0.
        embedded = embedded.index_fill(1, anchors.new_ones(1), 0.0)
        return self.drafted(self.layer, embedded, features, anchors, depth)


class Eagle3(LayersHead):
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

        ``features`` are ``[B, L, layers * D]``, the target's; others as for `Head.drafted`.
        """
        states = self.drafted(self.midlayer, embedded, self.fc(features), anchors, depth)
        return self.lm_head(self.norm(states))


class DFlash(LayersHead):
    """A DFlash head; the target embeds its tokens and turns its states into logits.

    Attributes:
        first: the column that drafts the first token; 0 is that of the last kept token.
    """

    first: int
    from_anchor = False  # unless the settings say so

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__(settings, layer_ids)
        flat = flattened(settings)
        config = self.config
        self.mask_token_id = flat["mask_token_id"]
        self.block_size = flat["block_size"]
        self.first = int(not settings.get("sample_from_anchor", self.from_anchor))
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, n) for n in range(config.num_hidden_layers)
        )

    def forward(
        self,
        embedded: torch.Tensor,
        mask: torch.Tensor,
        features: torch.Tensor,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """Return normed states ``[B, A, block size - first, D]`` of each anchor's columns.

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
        seen, own = visible(anchors, read.shape[1], self.block_size)
        seen = torch.cat([seen, own], 3)
        cache = DynamicCache()
        for number, layer in enumerate(self.layers):
            keys, values = keys_values_of(layer.self_attn, read, far)
            cache.update(keys, values, number)
            hidden = layer(hidden, seen, past_key_values=cache, position_embeddings=near)
        return self.norm(hidden).unflatten(1, (blocks, -1))[:, :, self.first :]


class DSpark(DFlash):
    """A DSpark head with SGLang's vanilla Markov head."""

    from_anchor = True

    def __init__(self, settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> None:
        super().__init__(settings, layer_ids)
        size = self.config.vocab_size
        rank = settings["markov_rank"]
        parts = {"markov_w1": nn.Embedding(size, rank), "markov_w2": nn.Linear(rank, size, False)}
        self.markov_head = nn.ModuleDict(parts)

    def bias(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what is added ``[..., V]`` to the logits behind ``tokens`` ``[...]`` int64."""
        return self.markov_head["markov_w2"](self.markov_head["markov_w1"](tokens))


def keys_values_of(attention: Any, read: torch.Tensor, at: Rotation) -> list[torch.Tensor]:
    """Return the KV, ``[B, kv heads, T, head_dim]`` each, of ``read`` ``[B, T, D]``."""
    keys, values = (
        project(read).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.k_proj, attention.v_proj)
    )
    keys = attention.k_norm(keys)
    cos, sin = (part.unsqueeze(2) for part in at)
    return [part.transpose(1, 2) for part in (keys * cos + rotate_half(keys) * sin, values)]


def visible(anchors: torch.Tensor, length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the columns of each block attend to: of the text, and of all blocks.

    Args:
        anchors: ``[B, A]`` int64; a block attends to the text's columns before its anchor.
        length: L, of the text.
        width: S, of a block.

    Returns:
        ``[B, 1, A * S, L]`` and ``[B, 1, A * S, A * S]`` bool.
    """
    size, blocks = anchors.shape
    seen = torch.arange(length, device=anchors.device) < anchors.unsqueeze(2)
    number = torch.arange(blocks, device=anchors.device).repeat_interleave(width)
    own = number.unsqueeze(1) == number
    return seen.repeat_interleave(width, 1).unsqueeze(1), own.expand(size, 1, -1, -1)


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of a head's own section among them."""
    sections = (settings.get(name) or {} for name in ("eagle_config", "dflash_config"))
    return dict(settings) | {key: value for one in sections for key, value in one.items()}


def at_columns(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[B, A, D]`` of ``rows`` ``[B, L, D]`` at ``columns`` ``[B, A]`` int64."""
    return rows.gather(1, columns.unsqueeze(2).expand(-1, -1, rows.shape[2]))
