"""A model and two heads so small that the planner's numbers can be worked out by hand."""

from typing import Any

from sglang_smc_tools.plan.shapes import ModelShape

#: 120 weights in its layer, 80 in its LM head, 16 bytes of KV a token, 32 operations a key.
TOY = ModelShape(
    num_layers=1,
    hidden_size=4,
    intermediate_size=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=20,
    tied_embeddings=True,
)


def config(arch: str, numbers: str, **more: Any) -> dict[str, Any]:
    """Return a model's configuration, of numbers as `name=1 other=2` and of what else it has."""
    pairs = (pair.split("=") for pair in numbers.split())
    return {"architectures": [arch], **{name: int(value) for name, value in pairs}, **more}


_SIZES = """
    num_hidden_layers=1 hidden_size=4 intermediate_size=2 num_attention_heads=4
    num_key_value_heads=2 head_dim=2 vocab_size=20
"""
LLAMA_CONFIG = config("LlamaForCausalLM", _SIZES, tie_word_embeddings=True)
EAGLE3_CONFIG = config("LlamaForCausalLMEagle3", f"{_SIZES} draft_vocab_size=6")
DFLASH_CONFIG = config("DFlashDraftModel", f"{_SIZES} num_hidden_layers=2 block_size=8")
DFLASH_CONFIG["dflash_config"] = {"mask_token_id": 19, "target_layer_ids": [1, 2, 3]}
#: The head for Llama 3.1 8B, as its file has it.
EAGLE3_8B = config(
    "LlamaForCausalLMEagle3",
    """
    num_hidden_layers=1 hidden_size=4096 intermediate_size=14336 num_attention_heads=32
    num_key_value_heads=8 vocab_size=128256 draft_vocab_size=32000
    """,
)
