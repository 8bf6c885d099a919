"""Compute a decoder's weights, traffic and operations from its configuration.

Dense decoders, and what differs from one: windows, latents, experts, recurrent states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
Source = str | Path | Config
"""A Hugging Face ``config.json``, its folder, its contents, or a built-in name."""

SIXTEEN_BIT = 2.0
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

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the weights of a layer's projections."""
        query = num_heads * (self.key_dim + self.rope)
        queries = hidden_size * query
        if self.query_rank:
            queries = self.query_rank * (hidden_size + query)
        made_of_latents = self.rank * num_heads * (self.key_dim + self.value_dim)
        output = num_heads * self.value_dim * hidden_size
        return queries + hidden_size * (self.rank + self.rope) + made_of_latents + output


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers but the first few."""

    count: int
    per_token: int
    size: int  # of one expert's hidden layer
    dense_layers: int  # leading layers with a dense MLP
    shared: int  # experts that every token visits

    def parameters(self, hidden_size: int, routed: float) -> float:
        """Return the weights of a layer's router and ``routed`` experts."""
        return hidden_size * (3 * self.size * (routed + self.shared) + self.count)

    def visited(self, num_tokens: float) -> float:
        """Return the mean number of experts that so many tokens visit under uniform routing."""
        return self.count * (1 - (1 - self.per_token / self.count) ** num_tokens)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Norms and biases are left out: below 0.1 % of all weights."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    weight_bytes: float = SIXTEEN_BIT  # a weight of a layer: 2 bf16, 1 fp8, 4 float32
    kv_bytes: float = SIXTEEN_BIT  # a number in the KV cache
    latents: Latents | None = None  # MLA, in place of keys and values of each head
    experts: Experts | None = None  # in place of the MLP
    states: States | None = None  # of some layers, in place of KV; queries elsewhere are gated
    windowed_layers: int = 0
    window: int = 0  # keys that a query attends to in these layers, including its own

    def _weights_of_layers(self, routed: float) -> float:
        """Return the weights of all layers with ``routed`` experts each."""
        sparse, num_dense = 0.0, self.num_layers
        if self.experts is not None:
            num_dense = self.experts.dense_layers
            each = self.experts.parameters(self.hidden_size, routed)
            sparse = (self.num_layers - num_dense) * each
        dense = 3 * num_dense * self.hidden_size * self.intermediate_size
        attention = self._attending_layers * self._attention_parameters
        if self.states is not None:
            attention += self.states.layers * self.states.parameters(self.hidden_size)
        return attention + dense + sparse

    @property
    def _attending_layers(self) -> int:
        """Return the number of layers that keep keys or latents."""
        return self.num_layers - (self.states.layers if self.states else 0)

    @property
    def _attention_parameters(self) -> int:
        if self.latents is not None:
            return self.latents.parameters(self.hidden_size, self.num_heads)
        projections = 2 if self.states is None else 3  # queries, the output, and the output's gate
        queries = projections * self.num_heads * self.head_dim
        return self.hidden_size * (queries + 2 * self.num_kv_heads * self.head_dim)

    @property
    def layer_parameters(self) -> int:
        """Return the weights of all layers together."""
        return int(self._weights_of_layers(self.experts.count if self.experts else 0))

    @property
    def active_parameters(self) -> float:
        """Return the weights of all layers that one token is multiplied by."""
        return self._weights_of_layers(self.experts.per_token if self.experts else 0)

    @property
    def head_parameters(self) -> int:
        """Return the weights of the LM head, as many as the embedding table's."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        return self.layer_parameters + tables * self.head_parameters

    @property
    def head_bytes(self) -> float:
        """Return the bytes per weight of the LM head: SGLang quantizes only the layers."""
        return max(self.weight_bytes, SIXTEEN_BIT)

    @property
    def streamed_bytes(self) -> float:
        """Return the bytes of weights that one pass reads at most: the layers and the LM head.

        Of the embedding table a pass looks up a few rows, which do not count.
        """
        return self.layer_parameters * self.weight_bytes + self.head_parameters * self.head_bytes

    def bytes_read(self, num_tokens: float, *, with_head: bool = True) -> float:
        """Return the bytes of weights that a pass reads: of experts, those that tokens visit."""
        visited = self.experts.visited(num_tokens) if self.experts else 0
        layers = self._weights_of_layers(visited) * self.weight_bytes
        return layers + (self.head_parameters * self.head_bytes if with_head else 0)

    @property
    def resident_bytes(self) -> float:
        """Return the bytes of weights in the device's memory."""
        embedding = 0.0 if self.tied_embeddings else self.head_parameters * self.head_bytes
        return self.streamed_bytes + embedding

    @property
    def kv_bytes_per_token(self) -> float:
        if self.latents is not None:
            width = self.latents.rank + self.latents.rope
            return self.num_layers * self.latents.copies * width * self.kv_bytes
        return 2 * self._attending_layers * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def attention_flops(self) -> int:
        """Return the operations for one query and key in all layers: score and weighted value."""
        if self.latents is not None:
            both = 2 * self.latents.rank + self.latents.rope
            return 2 * self.num_layers * self.num_heads * both
        return 4 * self._attending_layers * self.num_heads * self.head_dim

    def seen(self, context: float) -> float:
        """Return the mean number of ``context`` tokens that a query attends to in a layer."""
        if not self.windowed_layers:
            return context
        whole = self.num_layers - self.windowed_layers
        within = min(context, self.window)
        return (self.windowed_layers * within + whole * context) / self.num_layers

    def on_devices(self, count: int) -> ModelShape:
        """Return the model on ``count`` devices that split every pass; latents are replicated."""
        if self.latents is None:
            return self
        return replace(self, latents=replace(self.latents, copies=count))

    def in_precision(self, weight_bytes: float | None) -> ModelShape:
        """Return the model with weights of ``weight_bytes``, or with its own for None.

        The KV cache is in 16 bits, or in 32 if the weights are.
        """
        weight_bytes = weight_bytes or self.weight_bytes
        return replace(self, weight_bytes=weight_bytes, kv_bytes=max(weight_bytes, SIXTEEN_BIT))


def _llama(layers: int, hidden: int, mlp: int, heads: int, head_dim: int, tied: bool) -> ModelShape:
    return ModelShape(layers, hidden, mlp, heads, 8, head_dim, 128256, tied)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(layers, hidden, mlp, heads, 8, 128, 151936, tied)


#: From each model's config.json.
BUILT_IN = {
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 128, tied=False),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 128, tied=False),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 64, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 128, tied=True),
    "llama-3.3-70b": _llama(80, 8192, 28672, 64, 128, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, tied=False),
}

# --- Configurations

FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt_fp8")


def numbers_of(config: Config, *keys: str) -> list[int]:
    """Return the whole numbers behind ``keys``; raise ValueError if some are missing."""
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"The configuration says no whole number for {', '.join(missing)}.")
    return [config[key] for key in keys]


def _nothing_more(config: Config) -> dict[str, Any]:
    """Refuse a window on a family that is planned without one."""
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ValueError(
            f"The configuration limits attention to a window of {config['sliding_window']} "
            "tokens. Only attention to the whole context is planned for."
        )
    return {}


def _latents_and_experts(config: Config) -> dict[str, Any]:
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latents = Latents(*numbers_of(config, *sizes), query_rank=config.get("q_lora_rank"))
    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    counts = numbers_of(config, *sizes, "first_k_dense_replace")
    experts = Experts(*counts, shared=config.get("n_shared_experts") or 0)
    return {"latents": latents, "experts": experts, **_nothing_more(config)}


def _states(config: Config) -> dict[str, Any]:
    heads = ("linear_num_key_heads", "linear_num_value_heads")
    sizes = numbers_of(config, *heads, "linear_key_head_dim", "linear_value_head_dim")
    (interval,), num_layers = (
        numbers_of(config, "full_attention_interval"),
        config["num_hidden_layers"],
    )
    linear = num_layers - num_layers // interval
    return {"states": States(linear, *sizes), **_nothing_more(config)}


def _windows(full_every: int) -> Callable[[Config], dict[str, Any]]:
    """Return a reader of windows, by the layers' types or their repeating pattern.

    Args:
        full_every: layers of which one attends to everything, if the configuration sets none.
    """

    def read(config: Config) -> dict[str, Any]:
        (window,), num_layers = numbers_of(config, "sliding_window"), config["num_hidden_layers"]
        types = config.get("layer_types")
        every = config.get("sliding_window_pattern") or full_every
        patterned = num_layers - num_layers // every
        count = types.count("sliding_attention") if types else patterned
        return {"windowed_layers": count, "window": window}

    return read


#: How each architecture differs from grouped heads, a gated MLP of three matrices and an LM head.
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WINDOWED = {
    "Gemma2ForCausalLM": _windows(2),
    "Gemma3ForCausalLM": _windows(6),
    "Cohere2ForCausalLM": _windows(4),
    "Olmo3ForCausalLM": _windows(4),
}
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
RECURRENT = ("Qwen3_5ForCausalLM",)  # linear attention in all layers but one of every so many
FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    **dict.fromkeys(DENSE, _nothing_more),
    **WINDOWED,
    **dict.fromkeys(LATENT, _latents_and_experts),
    **dict.fromkeys(RECURRENT, _states),
}
#: Classes with images, and the architecture of their text decoder.
TEXT_OF_IMAGES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
}
#: Heads, which only draft: `proposals` describes their sizes.
EAGLE3, DFLASH = "LlamaForCausalLMEagle3", "DFlashDraftModel"


def from_config(source: Source, weight_bytes: float | None = None) -> ModelShape:
    """Return the shape of a model.

    ``weight_bytes`` overrides the configuration: 1 if it is quantized to 8 bits, otherwise 2, since
    SGLang serves float32 checkpoints in 16 bits as well.

    Raises ValueError for anything but the `FAMILIES`, alone or below images.
    """
    found = built_in(source, BUILT_IN) or _parse(contents(source, BUILT_IN))
    return found.in_precision(weight_bytes)


def built_in(source: Source, known: Mapping[str, Any]) -> Any:
    """Return the entry of ``known`` named ``source``, case-insensitive; None if there is none."""
    return None if isinstance(source, Mapping) else known.get(str(source).lower())


def contents(source: Source, known: Iterable[str] = ()) -> Config:
    """Return a configuration's contents; raise ValueError, naming the ``known``, without one."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{str(source)!r} is neither a config.json, nor a folder with one, nor one of "
            f"{', '.join(known)}. For a model of the Hub, download its config.json."
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def architecture(config: Config) -> str:
    """Return the configuration's first architecture; ``none`` if it has none."""
    return (config.get("architectures") or ["none"])[0]


def _parse(config: Config) -> ModelShape:
    name = architecture(config)
    if name in TEXT_OF_IMAGES:
        shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config, name = {**shared, **config["text_config"]}, TEXT_OF_IMAGES[name]
    if name not in FAMILIES:
        raise ValueError(
            f"The configuration's architecture is {name}. Planned for are dense decoders, "
            f"{', '.join(DENSE)}, with windows {', '.join(WINDOWED)}, of latent attention and "
            f"experts {', '.join(LATENT)}, with states {', '.join(RECURRENT)}, and with images "
            f"{', '.join(TEXT_OF_IMAGES)}; as drafts, {EAGLE3} and {DFLASH}, too."
        )
    tied = config.get("tie_word_embeddings", False)
    return replace(dense(config, "vocab_size", tied=tied), **FAMILIES[name](config))


def dense(config: Config, vocab_key: str | None, *, tied: bool) -> ModelShape:
    """Return the shape by the keys of a dense decoder, with the vocabulary of ``vocab_key``.

    Without a ``vocab_key`` it has no LM head.
    """
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    layers, hidden, mlp, heads = numbers_of(config, *sizes)
    return ModelShape(
        layers,
        hidden,
        mlp,
        heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=numbers_of(config, vocab_key)[0] if vocab_key else 0,
        tied_embeddings=tied,
        weight_bytes=quantized_bytes(config.get("quantization_config")),
    )


def quantized_bytes(quantization: Config | None) -> float:
    """Return the bytes per layer weight, by the configuration's ``quantization_config``."""
    if quantization is None:
        return SIXTEEN_BIT
    method = quantization.get("quant_method")
    if method in FP8_METHODS:
        return 1.0
    groups = (quantization.get("config_groups") or {}).values()
    widths = {(group.get("weights") or {}).get("num_bits") for group in groups}
    if method == "compressed-tensors" and widths == {8}:
        return 1.0
    raise ValueError(
        f"The configuration's quantization is {method!r}; known are {', '.join(FP8_METHODS)} and "
        "compressed-tensors with 8 bits. Say how many bytes a weight has (--dtype, weight_bytes)."
    )
