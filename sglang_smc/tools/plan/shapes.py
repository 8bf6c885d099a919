"""Compute a decoder's weights, traffic and operations from its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sglang_smc.tools.plan import blocks
from sglang_smc.tools.plan.blocks import Experts, Latents, States, Windows

#: Attention with grouped heads, a gated MLP of three matrices, and an LM head.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: Classes with images, and the architecture of their text decoder.
TEXT_OF_IMAGES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
}
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt_fp8")
SIXTEEN_BIT = 2.0
#: Heads, which only draft: `heads` describes their sizes.
EAGLE3, DFLASH = "LlamaForCausalLMEagle3", "DFlashDraftModel"
T = TypeVar("T")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Norms and biases are left out: below 0.1 % of all weights."""

    kind: ClassVar = "model"  # of draft

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
    windows: Windows | None = None  # of some layers
    states: States | None = None  # of some layers, in place of KV; queries elsewhere are gated

    @property
    def layer_parameters(self) -> int:
        """Return the weights of all layers together."""
        return int(self._parameters_with(None))

    def _parameters_with(self, routed: float | None) -> float:
        """Return the weights of all layers with ``routed`` experts each; None for all."""
        sparse = 0.0
        num_dense = self.num_layers
        if self.experts is not None:
            num_dense = self.experts.dense_layers
            one = self.experts.parameters(self.hidden_size, routed)
            sparse = (self.num_layers - num_dense) * one
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
        keys_and_values = 2 * self.num_kv_heads * self.head_dim
        return self.hidden_size * (queries + keys_and_values)

    @property
    def active_parameters(self) -> float:
        """Return the weights of all layers that one token is multiplied by."""
        return self._parameters_with(self.experts.per_token if self.experts else None)

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
        visited = None if self.experts is None else self.experts.visited(num_tokens)
        layers = self._parameters_with(visited) * self.weight_bytes
        return layers + (self.head_parameters * self.head_bytes if with_head else 0)

    @property
    def resident_bytes(self) -> float:
        """Return the bytes of weights in the device's memory."""
        table = 0.0 if self.tied_embeddings else self.head_parameters * self.head_bytes
        return self.streamed_bytes + table

    @property
    def kv_bytes_per_token(self) -> float:
        if self.latents is not None:
            return self.num_layers * self.latents.copies * self.latents.width * self.kv_bytes
        return 2 * self._attending_layers * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def attention_flops(self) -> int:
        """Return the operations for one query and key in all layers: score and weighted value."""
        if self.latents is not None:
            return self.num_layers * self.latents.flops(self.num_heads)
        return 4 * self._attending_layers * self.num_heads * self.head_dim

    def seen(self, context: float) -> float:
        """Return the mean number of ``context`` tokens that a query attends to in a layer."""
        return context if self.windows is None else self.windows.seen(context, self.num_layers)

    def flops_per_token(self, context: float) -> float:
        """Return the operations to decode one token that attends to ``context`` tokens."""
        weights = self.active_parameters + self.head_parameters
        states = self.states.flops if self.states else 0
        return 2 * weights + self.attention_flops * self.seen(context) + states

    def on_devices(self, count: int) -> ModelShape:
        """Return the model on ``count`` devices that split every pass; latents are replicated."""
        if self.latents is None:
            return self
        return replace(self, latents=replace(self.latents, copies=count))


def _llama(
    layers: int, hidden: int, mlp: int, heads: int, head_dim: int, *, tied: bool
) -> ModelShape:
    return ModelShape(layers, hidden, mlp, heads, 8, head_dim, 128256, tied)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, *, tied: bool) -> ModelShape:
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


def from_config(
    source: str | Path | Mapping[str, Any], weight_bytes: float | None = None
) -> ModelShape:
    """Return the shape of a model.

    ``source`` is a Hugging Face ``config.json``, its folder, its contents, or a name in
    `BUILT_IN`. ``weight_bytes`` overrides the configuration: 1 if it is quantized to 8 bits,
    otherwise 2, since SGLang serves float32 checkpoints in 16 bits as well. The KV cache is in 16
    bits, or in 32 if the weights are.

    Raises ValueError for anything but dense decoders of the `ARCHITECTURES`, and those of
    `blocks`.
    """
    found = built_in(source, BUILT_IN) or _parse(contents(source, BUILT_IN))
    return in_precision(found, weight_bytes)


def in_precision(shape: ModelShape, weight_bytes: float | None) -> ModelShape:
    """Return the shape with weights of ``weight_bytes``, or with its own for None."""
    weight_bytes = weight_bytes or shape.weight_bytes
    return replace(shape, weight_bytes=weight_bytes, kv_bytes=max(weight_bytes, SIXTEEN_BIT))


def built_in(source: str | Path | Mapping[str, Any], known: Mapping[str, T]) -> T | None:
    """Return the entry of ``known`` named ``source``, case-insensitive; None if there is none."""
    return None if isinstance(source, Mapping) else known.get(str(source).lower())


def contents(source: str | Path | Mapping[str, Any], known: Iterable[str]) -> Mapping[str, Any]:
    """Return a configuration's contents, given as such, as a file or as its folder.

    Raises ValueError if there is no such file, naming the ``known`` models.
    """
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


def architecture(config: Mapping[str, Any]) -> str:
    """Return the configuration's first architecture; ``none`` if it has none."""
    return (config.get("architectures") or ["none"])[0]


def _parse(config: Mapping[str, Any]) -> ModelShape:
    config = _text_of(config)
    _refuse_unknown(config)
    shape = dense(config, config["vocab_size"], tied=config.get("tie_word_embeddings", False))
    return replace(shape, **_unlike_dense(config))


def dense(config: Mapping[str, Any], vocab_size: int, *, tied: bool) -> ModelShape:
    """Return the shape by the `REQUIRED` keys, with this vocabulary size and table tying."""
    heads = config["num_attention_heads"]
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=vocab_size,
        tied_embeddings=tied,
        weight_bytes=quantized_bytes(config.get("quantization_config")),
    )


def _unlike_dense(config: Mapping[str, Any]) -> dict[str, Any]:
    name = config["architectures"][0]
    if name in blocks.WINDOWED:
        return {"windows": blocks.windows_of(config)}
    if name in blocks.RECURRENT:
        return {"states": blocks.states_of(config)}
    if name not in blocks.ARCHITECTURES:
        return {}
    return {"latents": blocks.latents_of(config), "experts": blocks.experts_of(config)}


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text decoder's configuration of a class with images; others unchanged."""
    name = architecture(config)
    if name not in TEXT_OF_IMAGES:
        return config
    shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**shared, **config["text_config"], "architectures": [TEXT_OF_IMAGES[name]]}


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    name = architecture(config)
    required = {
        **dict.fromkeys(ARCHITECTURES, ()),
        **dict.fromkeys(blocks.ARCHITECTURES, blocks.REQUIRED),
        **dict.fromkeys(blocks.WINDOWED, ("sliding_window",)),
        **dict.fromkeys(blocks.RECURRENT, blocks.RECURRENT_REQUIRED),
    }
    if name not in required:
        raise ValueError(
            f"The configuration's architecture is {name}. Planned for are dense decoders, "
            f"{', '.join(ARCHITECTURES)}, with windows {', '.join(blocks.WINDOWED)}, of latent "
            f"attention and experts {', '.join(blocks.ARCHITECTURES)}, with states "
            f"{', '.join(blocks.RECURRENT)}, and with images {', '.join(TEXT_OF_IMAGES)}; "
            f"as drafts, {EAGLE3} and {DFLASH}, too."
        )
    require_numbers(config, REQUIRED + required[name])
    windowed = name in blocks.WINDOWED
    if not windowed and config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ValueError(
            f"The configuration limits attention to a window of {config['sliding_window']} "
            "tokens. Only attention to the whole context is planned for."
        )


def require_numbers(config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ValueError unless all keys hold whole numbers."""
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"The configuration says no whole number for {', '.join(missing)}.")


def quantized_bytes(quantization: Mapping[str, Any] | None) -> float:
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
