"""What is not as in a dense decoder: windows, latents, experts, recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Architectures with windows in all layers but each so-manieth, where a configuration says nothing.
WINDOWED = {
    "Gemma2ForCausalLM": 2,
    "Gemma3ForCausalLM": 6,
    "Cohere2ForCausalLM": 4,
    "Olmo3ForCausalLM": 4,
}
#: Architectures whose layers have both, with the keys that say how large they are.
ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
REQUIRED = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "first_k_dense_replace",
)


@dataclass(frozen=True)
class Windows:
    """Layers that see the end of the text alone."""

    layers: int
    size: int  # keys that a query sees, its own among them

    def seen(self, context: float, num_layers: int) -> float:
        """Of ``context`` tokens, how many a query sees in a layer on average."""
        within = min(context, self.size)
        return (self.layers * within + (num_layers - self.layers) * context) / num_layers


#: Architectures whose layers attend linearly, but each so-manieth.
RECURRENT = ("Qwen3_5ForCausalLM",)
RECURRENT_REQUIRED = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "full_attention_interval"),
)
STATE_NUMBER_BYTES = 4  # SGLang's --mamba-ssm-dtype, by default


@dataclass(frozen=True)
class States:
    """Layers that attend linearly, by a gated delta rule: a matrix for each value head."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Of one text, in all layers."""
        one = self.value_heads * self.key_dim * self.value_dim
        return self.layers * one * STATE_NUMBER_BYTES

    @property
    def flops(self) -> int:
        """Operations for one token in all layers: decay, S k, the update and S q."""
        return 8 * self.bytes // STATE_NUMBER_BYTES

    def parameters(self, hidden_size: int) -> int:
        """Weights of one layer's projections."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        queries_keys_values_gate = 2 * keys + 2 * values
        return hidden_size * (queries_keys_values_gate + 2 * self.value_heads + values)


@dataclass(frozen=True)
class Latents:
    """Latent attention (MLA): one latent of ``rank + rope`` numbers a token, for all heads."""

    rank: int
    rope: int
    key_dim: int  # of a head's keys, beside the rotary part
    value_dim: int
    query_rank: int | None  # of the queries' own latent, if they have one
    copies: int = 1  # of the cache: tensor parallelism splits heads, of which a latent has none

    @property
    def width(self) -> int:
        return self.rank + self.rope

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Weights of a layer's projections."""
        query = num_heads * (self.key_dim + self.rope)
        queries = hidden_size * query
        if self.query_rank:
            queries = self.query_rank * (hidden_size + query)
        made_of_latents = self.rank * num_heads * (self.key_dim + self.value_dim)
        output = num_heads * self.value_dim * hidden_size
        return queries + hidden_size * self.width + made_of_latents + output

    def flops(self, num_heads: int) -> int:
        """Operations for one query and one latent: a product with all of it, and its value."""
        return 2 * num_heads * (self.width + self.rank)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers but the first few."""

    count: int
    per_token: int
    size: int  # the width of one
    shared: int  # experts that every token visits
    dense_layers: int  # the first, with an MLP of the ordinary size

    def parameters(self, hidden_size: int, routed: float | None = None) -> float:
        """Weights of a layer's experts and its router, with ``routed`` experts; None for all."""
        routed = self.count if routed is None else routed
        return hidden_size * (3 * self.size * (routed + self.shared) + self.count)

    def visited(self, num_tokens: float) -> float:
        """Experts that so many tokens visit on average, were each as likely as any other."""
        return self.count * (1 - (1 - self.per_token / self.count) ** num_tokens)


def latents_of(config: Mapping[str, Any]) -> Latents:
    """From a configuration of the `ARCHITECTURES`."""
    return Latents(
        rank=config["kv_lora_rank"],
        rope=config["qk_rope_head_dim"],
        key_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        query_rank=config.get("q_lora_rank"),
    )


def experts_of(config: Mapping[str, Any]) -> Experts:
    """From a configuration of the `ARCHITECTURES`."""
    return Experts(
        count=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        shared=config.get("n_shared_experts") or 0,
        dense_layers=config["first_k_dense_replace"],
    )


def windows_of(config: Mapping[str, Any]) -> Windows:
    """From the layers' types, or the pattern in which they follow each other."""
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    usual = WINDOWED[config["architectures"][0]]
    pattern = config.get("sliding_window_pattern") or usual
    all_but = num_layers - num_layers // pattern
    count = types.count("sliding_attention") if types else all_but
    return Windows(count, config["sliding_window"])


def states_of(config: Mapping[str, Any]) -> States:
    """From a configuration of the `RECURRENT`."""
    num_layers = config["num_hidden_layers"]
    return States(
        layers=num_layers - num_layers // config["full_attention_interval"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )
