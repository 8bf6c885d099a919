"""Latent attention and mixtures of experts, against hand-computed and published sizes."""

from typing import Any

import pytest

from sglang_smc.plan.blocks import Windows
from sglang_smc.plan.passes import Rows, forward
from sglang_smc.plan.shapes import from_config

TOY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 4,
    "intermediate_size": 10,
    "num_attention_heads": 2,
    "vocab_size": 20,
    "kv_lora_rank": 5,
    "q_lora_rank": 3,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 9,
    "first_k_dense_replace": 1,
}
# As published: parameters without the extra layer that predicts more tokens, and those that a token
# is multiplied by.
DEEPSEEK_V3 = TOY | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8"},
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "vocab_size": 102400,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "quantization_config": None,
}


def test_toy_by_hand() -> None:
    shape = from_config(TOY)
    # Queries 4 x 3 + 3 x 2 x (6 + 2), latents 4 x 7, keys and values 5 x 2 x 13, output 2 x 7 x 4.
    attention = 12 + 48 + 28 + 130 + 56
    # An expert: 3 x 4 x 9 = 108. The router: 4 x 8.
    assert shape.layer_parameters == 3 * attention + 3 * 4 * 10 + 2 * (9 * 108 + 32)
    assert shape.active_parameters == 3 * attention + 3 * 4 * 10 + 2 * (3 * 108 + 32)
    assert shape.num_parameters == shape.layer_parameters + 2 * 80
    assert shape.kv_bytes_per_token == 3 * (5 + 2) * 2
    # Of each head 7 numbers of a latent against the query's, and 5 of them its value.
    assert shape.attention_flops == 3 * 2 * 2 * (7 + 5)


@pytest.mark.parametrize(
    ("config", "parameters", "active", "kv"),
    [(DEEPSEEK_V3, 671e9, 37e9, 70_272), (DEEPSEEK_V2_LITE, 15.7e9, 2.4e9, 31_104)],
)
def test_published_sizes(
    config: dict[str, Any], parameters: float, active: float, kv: float
) -> None:
    """Of V3, 37 billion count the embedding table or not; of V2-Lite, 2.4 do not."""
    shape = from_config(config)
    assert shape.num_parameters == pytest.approx(parameters, rel=2e-3)
    assert shape.active_parameters + shape.head_parameters == pytest.approx(active, rel=0.03)
    assert shape.kv_bytes_per_token == kv


def test_a_pass_reads_the_experts_that_its_tokens_visit() -> None:
    shape = from_config(TOY)
    one, two, many = (shape.bytes_read(count) for count in (1, 2, 1000))
    assert one == 2 * (shape.active_parameters + 80)
    # The second token finds an expert read already in a quarter of cases.
    assert two == pytest.approx(one + 2 * 2 * 1.5 * 108)
    assert many == pytest.approx(shape.streamed_bytes)


def test_a_pass_computes_with_what_each_token_visits() -> None:
    shape = from_config(TOY)
    rows = Rows(batch=2, num_particles=3, context=10, tail=4, shared_prefix=True)
    found = forward("verify", shape, rows, num_tokens=2, num_logits=2)
    assert found.weights == shape.bytes_read(12)
    # Two prefixes once, six tails of 4, and 12 new tokens.
    assert found.kv == (2 * 10 + 6 * 4 + 12) * 42
    keys = 2 * 14 + 3
    weights = 12 * (shape.active_parameters + shape.head_parameters)
    assert found.flops == 2 * weights + shape.attention_flops * 6 * keys


def test_each_device_has_latents_of_its_own() -> None:
    shape = from_config(TOY)
    assert shape.on_devices(8).kv_bytes_per_token == 8 * shape.kv_bytes_per_token
    assert shape.on_devices(8).streamed_bytes == shape.streamed_bytes
    dense = from_config("llama-3.2-1b")
    assert dense.on_devices(8) == dense


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no whole number for kv_lora_rank"):
        from_config(TOY | {"kv_lora_rank": None})


GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "tie_word_embeddings": True,
    "sliding_window": 512,
}


@pytest.mark.parametrize(
    ("said", "windowed"),
    [
        ({}, 22),
        ({"sliding_window_pattern": 2}, 13),
        ({"layer_types": ["sliding_attention", "full_attention"] * 13}, 13),
    ],
)
def test_layers_with_a_window_read_the_end_of_a_prefix(said: Any, windowed: int) -> None:
    shape = from_config(GEMMA | said)
    assert shape.windows == Windows(windowed, 512)
    assert shape.seen(300) == 300
    assert shape.seen(5120) == pytest.approx((windowed * 512 + (26 - windowed) * 5120) / 26)
    rows = Rows(batch=2, num_particles=4, context=5120, tail=3, shared_prefix=True)
    found = forward("draft", shape, rows, num_tokens=1, num_logits=1)
    tokens = 2 * shape.seen(5120) + 8 * 3 + 8
    assert found.kv == pytest.approx(tokens * shape.kv_bytes_per_token)


def test_gemma_3_has_the_weights_of_its_name() -> None:
    """1.0 billion, of which 0.3 are the table."""
    assert from_config(GEMMA).num_parameters == pytest.approx(1.0e9, rel=0.03)


#: 27 billion weights, by the sizes that the model's card has.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248_320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
    },
}


def test_a_state_takes_the_place_of_keys() -> None:
    shape = from_config(QWEN)
    assert shape.num_parameters == pytest.approx(27e9, rel=0.02)
    assert shape.kv_bytes_per_token == 2 * 16 * 4 * 256 * 2, "of a quarter of the layers"
    assert shape.states is not None
    assert shape.states.bytes == 48 * 48 * 128 * 128 * 4


@pytest.mark.parametrize(("num_tokens", "moves"), [(1, 2), (9, 4)])
def test_a_pass_moves_each_state(num_tokens: int, moves: int) -> None:
    """Read and written once to decode; twice where kept columns are caught up with first."""
    shape = from_config(QWEN)
    assert shape.states is not None
    rows = Rows(batch=2, num_particles=4, context=100, tail=0, shared_prefix=True)
    found = forward("verify", shape, rows, num_tokens, num_tokens)
    tokens = 2 * 100 + 8 * num_tokens
    assert found.kv == tokens * shape.kv_bytes_per_token + moves * 8 * shape.states.bytes


def test_the_decoder_of_a_class_with_images_is_planned_for() -> None:
    text = {key: value for key, value in GEMMA.items() if key != "architectures"}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert from_config(config) == from_config(GEMMA)
