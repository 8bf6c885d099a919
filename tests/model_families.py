"""Tiny random checkpoints of many architectures over one vocabulary, by the name of the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

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

_RECURRENT: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
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
    "qwen2": SIZES,
    "qwen3_moe": {
        **SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": _RECURRENT,
    "qwen3_5_moe_text": {
        **_RECURRENT,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
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

# Models that take images beside text.
_TEXT: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_VISION: dict[str, Any] = {
    "depth": 1,
    "in_chans": 3,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
_EYE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}
_PLACES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}

OF_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_PLACES,
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        "vision_config": {**_VISION, "embed_dim": 16, "hidden_size": 32},
    },
    "qwen2_5_vl": {
        **_PLACES,
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        "vision_config": {
            **_VISION,
            **_EYE,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
    },
    "qwen3_vl": {
        **_PLACES,
        "text_config": {
            **_TEXT,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        "vision_config": {
            **_VISION,
            **_EYE,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "mistral3": {
        "image_token_index": 60,
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {
            **_EYE,
            "model_type": "pixtral",
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "image_size": 16,
        },
    },
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
    """Save a random checkpoint of ``family`` and its tokenizer under ``path``; return it.

    There is no image processor beside one that takes images: whatever asks for it fails.
    """
    takes_images = family in OF_IMAGES
    sizes = {} if takes_images else {"vocab_size": vocab, "initializer_range": scale}
    config = AutoConfig.for_model(
        family,
        **{"tie_word_embeddings": False, **{**FAMILIES, **OF_IMAGES}[family], **changes},
        **sizes,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    auto = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            torch.nn.init.constant_(parameter, LOG_RATE)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    interval = FAMILIES.get(family, {}).get("full_attention_interval")
    if interval is not None:
        _say_interval(Path(path, "config.json"), interval)
    tokenizer = tiny_tokenizer(vocab, EOS)
    if takes_images:
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        )
    tokenizer.save_pretrained(path)
    return str(path)


def _say_interval(config: Path, interval: int) -> None:
    """What published checkpoints say; transformers saves the layers' types alone."""
    said = json.loads(config.read_text()) | {"full_attention_interval": interval}
    config.write_text(json.dumps(said))
