"""Tiny random checkpoints of many architectures over one vocabulary, by the name of the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, EOS = 64, 1

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# SGLang serves some families with tied embeddings only, whatever a configuration says.
_TIED = {"tie_word_embeddings": True}

# Every other layer sees 9 keys, its own among them.
_WINDOWS = {
    **SIZES,
    **_TIED,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_act": "gelu_pytorch_tanh",
}

# Latent attention (MLA), of widths that no two parts share, and experts behind one dense layer.
_LATENT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_ROUTED: dict[str, Any] = {
    **_LATENT,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.5,
}
_V3: dict[str, Any] = {
    **_ROUTED,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "gpt2": {**_TIED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "llama": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": SIZES,
    "qwen3_moe": {
        **SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": {
        **SIZES,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 8},
    "cohere2": {**_WINDOWS, "hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "deepseek_v2": {
        **_ROUTED,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "deepseek_v3": _V3,
    "glm4_moe_lite": {
        **_V3,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "minicpm3": {**_LATENT, "v_head_dim": 8},  # SGLang takes hidden size by heads for it
}


# Of decays of linear attention, as slow as trained ones: random ones forget all in a token.
LOG_RATE = -2.0


def make_family(
    path: str | Path,
    family: str,
    *,
    seed: int = 0,
    scale: float = 0.3,
    vocab: int = VOCAB,
    **changes: Any,
) -> str:
    """Save a random checkpoint of ``family`` and its tokenizer under ``path``; return it."""
    config = AutoConfig.for_model(
        family,
        **{"tie_word_embeddings": False, **FAMILIES[family], **changes},
        vocab_size=vocab,
        initializer_range=scale,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            torch.nn.init.constant_(parameter, LOG_RATE)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    if family == "qwen3_5_text":
        _say_interval(Path(path, "config.json"), FAMILIES[family]["full_attention_interval"])
    tiny_tokenizer(vocab, EOS).save_pretrained(path)
    return str(path)


def _say_interval(config: Path, interval: int) -> None:
    """What published checkpoints say; transformers saves the layers' types alone."""
    said = json.loads(config.read_text()) | {"full_attention_interval": interval}
    config.write_text(json.dumps(said))
