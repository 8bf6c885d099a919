"""Models that SMC cannot run, told by their configuration before anything is loaded.

What a configuration does not tell is found when the models are built: `check_layers`.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_minimax_sparse
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_smc.upstream import Arguments, first_layer, is_gated_delta, model_config_of

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
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


# Whose layers with linear attention have been run over particles.
_RECURRENT = "Qwen3_5ForCausalLM"
_UNSERVED = (
    f"a recurrent (Mamba-like) state, which a target of the class {_RECURRENT} alone may have, on "
    "SGLang 0.5.23"
)


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
    found += _state_problems(server_args, target)
    draft = server_args.speculative_draft_model_path
    if draft is None:
        return found
    config = ModelConfig.from_server_args(
        server_args,
        model_path=draft,
        model_revision=server_args.speculative_draft_model_revision or "main",
        is_draft_model=True,
    )
    kinds = [*_kinds(config), *_rewritten(server_args, config)]
    flag = "--speculative-draft-model-path"
    found += [
        f"{flag} {draft} has {kind}; {_ALLOWED}. Choose another draft: {_FAMILIES}."
        for kind in kinds
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


def _has_states(model: ModelConfig) -> bool:
    """Whether particles can have states of a target's layers with linear attention."""
    runs = _RECURRENT in (model.hf_config.architectures or ())
    return runs and is_gated_delta(model) and not model.is_draft_model


def _state_problems(server_args: Arguments, target: ModelConfig) -> list[str]:
    """What a target with recurrent states does not go with."""
    if not _has_states(target) or server_args.disable_radix_cache:
        return []
    return [
        f"--model-path {server_args.model_path} has layers with linear attention; allowed: without "
        "the radix cache, which would keep the state behind a prompt for that behind the whole "
        "text. Pass --disable-radix-cache."
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
        _UNSERVED: mambaish_config(model) is not None and not _has_states(model),
        "an encoder and a decoder": model.is_encoder_decoder,
        "inputs that are no text": model.is_multimodal or model.model_is_mrope,
        "no next-token head": not model.is_generation,
    }
    yield from (kind for kind, present in kinds.items() if present)


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


def _rewritten(server_args: Arguments, as_draft: ModelConfig) -> Iterator[str]:
    """SGLang takes some models, given as a draft, for the extra layers of their own target."""
    config = get_config(
        as_draft.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=as_draft.revision,
        model_override_args=as_draft.model_override_args,
        model_config_parser=server_args.model_config_parser,
    )
    own, taken_for = (c.architectures or [] for c in (config, as_draft.hf_config))
    if own != taken_for:
        yield f"the architecture {own[0]}, which SGLang loads as {taken_for[0]} for a draft"


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
    shape = pool.get_key_buffer(first_layer(pool)).shape
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


def check_same_vocabulary(target_worker: "TpModelWorker", draft_worker: "TpModelWorker") -> None:
    """Raise SGLang's ValueError where the vocabularies differ in size or in any token."""
    from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

    # The method reads nothing of its worker but these two attributes of the draft's.
    standalone = SimpleNamespace(
        _draft_worker=SimpleNamespace(
            draft_runner=draft_worker.model_runner, draft_worker=draft_worker
        )
    )
    StandaloneWorkerV2._validate_vocab_compatibility(
        standalone,  # pyright: ignore[reportArgumentType] -- stands in for a worker
        target_vocab_size=target_worker.model_runner.model_config.vocab_size,
        target_tokenizer=target_worker.tokenizer,
    )
