"""Tiny random checkpoints of the families that `bench/support` knows, over one vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from head_laws import KINDS, add_mtp_layer, make_head
from published_heads import PUBLISHED, write_head
from safetensors.torch import load_file, save_file
from support.families import EOS, FAMILIES, VOCAB
from tiny_models import make_tiny_model, tiny_tokenizer

MTP = "its own MTP layer"

# Of decays of linear attention, as slow as trained ones: random ones forget all in a token.
LOG_RATE = -2.0
_MORE: dict[str, dict[str, Any]] = {
    "gemma3": {"boi_token_index": 62, "eoi_token_index": 63},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "glm4_moe": {"num_nextn_predict_layers": 1},
}
RENAMED = {one.model_type: one.renamed for one in FAMILIES if one.renamed}
CONFIGS = {one.model_type: one.config | _MORE.get(one.model_type, {}) for one in reversed(FAMILIES)}


def make_family(path: Path, family: str, *, seed: int = 0, **changes: Any) -> str:
    """Save a random checkpoint of ``family`` and its tokenizer under ``path``; return it.

    There is no image processor beside one that takes images: whatever asks for it fails.
    """
    config = CONFIGS[family]
    takes_images = "vision_config" in CONFIGS[family]
    whole: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS}
    if not takes_images:
        whole |= {"vocab_size": VOCAB, "initializer_range": 0.3, "tie_word_embeddings": False}
    given = transformers.AutoConfig.for_model(family, **{**whole, **config, **changes})
    auto: Any = transformers.AutoModelForCausalLM
    if takes_images:
        auto = transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(given).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            torch.nn.init.constant_(parameter, LOG_RATE)
        elif name.endswith(".mm_input_projection_weight"):  # zeros: no image would be seen
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    if interval := config.get("full_attention_interval"):
        # As published checkpoints say it; transformers saves the layers' types alone.
        saved = path / "config.json"
        told = json.loads(saved.read_text()) | {"full_attention_interval": interval}
        saved.write_text(json.dumps(told))
    if family in RENAMED:
        file = path / "model.safetensors"
        weights = {name.replace(*RENAMED[family]): value for name, value in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    tokenizer = tiny_tokenizer(VOCAB, EOS)
    if takes_images:
        template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


def make_model(path: Path, kind: str, seed: int, target: str = "") -> str:
    """Save a model, or a draft for a ``target``: a head, or a layer within it; return its path.

    ``kind`` is a family, "padded", one of `head_laws.KINDS` or `PUBLISHED`, or `MTP`.
    """
    if kind == MTP:
        add_mtp_layer(target)
        return target
    if kind in KINDS:
        return make_head(kind, target, path)
    if kind in PUBLISHED:
        return write_head(kind, target, path)
    if kind == "padded":
        return make_tiny_model(path, padding=3, seed=seed, layers=4)
    changes = {"num_hidden_layers": 4} if kind == "llama" else {}
    return make_family(path, kind, seed=seed, **changes)
