"""Sizes of models and heads, against hand-computed and published ones, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_plans import DFLASH_CONFIG, EAGLE3_8B, EAGLE3_CONFIG, LLAMA_CONFIG, TOY, config

from sglang_smc_tools.plan.roofline import PassRows, forward
from sglang_smc_tools.plan.shapes import (
    BUILT_IN,
    DRAFTS,
    MODELOPT_FILE,
    draft_for,
    from_config,
    lowest_precision,
)
from sglang_smc_tools.plan.shapes import draft_from_config as draft_of

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
#: Latents and experts.
DEEPSEEK = config(
    "DeepseekV3ForCausalLM",
    """
    num_hidden_layers=3 hidden_size=4 intermediate_size=10 num_attention_heads=2 vocab_size=20
    kv_lora_rank=5 q_lora_rank=3 qk_nope_head_dim=6 qk_rope_head_dim=2 v_head_dim=7
    n_routed_experts=8 n_shared_experts=1 num_experts_per_tok=2 moe_intermediate_size=9
    first_k_dense_replace=1
    """,
)
DEEPSEEK_V3 = config(
    "DeepseekV3ForCausalLM",
    """
    num_hidden_layers=61 hidden_size=7168 intermediate_size=18432 num_attention_heads=128
    vocab_size=129280 kv_lora_rank=512 q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64
    v_head_dim=128 n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=8
    moe_intermediate_size=2048 first_k_dense_replace=3
    """,
    quantization_config={"quant_method": "fp8"},
)
GEMMA = config(
    "Gemma3ForCausalLM",
    """
    num_hidden_layers=26 hidden_size=1152 intermediate_size=6912 num_attention_heads=4
    num_key_value_heads=1 head_dim=256 vocab_size=262144 sliding_window=512
    """,
    tie_word_embeddings=True,
)
#: 27 billion weights, by the sizes that the model's card has; those of the mixture are 35 billion.
_QWEN = config(
    "Qwen3_5ForCausalLM",
    """
    num_hidden_layers=64 hidden_size=5120 intermediate_size=17408 num_attention_heads=24
    num_key_value_heads=4 head_dim=256 vocab_size=248320 linear_num_key_heads=16
    linear_num_value_heads=48 linear_key_head_dim=128 linear_value_head_dim=128
    full_attention_interval=4
    """,
)
QWEN = config("Qwen3_5ForConditionalGeneration", "", tie_word_embeddings=False, text_config=_QWEN)
_SPARSE = """
    num_hidden_layers=40 hidden_size=2048 num_attention_heads=16 num_key_value_heads=2
    linear_num_value_heads=32 num_experts=256 num_experts_per_tok=8 moe_intermediate_size=512
    shared_expert_intermediate_size=512
"""
QWEN_MOE = _QWEN | config("Qwen3_5MoeForCausalLM", _SPARSE)
del QWEN_MOE["intermediate_size"]
#: A layer of attention behind three of states; the mixture's experts are as wide as its MLP.
_STATES = """
    num_hidden_layers=4 linear_num_key_heads=1 linear_num_value_heads=3 linear_key_head_dim=4
    linear_value_head_dim=5 full_attention_interval=4 mtp_num_hidden_layers=1
"""
SMALL_QWEN = LLAMA_CONFIG | config("Qwen3_5ForCausalLM", _STATES)


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    # A layer: 4 x (8 query + 8 output + 4 key + 4 value) + 3 x 4 x 2 = 120. A table: 20 x 4.
    assert (TOY.layer_parameters, TOY.num_parameters) == (120, 200)
    assert (TOY.streamed_bytes, TOY.kv_bytes_per_token) == (400, 2 * 4 * 2)
    # 8 numbers of a query against a key and its value, 2 operations each.
    assert (TOY.active_parameters, TOY.attention_flops) == (120, 2 * 2 * 8)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    for source in (LLAMA_CONFIG, tmp_path, str(tmp_path / "config.json")):
        assert from_config(source) == TOY
    # Qwen2 and Qwen3 configurations name a window and switch it off.
    assert from_config(LLAMA_CONFIG | {"sliding_window": 9, "use_sliding_window": False}) == TOY
    older = from_config(LLAMA_CONFIG | {"num_key_value_heads": None, "head_dim": None})  # Llama 2
    assert (older.num_kv_heads, older.head_dim) == (4, 1)


def test_built_in_hybrids_are_their_configurations_with_an_mtp_layer() -> None:
    for name, published in {"qwen3.5-27b": QWEN, "qwen3.5-35b-a3b": QWEN_MOE}.items():
        assert BUILT_IN[name] == replace(from_config(published), mtp_layers=1)
        assert name not in DRAFTS, "recurrent models draft for none"


def test_built_in_models_have_their_published_sizes() -> None:
    hybrids = {name for name, shape in BUILT_IN.items() if shape.states}
    assert BUILT_IN.keys() - hybrids == PARAMETERS.keys()
    for name, shape in ((name, BUILT_IN[name]) for name in PARAMETERS):
        assert shape.num_parameters == pytest.approx(PARAMETERS[name], rel=2e-4), name
    assert BUILT_IN["llama-3.1-8b"].kv_bytes_per_token == 131_072


EIGHT_BITS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "compressed-tensors", "config_groups": EIGHT_BITS},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "w8a8_int8"},
        {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
    ],
)
def test_8_bits_leave_head_and_kv_in_16_bits(said: dict[str, Any]) -> None:
    shape = from_config(LLAMA_CONFIG | {"quantization_config": said})
    assert (shape.streamed_bytes, shape.kv_bytes) == (120 + 2 * 80, 2)
    assert shape.dequantized().streamed_bytes == 2 * 200


def test_what_modelopt_says_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / MODELOPT_FILE).write_text(json.dumps(told))
    assert from_config(tmp_path).streamed_bytes == 120 + 2 * 80
    (tmp_path / MODELOPT_FILE).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ValueError, match="quantization is 'modelopt_nvfp4'"):
        from_config(tmp_path)


def test_text_below_images_is_quantized_as_the_whole_model() -> None:
    """Its configuration says so beside the text's, not in it."""
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": LLAMA_CONFIG}
    small = from_config(whole | {"quantization_config": {"quant_method": "fp8"}})
    assert (small.weight_bytes, from_config(whole).weight_bytes) == (1, 2)


def test_wider_weights_are_as_they_are_asked_for() -> None:
    wide = from_config(LLAMA_CONFIG, weight_bytes=4)
    assert (wide.streamed_bytes, wide.kv_bytes) == (4 * 200, 4)


def test_int8_is_of_layers_and_lm_head() -> None:
    """A table that is the LM head too is kept once; a cut one is a copy beside it."""
    tied = draft_of(LLAMA_CONFIG | {"tie_word_embeddings": True}).fused_in_int8()
    assert (tied.streamed_bytes, tied.resident_bytes, tied.kv_bytes) == (120 + 80, 120 + 80, 2)
    own = draft_of(LLAMA_CONFIG | {"tie_word_embeddings": False}).fused_in_int8()
    assert (own.streamed_bytes, own.resident_bytes) == (120 + 80, 120 + 80 + 2 * 80)
    cut = tied.with_head_of(3)
    assert cut.streamed_bytes == 120 + 3 * tied.hidden_size
    assert cut.resident_bytes == cut.streamed_bytes + 2 * 80
    assert lowest_precision(tied) == 2, "products are in 16 bits"


def test_latents_and_experts_by_hand() -> None:
    shape = from_config(DEEPSEEK)
    # Queries 4 x 3 + 3 x 2 x (6 + 2), latents 4 x 7, keys and values 5 x 2 x 13, output 2 x 7 x 4.
    attention = 12 + 48 + 28 + 130 + 56
    # An expert: 3 x 4 x 9 = 108. The router: 4 x 8.
    assert shape.layer_parameters == 3 * attention + 3 * 4 * 10 + 2 * (9 * 108 + 32)
    assert shape.active_parameters == 3 * attention + 3 * 4 * 10 + 2 * (3 * 108 + 32)
    assert shape.num_parameters == shape.layer_parameters + 2 * 80
    assert shape.kv_bytes_per_token == 3 * (5 + 2) * 2
    # Of each head 7 numbers of a latent against the query's, and 5 of them its value.
    assert shape.attention_flops == 3 * 2 * 2 * (7 + 5)
    # A pass reads the experts that its tokens visit: the second finds one there in a quarter.
    one = 2 * (shape.active_parameters + 80)
    assert shape.bytes_read(1) == one
    assert shape.bytes_read(2) == pytest.approx(one + 2 * 2 * 1.5 * 108)
    assert shape.bytes_read(1000) == pytest.approx(shape.streamed_bytes)
    # Each device has latents of its own.
    assert shape.on_devices(8).kv_bytes_per_token == 8 * shape.kv_bytes_per_token
    assert shape.on_devices(8).streamed_bytes == shape.streamed_bytes
    assert TOY.on_devices(8) == TOY


def test_a_pass_computes_with_what_each_token_visits() -> None:
    shape = from_config(DEEPSEEK)
    rows = PassRows(batch=2, num_particles=3, context=10, tail=4, shared_prefix=True)
    found = forward("verify", shape, rows, num_tokens=2, num_logits=2)
    assert found.weights == shape.bytes_read(12)
    # Two prefixes once, six tails of 4, and 12 new tokens.
    assert found.kv == (2 * 10 + 6 * 4 + 12) * 42
    weights = 12 * (shape.active_parameters + shape.head_parameters)
    assert found.flops == 2 * weights + shape.attention_flops * 6 * (2 * 14 + 3)


@pytest.mark.parametrize(
    ("config", "parameters", "active", "kv"),
    [
        (DEEPSEEK_V3, 671e9, 37e9, 70_272),
        (GEMMA, 1.0e9, 1.0e9, 26_624),
        (QWEN, 27e9, 25.6e9, 65_536),
        (QWEN_MOE, 34.7e9, 2.9e9, 20_480),
    ],
    ids=["DeepSeek V3", "Gemma 3 1B", "Qwen 3.5", "Qwen 3.5 MoE"],
)
def test_published_sizes_of_other_families(
    config: dict[str, Any], parameters: float, active: float, kv: int
) -> None:
    """Active ones are a token's, with the LM head."""
    shape = from_config(config)
    assert shape.num_parameters == pytest.approx(parameters, rel=0.03)
    assert shape.active_parameters + shape.head_parameters == pytest.approx(active, rel=0.03)
    assert shape.kv_bytes_per_token == kv


@pytest.mark.parametrize(
    ("text", "images"),
    [
        (GEMMA, "Gemma3ForConditionalGeneration"),
        (LLAMA_CONFIG, "Mistral3ForConditionalGeneration"),
        (QWEN_MOE, "Qwen3_5MoeForConditionalGeneration"),
    ],
)
def test_a_class_with_images_has_the_size_of_its_decoder(text: Any, images: str) -> None:
    decoder = {key: value for key, value in text.items() if key != "architectures"}
    assert from_config({"architectures": [images], "text_config": decoder}) == from_config(text)


@pytest.mark.parametrize(
    ("config", "layer", "kv"),
    [
        # Attention as above; all eight experts and the shared one; the router 4 x 8.
        (DEEPSEEK | {"num_nextn_predict_layers": 1}, 274 + 9 * 108 + 32, (5 + 2) * 2),
        # Queries, their gate and the output 4 x 8 each, keys and values 4 x 4; the MLP 3 x 4 x 2.
        (SMALL_QWEN, 3 * 32 + 2 * 16 + 24, 2 * 4 * 2),
    ],
    ids=["DeepSeek", "Qwen 3.5"],
)
def test_a_target_s_own_layer_drafts(config: dict[str, Any], layer: int, kv: int) -> None:
    """Its fc makes 4 numbers of an embedding and a state; embeddings, LM head are the target's."""
    draft = draft_for(from_config(config), "mtp")
    assert (draft.kind, draft.is_head, draft.max_steps) == ("mtp", True, None)
    assert (draft.layer_parameters, draft.fc_parameters) == (layer, 2 * 4 * 4)
    assert draft.num_parameters == layer + 32
    assert draft.resident_bytes == 2 * (layer + 32)
    assert draft.streamed_bytes == 2 * (layer + 80)
    assert (draft.kv_bytes_per_token, draft.hidden_state_bytes(3, 2)) == (kv, (3 * 3 + 5) * 4 * 2)
    assert draft.states is None or draft.states.bytes == 0  # it attends to all of the text
    assert draft_for(TOY, "ngram") == DRAFTS["ngram"]
    for count in (0, 2):
        others = dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), count)
        with pytest.raises(ValueError, match=f"configuration has {count} MTP layers.*allowed: one"):
            draft_for(from_config(config | others), "mtp")


def test_a_layer_in_a_checkpoint_of_its_own_drafts_as_the_target_s() -> None:
    sizes = LLAMA_CONFIG | {"architectures": ["MiMoMTP"], "num_hidden_layers": 1}
    target = from_config(LLAMA_CONFIG | {"num_nextn_predict_layers": 1})
    alike = {"mtp_layers": 1, "tied_embeddings": target.tied_embeddings}  # of the target
    assert replace(draft_of(sizes), **alike) == draft_for(target, "mtp")
    assert draft_for(target, "mtp", 1.0).weight_bytes == 1.0


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
    assert (shape.windowed_layers, shape.window) == (windowed, 512)
    assert shape.seen(300) == 300
    seen = (windowed * 512 + (26 - windowed) * 5120) / 26
    rows = PassRows(batch=2, num_particles=4, context=5120, tail=3, shared_prefix=True)
    found = forward("draft", shape, rows, num_tokens=1, num_logits=1)
    assert found.kv == pytest.approx((2 * seen + 8 * 3 + 8) * shape.kv_bytes_per_token)


@pytest.mark.parametrize(("num_tokens", "moves"), [(1, 2), (9, 4)])
def test_a_pass_moves_each_state(num_tokens: int, moves: int) -> None:
    """Read and written once to decode; twice where kept columns are caught up with first."""
    shape = from_config(QWEN)
    assert shape.states is not None and shape.states.bytes == 48 * 48 * 128 * 128 * 4
    rows = PassRows(batch=2, num_particles=4, context=100, tail=0, shared_prefix=True)
    found = forward("verify", shape, rows, num_tokens, num_tokens)
    tokens = 2 * 100 + 8 * num_tokens
    assert found.kv == tokens * shape.kv_bytes_per_token + moves * 8 * shape.states.bytes


def test_eagle3_sizes_by_hand() -> None:
    """Its first layer makes 16 numbers of an embedding and a state: 4 x 16 more weights."""
    head = draft_of(EAGLE3_CONFIG)
    assert head.kind == "eagle3"
    assert (head.layer_parameters, head.fc_parameters) == (120 + 4 * (8 + 4 + 4), 3 * 4 * 4)
    assert head.num_parameters == 120 + 64 + 48 + 6 * 4
    assert head.resident_bytes == 2 * (120 + 64 + 24 + 48)
    assert head.hidden_state_bytes(3, 2) == (3 * 3 + 5) * 3 * 4 * 2
    # Layers follow the precision of weights; ``fc`` and LM heads stay in 16 bits.
    quantized = draft_of(EAGLE3_CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert quantized.streamed_bytes == 1 * (120 + 64) + 2 * 24
    assert lowest_precision(TOY, quantized, DRAFTS["ngram"]) == 1
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}
    for said in (ids, {"num_aux_hidden_states": 4}):
        assert draft_of(EAGLE3_CONFIG | said).fc_parameters == 4 * 4 * 4


def test_an_eagle_head_has_the_sizes_of_an_mtp_layer() -> None:
    for name in ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"):
        head = draft_of(EAGLE3_CONFIG | {"architectures": [name], "vocab_size": 9})
        assert (head.kind, head.vocab_size) == ("mtp", 9)
        assert head.num_parameters == 120 + 2 * 4 * 4


def test_dflash_sizes_by_hand() -> None:
    head = draft_of(DFLASH_CONFIG)
    assert (head.num_parameters, head.max_steps) == (2 * 120 + 48, 7)
    assert head.resident_bytes == 2 * (2 * 120 + 48)


def test_dspark_is_dflash_with_a_markov_head_and_drafts_from_its_first_row() -> None:
    sizes = {"markov_rank": 2, "vocab_size": 9, "projector_type": "dspark"}
    spark = DFLASH_CONFIG | sizes | {"architectures": ["Qwen3DSparkModel"]}
    head = draft_of(spark)
    block = draft_of(DFLASH_CONFIG)
    assert head == replace(block, max_steps=8, step_parameters=18, table_parameters=18)
    assert head.resident_bytes == block.resident_bytes + 2 * 2 * 18
    assert draft_of(spark | {"sample_from_anchor": False}).max_steps == 7
    for markov, more in (("gated", 2 * (4 + 2)), ("rnn", 3 * 2 * (4 + 2 * 2))):
        other = draft_of(spark | {"markov_head_type": markov, "draft_vocab_size": 5})
        assert (other.step_parameters, other.table_parameters) == (5 * 2 + more, 18)


def test_dflash2_has_tables_and_convolutions_beside() -> None:
    sizes = {"selector_rank": 2, "selector_top_k": 3, "conv_kernel_size": 2, "conv_group_size": 2}
    block = DFLASH_CONFIG.get("dflash_config", {})
    named = {"architectures": ["DFlash2DraftModel"], "vocab_size": 9}
    head = draft_of(DFLASH_CONFIG | named | {"dflash_config": {**block, **sizes}})
    # Of two layers, around attention and MLP: two kernels, and a projection to both.
    convolutions = 2 * 2 * (2 * 2 * 4 + 4 * (2 * 2 * 2))
    more = {"table_parameters": 2 * 9 * 2, "conv_parameters": convolutions}
    assert head == replace(draft_of(DFLASH_CONFIG), step_parameters=2 * 4, **more)
    assert head.num_parameters == 2 * 120 + 48 + 8 + 36 + convolutions


def test_lilicorr_has_a_transformer_over_candidates_beside() -> None:
    sizes = {"candidate_topk": 4, "hidden_size": 2, "num_layers": 2, "num_heads": 1}
    sizes |= {"mlp_ratio": 1.5, "factor_dim": 3}
    block = DFLASH_CONFIG.get("dflash_config", {})
    own = {f"lilicorr_{name}": size for name, size in sizes.items()}
    named = {"architectures": ["LiLiCorrDraftModel"], "dflash_config": {**block, **own}}
    head = draft_of(DFLASH_CONFIG | named)
    # A candidate's embedding, layers, features, factors and vectors; a row's output.
    candidate = 4 * 2 + 2 * (4 * 4 + 2 * 2 * 3) + 4 + 12 + 12
    assert head == replace(draft_of(DFLASH_CONFIG), step_parameters=4 * candidate + 8)


def test_domino_has_a_gru_and_an_mlp_beside() -> None:
    sizes = DOMINO | {"gru_hidden_dim": 3, "emb_dim": 2}
    block = DFLASH_CONFIG.get("dflash_config", {})
    named = {"vocab_size": 9, "dflash_config": {**block, **sizes}}
    head = draft_of(DFLASH_CONFIG | named)
    assert head == replace(draft_of(DFLASH_CONFIG), step_parameters=9 * (4 + 3) + 2 * (4 + 3) + 18)


def test_built_in_heads_are_what_public_configurations_say() -> None:
    """The heads for Llama 3.1 8B and for Qwen3 8B, by the keys that their files have."""
    sizes = "intermediate_size=12288 vocab_size=151936 num_target_layers=36 block_size=16"
    dflash = EAGLE3_8B | config("DFlashDraftModel", f"num_hidden_layers=5 {sizes}")
    assert draft_of(EAGLE3_8B | {"head_dim": 128}) == DRAFTS["eagle3-8b"]
    assert draft_of(dflash) == draft_of("DFlash-8B") == DRAFTS["dflash-8b"]


GROUPS = {"group_0": {"weights": {"num_bits": 4}}}
FOUR_BITS = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
DOMINO = {"projector_type": "domino"}


@pytest.mark.parametrize(
    ("read", "source", "said"),
    [
        (from_config, "llama-9b", "'llama-9b' is neither .*llama-3.1-8b"),
        (from_config, LLAMA_CONFIG | {"architectures": ["Qwen3NextForCausalLM"]}, "Next.*Llama"),
        (from_config, {"hidden_size": 4}, "architecture is none"),
        (from_config, LLAMA_CONFIG | {"hidden_size": None}, "no whole number for hidden_size"),
        (from_config, DEEPSEEK | {"kv_lora_rank": None}, "no whole number for kv_lora_rank"),
        (from_config, LLAMA_CONFIG | {"sliding_window": 4096}, "window of 4096"),
        (from_config, LLAMA_CONFIG | {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        (from_config, LLAMA_CONFIG | {"quantization_config": FOUR_BITS}, "with 8 bits"),
        (from_config, DFLASH_CONFIG, "architecture is DFlashDraftModel"),
        (
            draft_of,
            EAGLE3_CONFIG | {"draft_vocab_size": None},
            "number for draft_vocab_size.*write vocab_size there",
        ),
        (draft_of, EAGLE3_CONFIG | {"target_hidden_size": 8}, "is 4 .*target_hidden_size 8"),
        (draft_of, DFLASH_CONFIG | {"intermediate_size": None}, "size.*its own layers"),
        (
            draft_of,
            DFLASH_CONFIG | {"dflash_config": DOMINO},
            "no whole number for gru_hidden_dim",
        ),
        (draft_of, DFLASH_CONFIG | {"projector_type": "dspark"}, "projector_type: more than one"),
        (draft_of, DFLASH_CONFIG | {"layer_types": ["sliding_attention"]}, "sliding_window"),
        (draft_of, DFLASH_CONFIG | {"architectures": ["DFlash2DraftModel"]}, "selector_rank"),
        (draft_of, "eagle3-9b", "neither a config.json.*eagle3-8b.*ngram"),
        (from_config, "{", r"config\.json is not JSON"),
    ],
)
def test_what_it_cannot_read_it_refuses(read: Any, source: Any, said: str, tmp_path: Path) -> None:
    if source == "{":
        source = tmp_path / "config.json"
        source.write_text("{")
    with pytest.raises(ValueError, match=said):
        read(source)
