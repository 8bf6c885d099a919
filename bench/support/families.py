"""Define families of popular models, each as a configuration of a few thousand weights.

Each has the structure that transformers defines for the family: the kind of attention, experts,
norms, tied tables. Sizes are the smallest that keep the structure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

VOCAB = 64
EOS = 1


class ModelFamily(NamedTuple):
    """A model family: a row of the table."""

    name: str  # display name
    model_type: str  # in transformers
    attention: str  # heading of its table
    config: dict[str, Any]
    architecture: str | None = None  # of published checkpoints, if it differs from transformers'
    bare: bool = False  # configuration only: refused, or without a class in transformers
    flags: tuple[tuple[str, Any], ...] = ()  # further server arguments
    head: str = "AutoModelForCausalLM"  # transformers' class that saves it
    renamed: tuple[str, str] | None = None  # part of weights' names, and its published spelling


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TIED = {**SIZES, "tie_word_embeddings": True}
HEADS = {**SIZES, "head_dim": 8}
EXPERTS = {
    **HEADS,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ROUTED = {
    **SIZES,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
LATENT = {
    **ROUTED,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_layer_freq": 1,
}
WINDOWS = {
    **TIED,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA = {**WINDOWS, "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8}
DELTA = {
    **HEADS,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "in_chans": 3,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 32,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}

TOWER = ("vision_tower.", "vision_tower.vision_model.")
NO_CACHE = (("disable_radix_cache", True),)

FULL = "full attention"
WINDOW = "windows, caps, sinks"
MLA = "latent attention"
STATE = "recurrent state"
IMAGES = "classes with images"
OTHER = "sparse or chunked attention, unlike layers"


def _rows(attention: str, *rows: tuple[Any, ...], **more: Any) -> list[ModelFamily]:
    """Return a family for each (name, model type, config), with an architecture if refused."""
    return [
        ModelFamily(name, kind, attention, config, *arch, bare=bool(arch), **more)
        for name, kind, config, *arch in rows
    ]


_MISTRAL = {**HEADS, "sliding_window": None}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True}
_OPT = {k: v for k, v in TIED.items() if k != "num_key_value_heads"}
_OPT |= {"word_embed_proj_dim": 32, "ffn_dim": 64}
_FULL = _rows(
    FULL,
    ("Llama 2 to 3.3, R1-Distill-Llama, SmolLM2, Yi", "llama", SIZES),
    ("Qwen2, Qwen2.5, R1-Distill-Qwen", "qwen2", SIZES),
    ("Qwen3", "qwen3", HEADS),
    ("Qwen3-MoE (30B-A3B, 235B-A22B, Coder)", "qwen3_moe", EXPERTS),
    ("Qwen2-MoE", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    ("Mistral v0.3, Nemo, Small 2501", "mistral", _MISTRAL),
    ("Mistral v0.1 (SGLang ignores its window)", "mistral", {**HEADS, "sliding_window": 4096}),
    ("Ministral 3", "ministral3", HEADS),
    ("Mixtral", "mixtral", EXPERTS),
    ("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "phi3", SIZES),
    ("Granite 3", "granite", SIZES),
    ("Granite 3 MoE", "granitemoe", EXPERTS),
    ("OLMo 2", "olmo2", SIZES),
    ("OLMoE", "olmoe", {**EXPERTS, "num_key_value_heads": 4}),
    ("Command R", "cohere", TIED),
    ("GLM-4-0414", "glm4", HEADS),
    ("GLM-4.5, 4.6, 4.7", "glm4_moe", {**ROUTED, "head_dim": 8}),
    ("Gemma 1", "gemma", {**TIED, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}),
    ("Apertus", "apertus", SIZES),
    ("SmolLM3", "smollm3", SIZES),
    ("Seed-OSS", "seed_oss", HEADS),
    ("ERNIE 4.5 dense", "ernie4_5", TIED),
    ("ERNIE 4.5 MoE", "ernie4_5_moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    ("StableLM", "stablelm", SIZES),
    ("StarCoder2", "starcoder2", {**SIZES, "sliding_window": None}),
    ("Hunyuan dense", "hunyuan_v1_dense", {**HEADS, "use_qk_norm": True}),
    ("MiniMax M2", "minimax_m2", {**EXPERTS, "rotary_dim": 8, "scoring_func": "sigmoid"}),
    ("GPT-2", "gpt2", _GPT),
    ("OPT", "opt", _OPT),
)
_PHI = ModelFamily("Phi-3.5-MoE", "phimoe", FULL, EXPERTS, "PhiMoEForCausalLM")
_WINDOWS = _rows(
    WINDOW,
    ("Gemma 2", "gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    ("Gemma 3 (270M, 1B), MedGemma text", "gemma3_text", GEMMA),
    ("Command R7B, Command A", "cohere2", {**WINDOWS, "hidden_act": "silu"}),
    ("OLMo 3", "olmo3", WINDOWS | {"tie_word_embeddings": False}),
    ("EXAONE 4", "exaone4", WINDOWS),
    ("Ministral 8B as a class of its own", "ministral", WINDOWS),
    ("gpt-oss", "gpt_oss", {**WINDOWS, **EXPERTS, "num_hidden_layers": 4}),
)

_V3 = {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_V2 = {**LATENT, "topk_method": "group_limited_greedy", "scoring_func": "softmax"}
_V2["norm_topk_prob"] = False
_FLASH = {**_V3, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}
_SPARSE = {**_V3, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
_LATENTS = _rows(
    MLA,
    ("DeepSeek V2-Lite", "deepseek_v2", {**_V2, "q_lora_rank": None}),
    ("DeepSeek V2", "deepseek_v2", _V2),
    ("DeepSeek V3, V3.1, R1; Kimi K2 by its class", "deepseek_v3", _V3),
    ("GLM-4.7-Flash", "glm4_moe_lite", _FLASH),
    ("MiniCPM3", "minicpm3", {**LATENT, "v_head_dim": 8}),
    ("DeepSeek V3.2", "deepseek_v3", _SPARSE, "DeepseekV3ForCausalLM"),
)

_LINEAR = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
_LINEAR |= {"kda_layers": [1], "full_attn_layers": [2]}
_KIMI = {**LATENT, "num_hidden_layers": 2, "linear_attn_config": _LINEAR}
_USUAL = {"max_position_embeddings": 512}
_DELTA_EXPERTS = {**DELTA, **EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16}
_STATES = _rows(
    STATE,
    ("Qwen3.5, dense, text class", "qwen3_5_text", DELTA),
    ("Qwen3.5 MoE, text class", "qwen3_5_moe_text", _DELTA_EXPERTS),
    ("Qwen3-Next", "qwen3_next", {**DELTA, **EXPERTS, "num_hidden_layers": 4}),
    ("Granite 4 hybrid", "granitemoehybrid", _USUAL, "GraniteMoeHybridForCausalLM"),
    ("Falcon H1", "falcon_h1", _USUAL, "FalconH1ForCausalLM"),
    ("Nemotron-H", "nemotron_h", _USUAL, "NemotronHForCausalLM"),
    ("Kimi Linear", "kimi_linear", _KIMI, "KimiLinearForCausalLM"),
    ("LFM2", "lfm2", _USUAL, "Lfm2ForCausalLM"),
    flags=NO_CACHE,
)

_TEXT = {**HEADS, "vocab_size": VOCAB, "initializer_range": 0.2, "tie_word_embeddings": False}
_TEXT |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
_QWEN2 = {**_TEXT, "rope_parameters": _ROPE}
_INTERLEAVED = {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_QWEN3 = {**_TEXT, "rope_parameters": _INTERLEAVED}
_DEEP = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_VL_WINDOWS = {**QWEN_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0]}
_OLD = {**QWEN_VISION, "embed_dim": 16, "hidden_size": 32}
_PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 32}
_SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}


def _images(text: Any, vision: Any, **more: Any) -> dict[str, Any]:
    return {"tie_word_embeddings": False, "text_config": text, "vision_config": vision, **more}


def _qwen(text: Any, vision: Any) -> dict[str, Any]:
    places = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}
    return _images(text, vision, **places)


_IMAGE_HEAD = {"head": "AutoModelForImageTextToText"}
_GEMMA = _images(
    {**_TEXT, **GEMMA, "model_type": "gemma3_text", "tie_word_embeddings": True},
    _SIGLIP,
    image_token_index=60,
    mm_tokens_per_image=16,
    tie_word_embeddings=True,
)
_IMAGES = [
    *_rows(
        IMAGES,
        ("Qwen2-VL", "qwen2_vl", _qwen(_QWEN2, _OLD)),
        ("Qwen2.5-VL", "qwen2_5_vl", _qwen(_QWEN2, _VL_WINDOWS)),
        ("Qwen3-VL", "qwen3_vl", _qwen(_QWEN3, _DEEP)),
        (
            "Mistral Small 3.1, 3.2, Magistral, Devstral",
            "mistral3",
            _images({**_TEXT, "model_type": "mistral"}, _PIXTRAL, image_token_index=60),
        ),
        **_IMAGE_HEAD,
    ),
    *_rows(IMAGES, ("Gemma 3 4B, 12B, 27B", "gemma3", _GEMMA), renamed=TOWER, **_IMAGE_HEAD),
    *_rows(
        IMAGES,
        ("Qwen3.5, dense, as published", "qwen3_5", _qwen({**_QWEN3, **DELTA}, _DEEP)),
        ("Qwen3.5 MoE, as published", "qwen3_5_moe", _qwen({**_QWEN3, **_DELTA_EXPERTS}, _DEEP)),
        flags=NO_CACHE,
        **_IMAGE_HEAD,
    ),
]

_OTHERS = [
    ModelFamily("Llama 4", "llama4_text", OTHER, EXPERTS, "Llama4ForCausalLM", bare=True),
    ModelFamily("MiniMax M3", "llama", OTHER, SIZES, "MiniMaxM3SparseForCausalLM", bare=True),
    ModelFamily("Gemma 4", "llama", OTHER, HEADS, "Gemma4ForCausalLM", bare=True),
]
FAMILIES = [*_FULL, _PHI, *_WINDOWS, *_LATENTS, *_STATES, *_IMAGES, *_OTHERS]
