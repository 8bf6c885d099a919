"""Tiny random checkpoints of many architectures over one vocabulary, by the name of the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, EOS = 64, 1

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# SGLang serves some families with tied embeddings only, whatever a configuration says.
_TIED = {"tie_word_embeddings": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {**_SIZES, **_TIED, "head_dim": 8},
    "gpt2": {**_TIED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "llama": _SIZES,
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        **_TIED,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "phi3": _SIZES,
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 8},
    "qwen3_moe": {
        **_SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": {
        **_SIZES,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    # Refused: a sliding window and a logit cap.
    "gemma2": {
        **_SIZES,
        **_TIED,
        "head_dim": 8,
        "sliding_window": 32,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


# Of decays of linear attention, as slow as trained ones: random ones forget all in a token.
LOG_RATE = -2.0


def make_family(
    path: str | Path, family: str, *, seed: int = 0, scale: float = 0.3, vocab_size: int = VOCAB
) -> str:
    """Save a random checkpoint of ``family`` and its tokenizer under ``path``; return it."""
    config = AutoConfig.for_model(
        family,
        **{"tie_word_embeddings": False, **FAMILIES[family]},
        vocab_size=vocab_size,
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
    tiny_tokenizer(vocab_size, EOS).save_pretrained(path)
    return str(path)


def _say_interval(config: Path, interval: int) -> None:
    """What published checkpoints say; transformers saves the layers' types alone."""
    said = json.loads(config.read_text()) | {"full_attention_interval": interval}
    config.write_text(json.dumps(said))
