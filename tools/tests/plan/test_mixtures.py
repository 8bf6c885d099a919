"""Mixtures of experts: published sizes, the experts that a round visits, what that costs."""

import json
from typing import Any

import pytest
from toy_plans import LLAMA_CONFIG, config

from sglang_smc_tools.plan.cli import main
from sglang_smc_tools.plan.experts import MIXTURES, MXFP4_BYTES
from sglang_smc_tools.plan.shapes import from_config

#: The numbers of published configurations.
QWEN3_MOE = config(
    "Qwen3MoeForCausalLM",
    """
    num_hidden_layers=48 hidden_size=2048 intermediate_size=6144 num_attention_heads=32
    num_key_value_heads=4 head_dim=128 vocab_size=151936 num_experts=128 num_experts_per_tok=8
    moe_intermediate_size=768 decoder_sparse_step=1
    """,
)
PUBLISHED = {
    "Qwen3-30B-A3B": (QWEN3_MOE, 30.5e9, 3.0e9),
    "Mixtral 8x7B": (
        config(
            "MixtralForCausalLM",
            """
            num_hidden_layers=32 hidden_size=4096 intermediate_size=14336 num_attention_heads=32
            num_key_value_heads=8 vocab_size=32000 num_local_experts=8 num_experts_per_tok=2
            """,
        ),
        46.7e9,
        12.7e9,
    ),
    "GLM-4.5-Air": (
        config(
            "Glm4MoeForCausalLM",
            """
            num_hidden_layers=46 hidden_size=4096 intermediate_size=10944 num_attention_heads=96
            num_key_value_heads=8 head_dim=128 vocab_size=151552 n_routed_experts=128
            n_shared_experts=1 num_experts_per_tok=8 moe_intermediate_size=1408
            first_k_dense_replace=1 num_nextn_predict_layers=1
            """,
        ),
        107e9,
        12.9e9,
    ),
    "MiniMax M2": (
        config(
            "MiniMaxM2ForCausalLM",
            """
            num_hidden_layers=62 hidden_size=3072 intermediate_size=1536 num_attention_heads=48
            num_key_value_heads=8 head_dim=128 vocab_size=200064 num_local_experts=256
            num_experts_per_tok=8
            """,
            quantization_config={"quant_method": "fp8"},
        ),
        229e9,
        10.4e9,
    ),
    "gpt-oss 20B": (
        config(
            "GptOssForCausalLM",
            """
            num_hidden_layers=24 hidden_size=2880 intermediate_size=2880 num_attention_heads=64
            num_key_value_heads=8 head_dim=64 vocab_size=201088 num_local_experts=32
            num_experts_per_tok=4 sliding_window=128
            """,
            quantization_config={"quant_method": "mxfp4"},
        ),
        20.9e9,
        3.6e9,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config(
            "Qwen2MoeForCausalLM",
            """
            num_hidden_layers=24 hidden_size=2048 intermediate_size=5632 num_attention_heads=16
            num_key_value_heads=16 vocab_size=151936 num_experts=60 num_experts_per_tok=4
            moe_intermediate_size=1408 shared_expert_intermediate_size=5632 sliding_window=32768
            """,
            use_sliding_window=False,
        ),
        14.3e9,
        2.4e9,
    ),
    "OLMoE": (
        config(
            "OlmoeForCausalLM",
            """
            num_hidden_layers=16 hidden_size=2048 intermediate_size=1024 num_attention_heads=16
            num_key_value_heads=16 vocab_size=50304 num_experts=64 num_experts_per_tok=8
            """,
        ),
        6.9e9,
        1.2e9,
    ),
    "Phi-3.5-MoE": (
        config(
            "PhiMoEForCausalLM",
            """
            num_hidden_layers=32 hidden_size=4096 intermediate_size=6400 num_attention_heads=32
            num_key_value_heads=8 vocab_size=32064 num_local_experts=16 num_experts_per_tok=2
            sliding_window=131072 max_position_embeddings=131072
            """,
        ),
        41.9e9,
        6.5e9,
    ),
    "ERNIE 4.5 21B-A3B": (
        config(
            "Ernie4_5_MoeForCausalLM",
            """
            num_hidden_layers=28 hidden_size=2560 intermediate_size=12288 num_attention_heads=20
            num_key_value_heads=4 head_dim=128 vocab_size=103424 moe_num_experts=64 moe_k=6
            moe_num_shared_experts=2 moe_layer_start_index=1 moe_intermediate_size=1536
            """,
            tie_word_embeddings=True,
        ),
        21.6e9,
        3.26e9,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mixtures_have_their_sizes(name: str) -> None:
    """Active weights are a token's, with the LM head."""
    source, parameters, active = PUBLISHED[name]
    shape = from_config(source)
    assert shape.num_parameters == pytest.approx(parameters, rel=0.02)
    assert shape.active_parameters + shape.head_parameters == pytest.approx(active, rel=0.04)


def test_experts_in_four_bits_are_read_as_such() -> None:
    """12.8 GiB are published; beside the experts all is in 16 bits, as with --dtype all is."""
    shape = from_config(PUBLISHED["gpt-oss 20B"][0])
    assert shape.resident_bytes == pytest.approx(12.8 * 2**30, rel=0.02)
    assert shape.windowed_layers == 12
    one = 3 * 2880 * 2880 * 24
    more = shape.bytes_read(2) - shape.bytes_read(1)
    assert more == pytest.approx(4 * (1 - 4 / 32) * one * MXFP4_BYTES)
    whole = from_config(PUBLISHED["gpt-oss 20B"][0], 2.0)
    assert whole.resident_bytes == 2 * whole.num_parameters


def test_rows_that_overlap_visit_fewer_experts() -> None:
    shape = from_config(QWEN3_MOE)
    uniform = [shape.experts.visited(rows) for rows in (1, 40)] if shape.experts else []
    assert uniform == pytest.approx([8, 128 * (1 - (15 / 16) ** 40)])
    half = shape.with_overlap(0.5)
    assert half.experts is not None and half.experts.visited(1) == pytest.approx(8)
    assert half.experts.visited(41) == pytest.approx(128 * (1 - (15 / 16) ** 21))
    assert half.resident_bytes == shape.with_overlap(1.0).resident_bytes == shape.resident_bytes
    with pytest.raises(ValueError, match=r"no experts\. Leave it out"):
        from_config(LLAMA_CONFIG).with_overlap(0.5)


def test_a_plan_says_how_many_experts_a_round_visits(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_MOE))
    asked = f"--target {path} --draft ngram --device h200 --particles 1,8 --steps 4"
    for more in ("", "--tokens-per-pass 3"):
        main([*asked.split(), *more.split()])
        told = capsys.readouterr().out
        assert "experts a layer" in told
        rows = [line.split() for line in told.splitlines() if "N=1" in line or "N=8" in line]
        assert any("35" in row for row in rows) and any("118" in row for row in rows)
    main([*asked.split(), "--expert-overlap", "0.5", "--json"])
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings[-1]["experts_visited"] == pytest.approx(128 * (1 - (15 / 16) ** 20.5))


def test_dense_layers_between_experts_are_refused() -> None:
    for odd in ({"mlp_only_layers": [3]}, {"decoder_sparse_step": 2}):
        with pytest.raises(ValueError, match="dense MLPs between layers"):
            from_config(QWEN3_MOE | odd)
    with pytest.raises(ValueError, match="no whole number for num_experts"):
        from_config({**QWEN3_MOE, "num_experts": None})
    assert set(MIXTURES) >= {source["architectures"][0] for source, *_ in PUBLISHED.values()}
