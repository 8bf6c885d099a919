"""Tiny random Llama checkpoints with a word tokenizer, and fast engine settings for tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_smc.options.server import FIELDS

# The fastest start of a real engine: nothing is warmed up, captured or sized by free memory.
ENGINE_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "random_seed": 0,
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "context_length": 256,
    "chunked_prefill_size": 512,
    "watchdog_timeout": 300,
    "log_level": "error",
    "sleep_on_idle": True,
}

# SGLang checks after every batch that no KV slot is lost.
STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def make_tiny_model(
    path: str | Path,
    *,
    vocab_size: int = 64,
    padding: int = 0,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    scale: float = 0.3,
    eos: int = 1,
) -> str:
    """Save a random Llama checkpoint and its tokenizer under ``path``; return ``str(path)``.

    ``scale`` is the standard deviation of every weight matrix: the larger, the more peaked the
    next-token distributions. Two calls that differ only in ``seed`` (or size) make a target and
    a draft over one vocabulary. Token ``i`` reads ``t<i>``; 0 is ``<pad>``, ``eos`` is ``<eos>``.
    The model has ``padding`` ids more than its tokenizer.
    """
    config = LlamaConfig(
        vocab_size=vocab_size + padding,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=scale,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=eos,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tiny_tokenizer(vocab_size, eos).save_pretrained(path)
    return str(path)


def tiny_tokenizer(
    vocab_size: int, eos: int, last: tuple[str, ...] = (), **special: Any
) -> PreTrainedTokenizerFast:
    words = [*(f"t{i}" for i in range(vocab_size - len(last))), *last]
    words[0] = "<pad>"
    words[eos] = "<eos>"
    word_level = models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>")
    tokenizer = Tokenizer(word_level)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        **special,
    )


def smc_arguments(target: str, draft: str, **settings: Any) -> dict[str, Any]:
    """Engine keywords for SMC; settings without prefix: ``num_particles=4, num_steps=2``.

    N and K stay unless ``adaptive`` says otherwise: measuring what rounds cost takes seconds.
    """
    own = {FIELDS[name]: settings.pop(name) for name in FIELDS.keys() & settings.keys()}
    return {
        "model_path": target,
        "speculative_algorithm": "SMC",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": 3,
        "speculative_smc_adaptive": "off",
        **own,
        **settings,
    }
