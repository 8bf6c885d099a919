"""Convert a GGUF file of a Llama, Qwen2 or Gemma 3 to a folder that transformers and SGLang load.

`gguf` reads and dequantizes it, transformers reads its tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from sglang_smc.command.program import ScriptError
from sglang_smc_tools.commands import bar

#: Names of a GGUF's tensors, and those of transformers.
OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",  # absent where it is the embedding's
}
INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Gemma has norms after attention and MLP, too.
GEMMA = INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Keys of a GGUF's architecture, and those of a `config.json`.
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
SPECIAL = ("bos_token_id", "eos_token_id")
#: Of Gemma's layers, every sixth sees all tokens; the GGUF names the window of the others alone.
WINDOWED = ["sliding_attention"] * 5 + ["full_attention"]


class Architecture(NamedTuple):
    """Describe what is peculiar to the GGUF files of one architecture."""

    name: str  # of the class in transformers
    model_type: str
    names: dict[str, str]
    config: Callable[[Callable[[str], Any]], dict[str, Any]]
    permutes: bool = False  # rows of q and k, for llama.cpp's rotary embedding
    norm_offset: float = 0.0  # what is added to the norms' weights


def _gemma(value: Callable[[str], Any]) -> dict[str, Any]:
    layers = int(value("block_count"))
    head = int(value("attention.key_length"))
    return {
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(value("attention.sliding_window")),
        "layer_types": (WINDOWED * layers)[:layers],
        "rope_local_base_freq": 10_000.0,
    }


def _silu(value: Callable[[str], Any]) -> dict[str, Any]:
    return {"hidden_act": "silu"}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", INNER, _silu, permutes=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", INNER, _silu),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", GEMMA, _gemma, norm_offset=1.0),
}


def convert(source: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file, in bfloat16; raise ScriptError for another kind.

    A progress bar tells the bytes of the file that are converted.
    """
    reader = GGUFReader(source)
    kind = _value(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ScriptError(f"{source} is of {kind}; those converted: {', '.join(ARCHITECTURES)}.")
    folder.mkdir(parents=True)
    config = config_of(reader)
    weights = weights_of(reader)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    config["vocab_size"] = len(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special = {key: config[key] for key in SPECIAL}
    for name, content in {"config": config, "generation_config": special}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    save_tokenizer(source, folder, adds_bos=_value(reader, "tokenizer.ggml.add_bos_token", False))


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """Return a field's content; raise ScriptError where it is missing and there is no default."""
    if key in reader.fields:
        return reader.fields[key].contents()
    if default is None:
        raise ScriptError(f"The GGUF file has no field {key}.")
    return default


def config_of(reader: GGUFReader) -> dict[str, Any]:
    """Return the `config.json` of a file, without what only its tensors tell."""
    prefix = _value(reader, "general.architecture")
    kind = ARCHITECTURES[prefix]

    def value(key: str) -> Any:
        return _value(reader, f"{prefix}.{key}")

    return {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "torch_dtype": "bfloat16",
        "transformers_version": version("transformers"),
        **{ours: value(key) for key, ours in SIZES.items()},
        **{key: _value(reader, f"tokenizer.ggml.{key}") for key in SPECIAL},
        **kind.config(value),
    }


def weights_of(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Return all tensors by their names in transformers, in bfloat16."""
    prefix = _value(reader, "general.architecture")
    kind = ARCHITECTURES[prefix]
    heads = {
        "attn_q": _value(reader, f"{prefix}.attention.head_count"),
        "attn_k": _value(reader, f"{prefix}.attention.head_count_kv"),
    }
    weights = {}
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    progress = bar(total=total, unit="B", unit_scale=True, desc="Converting")
    for tensor in reader.tensors:
        *place, base, suffix = tensor.name.split(".")  # blk.0.attn_q.weight, output.weight
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        weight = torch.from_numpy(values).float()
        if kind.permutes and base in heads:
            weight = unpermuted(weight, int(heads[base]))
        if base.endswith("norm"):
            weight -= kind.norm_offset
        name = f"model.layers.{place[1]}.{kind.names[base]}" if place else OUTER[base]
        weights[f"{name}.{suffix}"] = weight.to(torch.bfloat16).contiguous()
        progress.update(int(tensor.n_bytes))
    progress.close()
    return weights


def unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return q's or k's rows in transformers' order, ``[heads * size, ...]``.

    llama.cpp rotates neighbours, 2 i with 2 i + 1; transformers rotates i with i + size / 2.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))  # [heads, size / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)


def save_tokenizer(source: Path, folder: Path, *, adds_bos: bool) -> None:
    """Write the tokenizer; it begins texts with <bos> where the file says so."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if adds_bos:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )
    tokenizer.save_pretrained(folder)
