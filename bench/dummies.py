"""Write models without weights, and tokenizers of meaningless words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_smc_tools.plan.shapes import ModelShape

#: Token ids; the first word of a prompt is neither padding nor EOS.
PADDING = 0
END = 1
FIRST_TOKEN = 2


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a configuration, and a tokenizer unless there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not (folder / "tokenizer.json").exists():
        word_tokenizer(config["vocab_size"]).save_pretrained(folder)


def llama_config(shape: ModelShape) -> dict[str, Any]:
    """Return the ``config.json`` of a Llama of this shape."""
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "pad_token_id": PADDING,
        "eos_token_id": END,
        "bos_token_id": None,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    if shape.weight_bytes < 2:
        # Dummy weights are then created in eight bits; in sixteen they would not fit.
        content["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return content


def word_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer of the words t2, t3 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"t{i}" for i in range(FIRST_TOKEN, vocab_size))]
    places = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
