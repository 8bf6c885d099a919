"""Tiny random checkpoints of models that take images beside text, by the name of the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_families import EOS, SIZES, VOCAB
from tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

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

FAMILIES: dict[str, dict[str, Any]] = {
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


def make_image_family(path: str | Path, family: str, *, seed: int = 0) -> str:
    """Save a random checkpoint of ``family`` and its tokenizer under ``path``; return it.

    There is no image processor beside it: who asks for one fails.
    """
    config = AutoConfig.for_model(
        family,
        **{"tie_word_embeddings": False, **FAMILIES[family]},
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tokenizer = tiny_tokenizer(VOCAB, EOS)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)
