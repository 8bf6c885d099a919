"""Sizes of models, against hand-computed and published ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_smc.plan.shapes import BUILT_IN, ModelShape, from_config

ROOT = Path(__file__).parents[2]
TOY = ModelShape(
    num_layers=3,
    hidden_size=4,
    intermediate_size=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=20,
    tied_embeddings=False,
)
TOY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 4,
    "intermediate_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 20,
}
# Of the checkpoints' tensors, as their model cards state them.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def test_toy_by_hand() -> None:
    # A layer: 4 x (8 query + 8 output + 4 key + 4 value) + 3 x 4 x 2 = 120. A table: 20 x 4.
    assert TOY.layer_parameters == 3 * 120
    assert TOY.num_parameters == 3 * 120 + 2 * 80
    assert TOY.streamed_bytes == 2 * (3 * 120 + 80)
    assert TOY.resident_bytes == 2 * (3 * 120 + 160)
    assert TOY.kv_bytes_per_token == 2 * 3 * 4 * 2
    # 8 numbers of a query against 10 keys and 10 values, in 3 layers, 2 operations each.
    assert TOY.flops_per_token(10) == 2 * (3 * 120 + 80) + 2 * 2 * 3 * 8 * 10


def test_built_in_models_have_their_published_sizes() -> None:
    assert BUILT_IN.keys() == PARAMETERS.keys()
    for name, shape in BUILT_IN.items():
        assert shape.num_parameters == pytest.approx(PARAMETERS[name], rel=2e-4), name


def test_kv_of_llama() -> None:
    assert BUILT_IN["llama-3.1-8b"].kv_bytes_per_token == 131_072
    assert BUILT_IN["llama-3.2-1b"].kv_bytes_per_token == 32_768


def test_a_config_is_a_dict_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TOY_CONFIG))
    assert from_config(TOY_CONFIG) == TOY
    assert from_config(tmp_path) == TOY
    assert from_config(str(tmp_path / "config.json")) == TOY


def test_the_shipped_pair() -> None:
    target = from_config(ROOT / "bench/pair/target")
    assert target.tied_embeddings
    assert target.num_parameters == 5 * (256 * 768 + 3 * 256 * 704) + 512 * 256


def test_what_older_configs_leave_out() -> None:
    """Without grouped heads and an explicit head size, as in Llama 2."""
    older = {k: v for k, v in TOY_CONFIG.items() if k not in ("num_key_value_heads", "head_dim")}
    shape = from_config(older)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 1)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
    ],
)
def test_fp8_leaves_head_and_kv_in_16_bits(quantization: dict[str, Any]) -> None:
    shape = from_config(TOY_CONFIG | {"quantization_config": quantization})
    assert shape.streamed_bytes == 1 * 3 * 120 + 2 * 80
    assert shape.kv_bytes == 2


def test_weight_bytes_override() -> None:
    assert from_config("llama-3.2-1b", weight_bytes=1).weight_bytes == 1
    wide = from_config(TOY_CONFIG, weight_bytes=4)
    assert wide.streamed_bytes == 4 * (3 * 120 + 80)
    assert wide.kv_bytes == 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("llama-9b", "'llama-9b' is neither .*llama-3.1-8b"),
        (TOY_CONFIG | {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*Llama"),
        ({"hidden_size": 4}, "architecture is none"),
        (TOY_CONFIG | {"hidden_size": None}, "no whole number for hidden_size"),
        (TOY_CONFIG | {"sliding_window": 4096}, "window of 4096"),
        (TOY_CONFIG | {"quantization_config": {"quant_method": "awq"}}, "'awq'.*fp8"),
        (
            TOY_CONFIG
            | {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
                }
            },
            "with 8 bits",
        ),
    ],
)
def test_what_it_does_not_know_it_refuses(source: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_config(source)


def test_an_unused_window_is_no_window() -> None:
    """Qwen2 and Qwen3 configurations name a window and switch it off."""
    config = TOY_CONFIG | {"sliding_window": 4096, "use_sliding_window": False}
    assert from_config(config) == TOY


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        from_config(tmp_path)
