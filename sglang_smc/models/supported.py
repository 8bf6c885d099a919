"""Validate models before anything is loaded: find those that SMC cannot run by their configuration.

What a configuration does not show is found when the models are built: `check_layers`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    is_deepseek_dsa,
    is_minimax_sparse,
    is_multimodal_model,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel

from sglang_smc.models import head_kinds as kinds
from sglang_smc.models.draft_config import trained_length
from sglang_smc.models.softmax import Heads
from sglang_smc.models.windows import window_of
from sglang_smc.options.server import DEFAULTS
from sglang_smc.upstream import (
    IS_NEWER,
    IS_NEWEST,
    Arguments,
    is_gated_delta,
    kv_layers,
    model_config_of,
    release,
)

_ALLOWED = (
    "allowed: a text decoder whose layers attend to all of the text or to a window of it, by heads "
    "or by latents (MLA)"
)

_FAMILIES = (
    "Llama, Qwen2 and Qwen3, Mistral, Gemma 2 and 3, Phi-3 and Phi-4, Granite, OLMo 2 and Command "
    "R are among those that run (docs/families.md has all)"
)

# Formats of weights, --load-format, whose names and shapes are read before they are loaded.
_HEADERS_READ = ("auto", "safetensors")

# Dtypes of a KV cache. 8-bit keys and values are stored divided by their layer's scales.
_PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALL_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

# Compressed and indexed attention, by no key that others have.
_SPARSE = {"DeepseekV4ForCausalLM"}

# Latent attention (MLA): models with SGLang's DeepSeek layers, or equivalent ones.
_LATENT = {
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "MiniCPM3ForCausalLM",
}

# Multimodal architectures, served for text alone by their language model.
_TEXT_OF_IMAGES = {
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PixtralForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}

# Those of them that also run with images (`--enable-multimodal`): in rounds, which are all text, an
# image has shifted rotary positions, if that.
_SEEING = {
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}

# Architectures with linear attention that have been run over particles.
_RECURRENT = {
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
}
# Architectures whose positions are rows of a learned table: beyond its end there is nothing.
_LEARNED_POSITIONS = {"GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OPTForCausalLM"}

_UNSERVED = (
    f"a recurrent (Mamba-like) state, which a target of {' or '.join(sorted(_RECURRENT))} alone "
    "may have, on SGLang 0.5.23"
)


def target_refusals(server_args: Arguments) -> list[str]:
    """Return a sentence for each property of the target that no other setting would mend."""
    return [
        f"--model-path {server_args.model_path} has {kind}; {_ALLOWED}. {_FAMILIES}. To serve this "
        "one, leave out --speculative-algorithm SMC with its flags, or pass one of SGLang's own."
        for kind in _kinds(model_config_of(server_args))
    ]


def model_problems(server_args: Arguments, widest_heads: int | None) -> list[str]:
    """Return a sentence for everything else about target and draft that SMC cannot run.

    Args:
        widest_heads: the largest supported head dimension; None for any.
    """
    target = model_config_of(server_args)
    found = _head_problems("--model-path", server_args.model_path, target, widest_heads)
    found += _state_problems(server_args, target)
    found += _image_problems(server_args, target)
    found += _transfer_problems(server_args, target)
    draft = server_args.speculative_draft_model_path
    if draft is None:
        return found
    config = draft_config(server_args)
    flag = "--speculative-draft-model-path"
    longest = trained_length(config.hf_text_config)
    name = kinds.architecture_of(config)
    if longest < target.context_len and name in _LEARNED_POSITIONS:
        found.append(
            f"{flag} {draft} is a {name}, with a learned table of {longest} positions, and this "
            f"server's texts have up to {target.context_len} tokens; allowed: no fewer positions "
            f"than tokens. Pass --context-length {longest}, or choose another draft."
        )
    num_steps = server_args.speculative_num_steps or DEFAULTS.num_steps
    view = resolved_view(server_args)
    has_files = (view.speculative_draft_load_format or view.load_format) in _HEADERS_READ
    found += [
        f"{flag} {draft} {problem}"
        for problem in kinds.draft_problems(config, target, num_steps, has_files=has_files)
    ]
    if kinds.kind_of(config) == "model":
        found += [
            f"{flag} {draft} has {kind}; {_ALLOWED}. Choose another draft: {_FAMILIES}."
            for kind in _kinds(config, as_draft=True)
        ]
    return found + _head_problems(flag, draft, config, widest_heads)


def draft_config(server_args: Arguments) -> ModelConfig:
    """Return the configuration of the draft, with the positions that its checkpoint states."""
    draft = server_args.speculative_draft_model_path
    config = ModelConfig.from_server_args(
        server_args,
        model_path=draft,
        model_revision=server_args.speculative_draft_model_revision or "main",
        is_draft_model=True,
        context_length=0,  # which extends none
    )
    config.is_draft_model = False  # else SGLang's layer queries refer to MTP layers
    if draft == server_args.model_path and kinds.reads_states(server_args):
        kinds.take_mtp(config)
    return config


def _head_problems(flag: str, path: str, model: ModelConfig, widest: int | None) -> list[str]:
    """Return a sentence if attention heads are too wide for the kernels in use."""
    latent = model.attention_arch == AttentionArch.MLA  # has kernels of its own
    if widest is None or latent or (model.head_dim or 0) <= widest:
        return []
    return [
        f"{flag} {path} has attention heads of {model.head_dim} dimensions; allowed: at most "
        f"{widest}, which is what the Triton attention over particles takes. Pass "
        "--speculative-smc-kernels torch, which takes any and is slower, or choose another model."
    ]


def _has_states(model: ModelConfig) -> bool:
    """Return whether particles can have states of a target's linear-attention layers."""
    runs = _RECURRENT.intersection(model.hf_config.architectures or ())
    return bool(runs) and is_gated_delta(model)


def _state_problems(server_args: Arguments, target: ModelConfig) -> list[str]:
    """Return the server settings that conflict with a target's recurrent states."""
    if not _has_states(target):
        return []
    refused = {
        "without the radix cache, which would keep the state behind a prompt for that behind the "
        "whole text. Pass --disable-radix-cache": not server_args.disable_radix_cache,
        "without streaming sessions, which keep a turn's KV but no state behind it. Leave out "
        "--enable-streaming-session": server_args.enable_streaming_session,
    }
    return [
        f"--model-path {server_args.model_path} has layers with linear attention; allowed: {what}."
        for what, present in refused.items()
        if present
    ]


def _image_problems(server_args: Arguments, target: ModelConfig) -> Iterator[str]:
    """Yield a sentence where images are asked for and the target does not take them in rounds."""
    names = target.hf_config.architectures or ["none"]
    sees = IS_NEWER and _SEEING.intersection(names)
    if resolved_view(server_args).enable_multimodal and not sees:
        yield (
            f"--enable-multimodal is True with a target of {names[0]}; allowed: "
            f"{', '.join(sorted(_SEEING))}, on SGLang 0.5.22 and later. Leave it out to serve text."
        )


# Flags that a decode server refuses: the prefill server samples the first token without SMC, and
# reads no image for the draft; KV on the host is the target's.
_NOT_TRANSFERRED = (
    "speculative_smc_power speculative_smc_potential "
    "enable_strict_thinking enable_multimodal enable_hierarchical_cache"
)


def _transfer_problems(server_args: Arguments, target: ModelConfig) -> Iterator[str]:
    """Yield a sentence for what a server lacks as one of a pair of prefill and decode servers."""
    view = resolved_view(server_args)
    mode = view.disaggregation_mode
    if mode == "null":
        return
    refused = {
        "SMC; allowed: SMC on the decode server, whose draft reads prompts itself": (
            mode == "prefill"
        ),
        f"SGLang {release()}; allowed: 0.5.23 and later": not IS_NEWEST,
        "a head or an MTP layer; allowed: a language model or n-gram matches as the draft, since "
        "no hidden states are sent": kinds.reads_states(view),
        "linear attention in the target; allowed: targets without recurrent states, of which none "
        "are sent": mambaish_config(target) is not None,
        "a KV cache of its own for layers with a window; allowed: one for all layers. Pass "
        "--disable-hybrid-swa-memory to both servers": target.is_hybrid_swa,
    }
    for name in _NOT_TRANSFERRED.split():
        value = getattr(view, name, None)
        given = f"--{name.replace('_', '-')} {value}; allowed: none. Leave it out"
        refused[given] = value is True or value not in (None, False, 1.0, [], "")
    for what in filter(refused.get, refused):
        yield f"--disaggregation-mode is {mode!r} with {what}."


def _kinds(model: ModelConfig, as_draft: bool = False) -> Iterator[str]:
    """Yield the properties of a model that the ledger or the attention does not support."""
    latent = model.attention_arch == AttentionArch.MLA
    yield from _chunks(model)
    if latent:
        yield from _latent_limits(model)
    kinds = {
        "layers whose heads differ in width": model.is_hybrid_swa_compress,
        "sparse attention": is_minimax_sparse(model.hf_config)
        or getattr(model.hf_config, "has_minicpm_sparse_attention", False)
        or bool(_SPARSE.intersection(model.hf_config.architectures or ())),
        "keys and values of unlike width": model.has_asymmetric_kv and not latent,
        _UNSERVED: mambaish_config(model) is not None and (as_draft or not _has_states(model)),
        "an encoder and a decoder": model.is_encoder_decoder,
        "inputs that are no text": _takes_more_than_text(model),
        "no next-token head": not model.is_generation,
    }
    yield from (kind for kind, present in kinds.items() if present)


def _chunks(model: ModelConfig) -> Iterator[str]:
    """Yield attention over chunks: neither full nor a window that ends at the query."""
    types = getattr(model.hf_text_config, "layer_types", None) or ()
    if "chunked_attention" in types:
        count = types.count("chunked_attention")
        yield f"chunked attention in {count} of {len(types)} layers"


def _takes_more_than_text(model: ModelConfig) -> bool:
    """Return whether a model is multimodal and not known to run for text alone.

    SGLang's own flag follows the server's arguments, which disable images.
    """
    names = model.hf_config.architectures or []
    more = is_multimodal_model(names) or model.hf_config is not model.hf_text_config
    return more and not _TEXT_OF_IMAGES.intersection(names)


def _latent_limits(model: ModelConfig) -> Iterator[str]:
    """Yield properties of latent attention other than plain softmax over all latents."""
    text = model.hf_text_config
    names = model.hf_config.architectures or ["none"]
    if is_deepseek_dsa(model.hf_config):
        yield f"sparse attention (DSA, index_topk is {text.index_topk})"
    elif names[0] not in _LATENT:
        known = ", ".join(sorted(_LATENT))
        yield f"latent attention (MLA) of {names[0]}, which is not one of {known}"
    if getattr(text, "llama_4_scaling", None):
        yield "queries that are scaled by position (llama_4_scaling)"


def check_layers(runner: ModelRunner, *, blocks: bool = False) -> None:
    """Raise ValueError for a model with a layer that attention over particles does not support.

    With ``blocks`` layers may let tokens of a block attend to each other.
    """
    group = head_group(runner)
    rank = None
    layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
    if runner.use_mla_backend:
        # Each layer has two attention modules; particles use the one over latents.
        rank = runner.model_config.kv_lora_rank
        layers = [layer for layer in layers if layer.v_head_dim == rank]
    for layer in layers:
        check_layer(layer, group, {}, rank, blocks=blocks)


def head_group(runner: ModelRunner) -> int:
    """Return the number of query heads per key head, on each tensor-parallel rank."""
    tp_size = get_parallel().tp_size
    config = runner.model_config
    if runner.use_mla_backend:  # all heads read one latent
        return config.get_num_attention_heads(tp_size)
    return config.get_num_attention_heads(tp_size) // config.get_num_kv_heads(tp_size)


def heads_of(runner: ModelRunner) -> Heads:
    """Return the attention heads of a model, on each tensor-parallel rank."""
    config = runner.model_config
    q_heads = config.get_num_attention_heads(get_parallel().tp_size)
    latent = runner.use_mla_backend
    rank = config.kv_lora_rank if latent else 0
    head_dim = rank + config.qk_rope_head_dim if latent else config.head_dim
    assert head_dim is not None, "SGLang works it out as it reads a configuration"
    return Heads(q_heads, q_heads // head_group(runner), head_dim, runner.dtype, rank)


def check_pool(runner: ModelRunner) -> None:
    """Raise ValueError unless the KV cache is [slots, kv_heads, head_dim] for all layers."""
    if runner.is_hybrid_swa:
        raise ValueError(
            "attention of sglang-smc needs one KV cache for layers with a window and without: pass "
            "--disable-hybrid-swa-memory"
        )
    pool = runner.token_to_kv_pool
    latent = runner.use_mla_backend
    if pool.dtype not in (_PLAIN_TYPES if latent else _PLAIN_TYPES + _SMALL_TYPES):
        raise ValueError(
            f"attention of sglang-smc does not support a KV cache of {pool.dtype}"
            f"{' for latents (MLA)' if latent else ''}: pass --kv-cache-dtype auto"
            f"{'' if latent else ' or fp8_e4m3'}"
        )
    shape = pool.get_key_buffer(kv_layers(pool)[0]).shape
    if len(shape) != 3:
        raise ValueError(
            f"attention of sglang-smc needs KV buffers of [slots, kv_heads, head_dim], got "
            f"{list(shape)} from {type(pool).__name__}: unset SGLANG_USE_HND_KVCACHE, or use a "
            "model with ordinary attention in all layers"
        )


def check_layer(
    layer: RadixAttention,
    group: int,
    kwargs: dict[str, Any],
    rank: int | None = None,
    *,
    blocks: bool = False,
) -> None:
    """Raise ValueError for a layer that this package's attention would silently get wrong.

    Over latents, values have the width ``rank``; else that of keys. It is causal, except for layers
    with attention in both directions within ``blocks`` of new tokens, where the caller sets those.
    """
    in_block = blocks and sees_block(layer)
    unsupported = {
        "chunked attention": layer.use_irope,
        "a window or a cap over latents": rank is not None
        and (window_of(layer) is not None or layer.logit_cap > 0),
        "a cap other than by tanh": layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
        "scores that depend on the text's length": layer.xai_temperature_len > 0,
        "cross or bidirectional attention": layer.is_cross_attention
        or (layer.attn_type != AttentionType.DECODER and not in_block),
        "different key and value widths": (rank or layer.qk_head_dim) != layer.v_head_dim,
        "layers of unlike head groups": layer.tp_q_head_num != group * layer.tp_k_head_num,
    }
    unsupported |= {f"{name}=": value is not None for name, value in kwargs.items()}
    found = [what for what, present in unsupported.items() if present]
    if found:
        raise ValueError(
            f"attention of sglang-smc does not support {', '.join(found)} (layer {layer.layer_id})"
        )


def check_kernel_type(pool_type: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Raise ValueError for 8-bit keys that the Triton kernels of a GPU cannot convert.

    Args:
        capability: of the GPU; None where there is none, and Triton is interpreted.
    """
    if pool_type == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        raise ValueError(
            f"a KV cache of {pool_type} on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}, whose Triton kernels convert it from 8.9 on: pass "
            "--kv-cache-dtype fp8_e5m2 or auto, or --speculative-smc-kernels torch, which is slower"
        )


def sees_block(layer: RadixAttention) -> bool:
    """Return whether new tokens attend to each other in both directions, as in block heads."""
    return layer.attn_type == AttentionType.ENCODER_ONLY
