"""Compute weights, traffic and operations of targets and drafts from their configurations.

Dense decoders, and what differs from one: windows, latents, experts, recurrent states.

A draft is a language model, an EAGLE-3 head, a block (DFlash, DSpark), the target's own MTP layer,
or n-gram matches. A head drafts from the target's hidden states, and its embedding is the target's.
N-gram matches need no pass, weights or KV; the host's lookup takes microseconds, which are left
out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_smc.drafts.heads import BY_CLASS, head_of
from sglang_smc.drafts.heads.base import numbers_of
from sglang_smc.drafts.heads.dflash import BLOCK_SIZE
from sglang_smc.drafts.heads.eagle3 import EAGLE3_STATES
from sglang_smc.drafts.reading import normalized
from sglang_smc_tools.plan.experts import MIXTURES, Experts

Config = Mapping[str, Any]
Source = str | Path | Config
"""A Hugging Face ``config.json``, its folder, its contents, or a built-in name."""

SIXTEEN_BIT = 2.0
STATE_NUMBER_BYTES = 4  # SGLang's --mamba-ssm-dtype, by default

#: Kinds of drafts; a target is a `MODEL`.
MODEL = "model"
EAGLE3 = "eagle3"
DFLASH = "dflash"
MTP = "mtp"
NGRAM = "ngram"
DEFAULT_STEPS = (4, 8, 16)


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
        keys = self.key_heads * self.key_dim
        values = self.value_heads * self.value_dim
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
class ModelShape:
    """Sizes of a target or a draft, without norms, biases and factors: below 0.3 % of weights."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    weight_bytes: float = SIXTEEN_BIT  # a weight of a layer: 2 bf16, 1 fp8 or int8, 4 float32
    in_int8: bool = False  # layers and LM head, for products in 16 bits
    kv_bytes: float = SIXTEEN_BIT  # a number in the KV cache
    latents: Latents | None = None  # MLA, in place of keys and values of each head
    experts: Experts | None = None  # in place of the MLP
    states: States | None = None  # of some layers, in place of KV; queries elsewhere are gated
    windowed_layers: int = 0
    window: int = 0  # keys that a query attends to in these layers, including its own
    kind: str = MODEL
    num_states: int = 0  # layers of the target whose concatenated hidden states a head's fc reads
    mtp_layers: int = 0  # behind the layers of a target
    max_steps: int | None = None  # the largest K of a draft; None for any
    head_rows: int | None = None  # of a copy of the LM head's rows; None for all, with no copy
    step_parameters: int = 0  # that each drafted token is multiplied by behind a block's pass
    table_parameters: int = 0  # of a block's tables beside, of which a few rows are read
    conv_parameters: int = 0  # of a block's convolutions, in all layers

    def _weights_of_layers(self, routed: float) -> float:
        """Return the weights of all layers with ``routed`` experts each."""
        sparse = 0.0
        num_dense = self.num_layers
        if self.experts is not None:
            num_dense = self.experts.dense_layers
            each = self.experts.parameters(self.hidden_size, routed)
            sparse = (self.num_layers - num_dense) * each
        dense = 3 * num_dense * self.hidden_size * self.intermediate_size
        attention = self._attending_layers * self._attention_parameters
        if self.states is not None:
            attention += self.states.layers * self.states.parameters(self.hidden_size)
        if self.kind == EAGLE3:  # queries, keys and values of an embedding beside a hidden state
            heads = self.num_heads + 2 * self.num_kv_heads
            attention += self.hidden_size * self.head_dim * heads
        return attention + dense + sparse + self.conv_parameters

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
        """Return the weights of the LM head, as many as the embedding table's unless it is cut."""
        return (self.head_rows or self.vocab_size) * self.hidden_size

    @property
    def fc_parameters(self) -> int:
        """Return the weights of a head's fc, from the target's hidden states to one of its own.

        That of an MTP layer reads an embedding, too.
        """
        return (self.num_states + (self.kind == MTP)) * self.hidden_size**2

    @property
    def _own_tables(self) -> int:
        """Return the weights of the embedding and the LM head that are not another model's."""
        is_one = self.tied_embeddings and self.head_rows is None
        tables = self.vocab_size * self.hidden_size + self.head_parameters * (not is_one)
        return tables * (self.kind != MTP)

    @property
    def num_parameters(self) -> int:
        tables = self._own_tables + self.step_parameters + self.table_parameters
        return self.layer_parameters + tables + self.fc_parameters

    @property
    def head_bytes(self) -> float:
        """Return the bytes per weight of tables and fc: SGLang quantizes only the layers."""
        return max(self.weight_bytes, SIXTEEN_BIT)

    @property
    def streamed_bytes(self) -> float:
        """Return the bytes of weights that one pass reads at most: the layers and the LM head.

        Of the embedding table a pass looks up a few rows, which do not count.
        """
        return self.bytes_read(math.inf)

    def bytes_read(self, num_tokens: float, *, with_head: bool = True) -> float:
        """Return the bytes of weights that a pass reads: of experts, those that tokens visit."""
        visited = self.experts.visited(num_tokens) if self.experts else 0
        layers = self._weights_of_layers(visited) * self.weight_bytes
        if self.experts is not None and self.experts.weight_bytes is not None:
            routed = self._weights_of_layers(visited) - self._weights_of_layers(0)
            layers += routed * (self.experts.weight_bytes - self.weight_bytes)
        head_bytes = self.weight_bytes if self.in_int8 else self.head_bytes
        return layers + (self.head_parameters * head_bytes if with_head else 0)

    @property
    def resident_bytes(self) -> float:
        """Return the bytes of weights in the device's memory."""
        more = self.num_parameters - self.layer_parameters - self.in_int8 * self.head_parameters
        return self.bytes_read(math.inf, with_head=self.in_int8) + more * self.head_bytes

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

    @property
    def is_head(self) -> bool:
        return self.kind in (EAGLE3, DFLASH, MTP)

    @property
    def default_steps(self) -> tuple[int, ...]:
        """Return the candidates for K that are within a head's block."""
        most = self.max_steps
        within = tuple(steps for steps in DEFAULT_STEPS if most is None or steps <= most)
        return within or (most or 1,)

    def hidden_state_bytes(self, num_particles: int, num_steps: int) -> float:
        """Return the bytes of the target's hidden states that a request's round keeps for a head.

        They are kept from the target's pass to the head's next, of rounds without drafts for K + 3.
        """
        columns = num_particles * (num_steps + 1)
        if self.kind != DFLASH:
            columns += num_steps + 3
        return columns * self.num_states * self.hidden_size * self.head_bytes

    def require_fit(self, target: ModelShape, num_steps: int) -> None:
        """Raise ValueError unless a head has the target's hidden size and enough columns."""
        if self.is_head and self.hidden_size != target.hidden_size:
            raise ValueError(
                f"The head's hidden size is {self.hidden_size} and the target's "
                f"{target.hidden_size}: it takes the target's embeddings and hidden states, so the "
                "two must agree. Choose the head that was trained for this target."
            )
        if self.max_steps is not None and num_steps > self.max_steps:
            raise ValueError(
                f"num_steps is {num_steps}, and the block was trained for {self.max_steps + 1} "
                f"columns, the last token's among them. Take at most {self.max_steps} steps."
            )

    def on_devices(self, count: int) -> ModelShape:
        """Return the model on ``count`` devices that split every pass; latents are replicated."""
        if self.latents is None:
            return self
        return replace(self, latents=replace(self.latents, copies=count))

    def with_overlap(self, overlap: float) -> ModelShape:
        """Return a mixture with this `Experts.overlap`; raise ValueError for others."""
        if self.experts is None:
            raise ValueError(
                f"--expert-overlap is {overlap:g}, and the target has no experts. Leave it out."
            )
        return replace(self, experts=replace(self.experts, overlap=overlap))

    def with_head_of(self, rows: int) -> ModelShape:
        """Return a draft model whose LM head is cut to ``rows``; ValueError for others."""
        if self.kind != MODEL or rows > self.vocab_size:
            raise ValueError(
                f"--hot-tokens is {rows} with a draft of kind {self.kind} with "
                f"{self.vocab_size} tokens; allowed: at most as many, of a language model. Leave "
                "it out."
            )
        return replace(self, head_rows=rows)

    def fused_in_int8(self) -> ModelShape:
        """Return a draft for `--speculative-smc-draft-layers fused-int8`; ValueError for others."""
        if self.kind not in (MODEL, EAGLE3):
            raise ValueError(
                f"--draft-dtype is int8 with a draft of kind {self.kind}; allowed: language models "
                "and EAGLE-3 heads. Take fp8, or leave it out."
            )
        return replace(self, weight_bytes=1.0, kv_bytes=SIXTEEN_BIT, in_int8=True)

    def dequantized(self) -> ModelShape:
        """Return the model as the CPU platform loads it: weights in 8 bits take 16."""
        return self.in_precision(max(self.weight_bytes, SIXTEEN_BIT))

    def in_precision(self, weight_bytes: float | None) -> ModelShape:
        """Return the model with weights of ``weight_bytes``, or with its own for None.

        The KV cache is in 16 bits, or in 32 if the weights are.
        """
        experts = self.experts
        if weight_bytes and experts is not None:
            experts = replace(experts, weight_bytes=None)
        weight_bytes = weight_bytes or self.weight_bytes
        kv_bytes = max(weight_bytes, SIXTEEN_BIT)
        return replace(self, weight_bytes=weight_bytes, kv_bytes=kv_bytes, experts=experts)


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
    "qwen3.5-27b": replace(
        ModelShape(64, 5120, 17408, 24, 4, 256, 248320, tied_embeddings=False),
        states=States(48, 16, 48, 128, 128),
        mtp_layers=1,
    ),
    "qwen3.5-35b-a3b": replace(
        ModelShape(40, 2048, 0, 16, 2, 256, 248320, tied_embeddings=False),
        states=States(30, 16, 32, 128, 128),
        experts=Experts(256, 8, 512, dense_layers=0, shared=1.0),
        mtp_layers=1,
    ),
}


def _head(
    kind: str, count: int, mlp: int, vocab_size: int, states: int, most: int | None = None
) -> ModelShape:
    shape = ModelShape(count, 4096, mlp, 32, 8, 128, vocab_size, tied_embeddings=True)
    return replace(shape, kind=kind, num_states=states, max_steps=most)


#: Heads as published for Llama 3.1 8B (EAGLE-3) and Qwen3 8B; they fit targets of the same width.
DRAFTS = {name: one for name, one in BUILT_IN.items() if one.states is None} | {
    "eagle3-8b": _head(EAGLE3, 1, 14336, 32000, EAGLE3_STATES),
    "dflash-8b": _head(DFLASH, 5, 12288, 0, 5, BLOCK_SIZE - 1),
    "dspark-8b": replace(
        _head(DFLASH, 5, 12288, 0, 5, 8),
        step_parameters=151936 * 256,
        table_parameters=151936 * 256,
    ),
    NGRAM: ModelShape(0, 0, 0, 0, 0, 0, 0, tied_embeddings=True, kind=NGRAM),
}

# --- Configurations

#: Quantizations of all layers' weights to 8 bits, beside ModelOpt's and compressed-tensors'.
EIGHT_BITS = ("fp8", "fbgemm_fp8", "modelopt_fp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8")
#: ModelOpt's own file beside a config.json that says nothing of quantization.
MODELOPT_FILE = "hf_quant_config.json"


#: Architectures with grouped heads, a gated MLP of three matrices and an LM head; those with
#: windows, by the layers of which one attends to everything where the configuration says nothing;
#: with latents and experts; and with linear attention in all layers but one of every so many.
DENSE = (
    "Ernie4_5ForCausalLM",
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
)
WINDOWED = {
    "GptOssForCausalLM": 2,
    "Gemma2ForCausalLM": 2,
    "Gemma3ForCausalLM": 6,
    "Cohere2ForCausalLM": 4,
    "Olmo3ForCausalLM": 4,
}
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
RECURRENT_EXPERTS = "Qwen3_5MoeForCausalLM"
RECURRENT = ("Qwen3_5ForCausalLM", RECURRENT_EXPERTS)


def _differences(name: str, config: Config) -> dict[str, Any]:
    """Return what an architecture has beside or in place of a dense decoder's parts."""
    found: dict[str, Any] = {}
    if name in WINDOWED:
        window, layers = numbers_of(config, "sliding_window", "num_hidden_layers")
        types = config.get("layer_types")
        patterned = layers - layers // (config.get("sliding_window_pattern") or WINDOWED[name])
        count = types.count("sliding_attention") if types else patterned
        found |= {"windowed_layers": count, "window": window}
    else:
        _refuse_window(config)
    if name in MIXTURES:
        found["experts"] = MIXTURES[name].read(config, partial(numbers_of, config))
    if name in LATENT:
        sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        latents = numbers_of(config, *sizes)
        found["latents"] = Latents(*latents, query_rank=config.get("q_lora_rank"))
    if name in RECURRENT:
        heads = ("linear_num_key_heads", "linear_num_value_heads")
        sizes = numbers_of(config, *heads, "linear_key_head_dim", "linear_value_head_dim")
        layers, interval = numbers_of(config, "num_hidden_layers", "full_attention_interval")
        found["states"] = States(layers - layers // interval, *sizes)
    return found


def _refuse_window(config: Config) -> None:
    """Raise ValueError where a window of a class that has none is shorter than the context."""
    window = config.get("sliding_window")
    longest = config.get("max_position_embeddings") or math.inf
    if window and config.get("use_sliding_window", True) and window < longest:
        raise ValueError(
            f"The configuration limits attention to a window of {window} tokens. Only attention to "
            "the whole context is planned for."
        )


#: Classes with images, and the architecture of their text decoder.
TEXT_OF_IMAGES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def from_config(source: Source, weight_bytes: float | None = None) -> ModelShape:
    """Return the shape of a model.

    ``weight_bytes`` overrides the configuration: 1 if it is quantized to 8 bits, otherwise 2, since
    SGLang serves float32 checkpoints in 16 bits as well.

    Raises ValueError for architectures that are not listed above, alone or below images.
    """
    return _shape_of(source, BUILT_IN, {}).in_precision(weight_bytes)


def draft_from_config(source: Source, weight_bytes: float | None = None) -> ModelShape:
    """Return the shape of a draft, with ``weight_bytes`` used like `from_config`.

    ``source`` is a ``config.json`` of a model or a head, its folder, its contents, or one of
    `DRAFTS`.

    Raises ValueError for unsupported configurations.
    """
    return _shape_of(source, DRAFTS, PLANNED).in_precision(weight_bytes)


def draft_for(target: ModelShape, source: Source, weight_bytes: float | None = None) -> ModelShape:
    """Return the shape of a target's draft: `MTP`, or as in `draft_from_config`.

    Raises ValueError where the target has no MTP layer, or several.
    """
    if source != MTP:
        return draft_from_config(source, weight_bytes)
    if target.mtp_layers != 1:
        raise ValueError(
            f"The draft is {MTP}, and the target's configuration has {target.mtp_layers} MTP "
            "layers (num_nextn_predict_layers, mtp_num_hidden_layers); allowed: one. Name a draft."
        )
    return replace(
        target,
        kind=MTP,
        num_layers=1,
        num_states=1,
        experts=target.experts and replace(target.experts, dense_layers=0),
        states=target.states and replace(target.states, layers=0),
        windowed_layers=0,
    ).in_precision(weight_bytes)


def _shape_of(
    source: Source, known: Mapping[str, ModelShape], heads: Mapping[str, Callable[..., ModelShape]]
) -> ModelShape:
    if not isinstance(source, Mapping) and str(source).lower() in known:
        return known[str(source).lower()]
    config = contents(source, known)
    return heads.get(architecture(config), _parse)(config)


def is_name(source: str) -> bool:
    """Return whether ``source`` names a model or a draft without a path."""
    return source.lower() in (*BUILT_IN, *DRAFTS)


def lowest_precision(*shapes: ModelShape) -> float:
    """Return the fewest bytes per number that a model computes in; its FLOP/s bound each."""
    computed = (shape.head_bytes if shape.in_int8 else shape.weight_bytes for shape in shapes)
    layers = (shape.num_layers for shape in shapes)
    return min(size for size, count in zip(computed, layers, strict=True) if count)


def contents(source: Source, known: Collection[str] = ()) -> Config:
    """Return a configuration's contents; raise ValueError, naming the ``known``, without one."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{str(source)!r} is neither a config.json, nor a folder with one"
            + (f", nor one of {', '.join(known)}" if known else "")
            + ". For a model of the Hub, download its files."
        )
    config = normalized(_read_json(path))
    beside = path.with_name(MODELOPT_FILE)
    if config.get("quantization_config") is None and beside.is_file():
        told = _read_json(beside).get("quantization") or {}
        config = {**config, "quantization_config": {"quant_method": "modelopt", **told}}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except ValueError as error:  # of JSON, or of its encoding
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path} is not a JSON object. Download it anew.")
    return told


def architecture(config: Config) -> str:
    """Return the configuration's first architecture; ``none`` if it has none."""
    return (config.get("architectures") or ["none"])[0]


def is_recurrent(source: Source) -> bool:
    """Return whether a model has linear attention, beside which a server has no radix cache."""
    name = architecture(contents(source))
    return TEXT_OF_IMAGES.get(name, name) in RECURRENT


def _parse(config: Config) -> ModelShape:
    name = architecture(config)
    if name in TEXT_OF_IMAGES:
        keys = ("tie_word_embeddings", "quantization_config")
        shared = {key: config[key] for key in keys if key in config}
        config = {**shared, **config["text_config"]}
        name = TEXT_OF_IMAGES[name]
    if name not in (*DENSE, *WINDOWED, *LATENT, *RECURRENT, *MIXTURES):
        raise ValueError(
            f"The configuration's architecture is {name}. Planned for are dense decoders, "
            f"{', '.join(DENSE)}, with windows {', '.join(WINDOWED)}, of experts "
            f"{', '.join(MIXTURES)}, with states {', '.join(RECURRENT)}, and with images "
            f"{', '.join(TEXT_OF_IMAGES)}; as drafts, {', '.join(PLANNED)}, too."
        )
    tied = config.get("tie_word_embeddings", False)
    counts = (config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if name == RECURRENT_EXPERTS:  # no layer has a dense MLP
        config = {**config, "intermediate_size": 0}
    found = dense(config, "vocab_size", tied=tied)
    mtp_layers = max(each or 0 for each in counts)
    return replace(found, mtp_layers=mtp_layers, **_differences(name, config))


def dense(config: Config, vocab_key: str | None, *, tied: bool, hint: str = "") -> ModelShape:
    """Return the shape by the keys of a dense decoder, with the vocabulary of ``vocab_key``.

    Without a ``vocab_key`` it has no LM head.
    """
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    layers, hidden, mlp, heads = numbers_of(config, *sizes, hint=hint)
    return ModelShape(
        layers,
        hidden,
        mlp,
        heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=numbers_of(config, vocab_key, hint=hint)[0] if vocab_key else 0,
        tied_embeddings=tied,
        weight_bytes=quantized_bytes(config.get("quantization_config")),
    )


def _read_head(config: Config) -> ModelShape:
    """Return the shape of a head, by the sizes that its kind has beside its layers'."""
    of_kind = head_of(config)
    assert of_kind is not None and of_kind.sizes is not None
    sizes = of_kind.sizes(config)
    layers = dense(config, sizes.rows_key, tied=sizes.passes != MTP, hint=sizes.hint)
    windowed = (config.get("layer_types") or []).count("sliding_attention")
    if windowed:
        (window,) = numbers_of(config, "sliding_window")
        layers = replace(layers, windowed_layers=windowed, window=window)
    return replace(
        layers,
        kind=sizes.passes,
        num_states=sizes.num_states,
        max_steps=sizes.max_steps,
        step_parameters=sizes.step_parameters,
        table_parameters=sizes.table_parameters,
        conv_parameters=sizes.conv_parameters,
    )


#: Parsers of head configurations, by architecture.
PLANNED = {name: _read_head for name, head in BY_CLASS.items() if head.sizes is not None}


def quantized_bytes(quantization: Config | None) -> float:
    """Return the bytes per layer weight, by the configuration's ``quantization_config``."""
    if quantization is None:
        return SIXTEEN_BIT
    method = quantization.get("quant_method")
    if method == "modelopt":
        method = f"modelopt_{quantization.get('quant_algo')}".lower()
    if method in EIGHT_BITS:
        return 1.0
    if method == "mxfp4":  # of experts alone
        return SIXTEEN_BIT
    groups = (quantization.get("config_groups") or {}).values()
    widths = {(group.get("weights") or {}).get("num_bits") for group in groups}
    if method == "compressed-tensors" and widths == {8}:
        return 1.0
    raise ValueError(
        f"The configuration's quantization is {method!r}; known are {', '.join(EIGHT_BITS)} and "
        "compressed-tensors with 8 bits. Plan for the model that it was made from."
    )
