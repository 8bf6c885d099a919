"""Define mixtures of experts, and the keys by which configurations have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Bytes of a weight in MXFP4: 4 bits, and 8 for each block of 32.
MXFP4_BYTES = 4.25 / 8


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers but the first few."""

    count: int
    per_token: int
    size: int  # of one expert's hidden layer
    dense_layers: int  # leading layers with a dense MLP
    shared: float  # experts that every token visits, of this size
    weight_bytes: float | None = None  # of routed experts; None: as the layers'
    # Share of a pass's tokens that visit no expert which the others do not, in the mean: equal
    # nodes of trees, and routing that is not uniform. 0 is a bound.
    overlap: float = 0.0

    def parameters(self, hidden_size: int, routed: float) -> float:
        """Return the weights of a layer's router and ``routed`` experts."""
        return hidden_size * (3 * self.size * (routed + self.shared) + self.count)

    def visited(self, num_tokens: float) -> float:
        """Return the mean number of experts of a layer that a pass's tokens visit."""
        if math.isinf(num_tokens):
            return self.count
        apart = 1 + (num_tokens - 1) * (1 - self.overlap)
        return self.count * (1 - (1 - self.per_token / self.count) ** apart)


class Keys(NamedTuple):
    """Keys of a configuration with numbers of its experts; None for what it has not."""

    count: str
    per_token: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    dense_layers: str | None = None
    shared: str | None = None  # their number
    shared_size: str | None = None  # of their hidden layers, together

    def read(self, config: Mapping[str, Any], numbers: Callable[..., list[int]]) -> Experts:
        """Return the experts of a configuration; ``numbers`` reads required keys.

        Raises ValueError for layers with and without experts in another order.
        """
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(
                "The configuration has dense MLPs between layers of experts (mlp_only_layers, "
                "decoder_sparse_step). Planned for are mixtures whose dense layers come first."
            )
        count, per_token, size = numbers(self.count, self.per_token, self.size)
        shared = float(config.get(self.shared) or 0) if self.shared else 0.0
        if self.shared_size:
            shared = numbers(self.shared_size)[0] / size
        quantization = config.get("quantization_config") or {}
        return Experts(
            count,
            per_token,
            size,
            dense_layers=numbers(self.dense_layers)[0] if self.dense_layers else 0,
            shared=shared,
            weight_bytes=MXFP4_BYTES if quantization.get("quant_method") == "mxfp4" else None,
        )


_ROUTED = Keys("n_routed_experts", dense_layers="first_k_dense_replace", shared="n_shared_experts")
_LOCAL = Keys("num_local_experts", size="intermediate_size")
_SHARED = Keys("num_experts", shared_size="shared_expert_intermediate_size")

#: By architecture.
MIXTURES = {
    "DeepseekV2ForCausalLM": _ROUTED,
    "DeepseekV3ForCausalLM": _ROUTED,
    "Ernie4_5_MoeForCausalLM": Keys(
        "moe_num_experts",
        "moe_k",
        dense_layers="moe_layer_start_index",
        shared="moe_num_shared_experts",
    ),
    "Glm4MoeForCausalLM": _ROUTED,
    "Glm4MoeLiteForCausalLM": _ROUTED,
    "GptOssForCausalLM": _LOCAL,
    "GraniteMoeForCausalLM": _LOCAL,
    "MiniMaxM2ForCausalLM": _LOCAL,
    "MixtralForCausalLM": _LOCAL,
    "OlmoeForCausalLM": Keys("num_experts", size="intermediate_size"),
    "PhiMoEForCausalLM": _LOCAL,
    "Qwen2MoeForCausalLM": _SHARED,
    "Qwen3MoeForCausalLM": Keys("num_experts"),
    "Qwen3_5MoeForCausalLM": _SHARED,
}
