"""Models that SMC cannot run, told by their configuration before anything is loaded.

What a configuration does not tell is found when the models are built: `check_layers`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    is_minimax_sparse,
    is_multimodal_model,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_parallel

from sglang_smc.upstream import Arguments, model_config_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_ALLOWED = "allowed: a text decoder with full attention in every layer"

_FAMILIES = (
    "Llama, Qwen2 and Qwen3, Mistral, Phi-3 and Phi-4, Granite, OLMo 2 and Command R are among "
    "those that run (docs/support.md has all)"
)

# By layer, in a configuration's `layer_types`.
_LIMITED = {"sliding_attention": "sliding-window", "chunked_attention": "chunked"}

# Architectures whose configuration may give layers a window, and which SGLang's own classes give
# full attention all the same.
_WITHOUT_WINDOWS = {
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}

# Architectures that take images, too: served for text alone, by the decoder within.
_TEXT_OF_IMAGES = {
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PixtralForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}


def problems(server_args: Arguments, widest_heads: int | None) -> list[str]:
    """A sentence for everything about target and draft that SMC cannot run.

    Args:
        widest_heads: dimensions that heads may have; None for any.
    """
    target = model_config_of(server_args)
    found = [
        f"--model-path {server_args.model_path} has {kind}; {_ALLOWED}. {_FAMILIES}. To serve this "
        "one, leave out --speculative-algorithm SMC with its flags, or pass one of SGLang's own."
        for kind in _kinds(target)
    ] + _head_problems("--model-path", server_args.model_path, target, widest_heads)
    draft = server_args.speculative_draft_model_path
    if draft is None:
        return found
    config = ModelConfig.from_server_args(
        server_args,
        model_path=draft,
        model_revision=server_args.speculative_draft_model_revision or "main",
        is_draft_model=True,
    )
    config.is_draft_model = False  # what SGLang then says of layers is about extra ones
    flag = "--speculative-draft-model-path"
    found += [
        f"{flag} {draft} has {kind}; {_ALLOWED}. Choose another draft: {_FAMILIES}."
        for kind in _kinds(config)
    ]
    return found + _head_problems(flag, draft, config, widest_heads)


def _head_problems(flag: str, path: str, model: ModelConfig, widest: int | None) -> list[str]:
    """Heads that are too wide for the kernels that are to run."""
    latent = model.attention_arch == AttentionArch.MLA  # refused as such
    if widest is None or latent or (model.head_dim or 0) <= widest:
        return []
    return [
        f"{flag} {path} has attention heads of {model.head_dim} dimensions; allowed: at most "
        f"{widest}, which is what the Triton attention over particles takes. Pass "
        "--speculative-smc-kernels torch, which takes any and is slower, or choose another model."
    ]


def _kinds(model: ModelConfig) -> Iterator[str]:
    """What it is about a model that neither the ledger nor the attention can serve."""
    latent = model.attention_arch == AttentionArch.MLA
    yield from _limits(model)
    kinds = {
        "sliding-window attention with KV of its own": model.is_hybrid_swa,
        "latent attention (MLA)": latent,
        "attention sinks": model.has_attention_sinks,
        "sparse attention": is_minimax_sparse(model.hf_config)
        or getattr(model.hf_config, "has_minicpm_sparse_attention", False),
        "keys and values of unlike width": model.has_asymmetric_kv and not latent,
        "a recurrent (Mamba-like) state": mambaish_config(model) is not None,
        "an encoder and a decoder": model.is_encoder_decoder,
        "inputs that are no text": _takes_more_than_text(model),
        "no next-token head": not model.is_generation,
    }
    yield from (kind for kind, present in kinds.items() if present)


def _takes_more_than_text(model: ModelConfig) -> bool:
    """Whether a model does whose decoder is not known to run by itself.

    What SGLang says of it follows the server's arguments, which leave images out.
    """
    names = model.hf_config.architectures or []
    more = is_multimodal_model(names) or model.hf_config is not model.hf_text_config
    return more and not _TEXT_OF_IMAGES.intersection(names)


def _limits(model: ModelConfig) -> Iterator[str]:
    """What layers make of attention that is causal softmax over all of the text.

    A window that is switched off, or that a configuration names for no layer, is none: SGLang
    gives the layers of Mistral, Phi-3 and Starcoder2 full attention whatever `sliding_window` is.
    """
    text = model.hf_text_config
    if not _WITHOUT_WINDOWS.intersection(model.hf_config.architectures or ()):
        types = getattr(text, "layer_types", None) or ()
        for kind, words in _LIMITED.items():
            if kind in types:
                yield f"{words} attention in {types.count(kind)} of {len(types)} layers"
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap:
        yield f"attention scores that are capped (attn_logit_softcapping is {cap:g})"


def check_layers(runner: "ModelRunner") -> None:
    """Raise ValueError for a model with a layer that our attention would get wrong."""
    group = head_group(runner)
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            check_layer(layer, group, {})


def head_group(runner: "ModelRunner") -> int:
    """Query heads per key head, on each tensor-parallel rank."""
    tp_size, config = get_parallel().tp_size, runner.model_config
    return config.get_num_attention_heads(tp_size) // config.get_num_kv_heads(tp_size)


def check_pool(runner: "ModelRunner") -> None:
    """Refuse a KV cache that is not [slots, kv_heads, head_dim] of plain floating point."""
    if runner.use_mla_backend:
        raise ValueError("attention of sglang-smc does not support MLA models")
    pool = runner.token_to_kv_pool
    if pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention of sglang-smc does not support a quantized KV cache ({pool.dtype}): "
            "pass --kv-cache-dtype auto"
        )
    shape = pool.get_key_buffer(pool.start_layer).shape
    if len(shape) != 3:
        raise ValueError(
            f"attention of sglang-smc needs KV buffers of [slots, kv_heads, head_dim], got "
            f"{list(shape)} from {type(pool).__name__}: unset SGLANG_USE_HND_KVCACHE, or use a "
            "model with ordinary attention in all layers"
        )


def check_layer(layer: RadixAttention, group: int, kwargs: dict[str, Any]) -> None:
    """Refuse what the causal softmax attention of this package would silently get wrong."""
    unsupported = {
        "a sliding window": layer.sliding_window_size > -1,
        "a logit cap": layer.logit_cap > 0,
        "cross or bidirectional attention": layer.is_cross_attention
        or layer.attn_type != AttentionType.DECODER,
        "different key and value widths": layer.qk_head_dim != layer.v_head_dim,
        "layers of unlike head groups": layer.tp_q_head_num != group * layer.tp_k_head_num,
    }
    unsupported |= {f"{name}=": value is not None for name, value in kwargs.items()}
    found = [what for what, present in unsupported.items() if present]
    if found:
        raise ValueError(
            f"attention of sglang-smc does not support {', '.join(found)} (layer {layer.layer_id})"
        )
