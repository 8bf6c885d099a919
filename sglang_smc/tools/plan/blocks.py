"""Describe differences from a dense decoder: windows, latents, experts, recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Architectures with one full-attention layer in every so many, if a configuration sets none.
WINDOWED = {
    "Gemma2ForCausalLM": 2,
    "Gemma3ForCausalLM": 6,
    "Cohere2ForCausalLM": 4,
    "Olmo3ForCausalLM": 4,
}
#: Architectures with latent attention and experts, and the keys of their sizes.
ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
REQUIRED = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "first_k_dense_replace",
)


@dataclass(frozen=True)
class Windows:
    """Sliding-window layers."""

    layers: int
    size: int  # keys that a query attends to, including its own

    def seen(self, context: float, num_layers: int) -> float:
        """Return the mean number of ``context`` tokens that a query attends to in a layer."""
        within = min(context, self.size)
        return (self.layers * within + (num_layers - self.layers) * context) / num_layers


#: Architectures with linear attention in all layers but one of every so many.
RECURRENT = ("Qwen3_5ForCausalLM",)
RECURRENT_REQUIRED = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "full_attention_interval"),
)
STATE_NUMBER_BYTES = 4  # SGLang's --mamba-ssm-dtype, by default


@dataclass(frozen=True)
class States:
    """Linear-attention layers with a gated delta rule: a state matrix for each value head."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Return the bytes of one sequence's states, in all layers."""
        one = self.value_heads * self.key_dim * self.value_dim
        return self.layers * one * STATE_NUMBER_BYTES

    @property
    def flops(self) -> int:
        """Return the operations for one token in all layers: decay, S k, the update and S q."""
        return 8 * self.bytes // STATE_NUMBER_BYTES

    def parameters(self, hidden_size: int) -> int:
        """Return the weights of one layer's projections."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        queries_keys_values_gate = 2 * keys + 2 * values
        return hidden_size * (queries_keys_values_gate + 2 * self.value_heads + values)


@dataclass(frozen=True)
class Latents:
    """Latent attention (MLA): one latent of ``rank + rope`` numbers a token, for all heads."""

    rank: int
    rope: int
    key_dim: int  # of a head's keys, without the rotary part
    value_dim: int
    query_rank: int | None  # of the queries' latent, if they have one
    copies: int = 1  # of the cache: tensor parallelism splits heads, and a latent has none

    @property
    def width(self) -> int:
        return self.rank + self.rope

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the weights of a layer's projections."""
        query = num_heads * (self.key_dim + self.rope)
        queries = hidden_size * query
        if self.query_rank:
            queries = self.query_rank * (hidden_size + query)
        made_of_latents = self.rank * num_heads * (self.key_dim + self.value_dim)
        output = num_heads * self.value_dim * hidden_size
        return queries + hidden_size * self.width + made_of_latents + output

    def flops(self, num_heads: int) -> int:
        """Return the operations for one query and one latent: score and weighted value."""
        return 2 * num_heads * (self.width + self.rank)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers but the first few."""

    count: int
    per_token: int
    size: int  # of one expert's hidden layer
    shared: int  # experts that every token visits
    dense_layers: int  # leading layers with a dense MLP

    def parameters(self, hidden_size: int, routed: float | None = None) -> float:
        """Return the weights of a layer's router and ``routed`` experts (None for all)."""
        routed = self.count if routed is None else routed
        return hidden_size * (3 * self.size * (routed + self.shared) + self.count)

    def visited(self, num_tokens: float) -> float:
        """Return the mean number of experts that so many tokens visit under uniform routing."""
        return self.count * (1 - (1 - self.per_token / self.count) ** num_tokens)


def latents_of(config: Mapping[str, Any]) -> Latents:
    """Return the latent attention of a configuration of the `ARCHITECTURES`."""
    return Latents(
        rank=config["kv_lora_rank"],
        rope=config["qk_rope_head_dim"],
        key_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        query_rank=config.get("q_lora_rank"),
    )


def experts_of(config: Mapping[str, Any]) -> Experts:
    """Return the experts of a configuration of the `ARCHITECTURES`."""
    return Experts(
        count=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        shared=config.get("n_shared_experts") or 0,
        dense_layers=config["first_k_dense_replace"],
    )


def windows_of(config: Mapping[str, Any]) -> Windows:
    """Return the windows, from the layers' types or their repeating pattern."""
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    usual = WINDOWED[config["architectures"][0]]
    pattern = config.get("sliding_window_pattern") or usual
    all_but = num_layers - num_layers // pattern
    count = types.count("sliding_attention") if types else all_but
    return Windows(count, config["sliding_window"])


def states_of(config: Mapping[str, Any]) -> States:
    """Return the recurrent states of a configuration of the `RECURRENT`."""
    num_layers = config["num_hidden_layers"]
    return States(
        layers=num_layers - num_layers // config["full_attention_interval"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )
