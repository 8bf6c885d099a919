"""Published drafts: a row names what runs, or what the server's own words refuse."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from sglang.srt.configs.model_config import ModelConfig
from transformers import LlamaConfig
from zoo import PAIRS

from sglang_smc.drafts import heads, reading
from sglang_smc.drafts.heads import BY_CLASS, base
from sglang_smc.models import head_kinds, supported
from sglang_smc_tools.published import (
    MTP_LAYER,
    ROWS,
    SPECULATORS,
    PublishedDraft,
    drafts_of,
)

#: Of the classes of targets: the model type, and what has no default there.
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DELTA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16}
INDEXED = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 32}
COMPRESSED = {"sliding_window": 8, "head_dim": 16, "compress_ratios": [0] * 43}
LINEAR = {**SIZES, **LATENT, "model_type": "kimi_linear", "linear_attn_config": DELTA}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {}),
    "Qwen3NextForCausalLM": ("qwen3_next", {}),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", {}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", {}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {}),
    "GptOssForCausalLM": ("gpt_oss", {}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
    "DeepseekV32ForCausalLM": ("deepseek_v32", {**SIZES, **LATENT, **INDEXED}),
    "DeepseekV4ForCausalLM": ("deepseek_v4", {**INDEXED, **COMPRESSED}),
    "Glm4MoeForCausalLM": ("glm4_moe", {}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {}),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", INDEXED),
    "Glm5NextForConditionalGeneration": ("glm5_next", {}),
    "KimiK25ForConditionalGeneration": ("kimi_k25", {}),
    "KimiK3ForConditionalGeneration": ("kimi_k3", {"text_config": LINEAR}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {}),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl", {**SIZES, "vocab_size": 64}),
    "Gemma3ForConditionalGeneration": ("gemma3", {}),
    "Gemma4ForConditionalGeneration": ("gemma4", {}),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", {}),
    "NemotronHForCausalLM": ("nemotron_h", {}),
}
LANGUAGE_MODELS = {"Gemma3ForCausalLM"}


def refusals_of_target(architecture: str, folder: Path) -> list[str]:
    model_type, more = TARGETS[architecture]
    config = {"architectures": [architecture], "model_type": model_type, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return list(supported._kinds(ModelConfig(str(folder))))


def refusals_of_draft(name: str) -> list[str]:
    """Return what a server says of a class or a `speculators` type, before weights are read."""
    told = {"architectures": [name], "hidden_size": 64}
    if name.startswith(SPECULATORS):
        told = {reading.SPECULATORS: name.split()[1], **told}
    config = SimpleNamespace(hf_config=LlamaConfig(**told))
    found: Any = head_kinds.draft_problems(*(config, config), 4, has_files=False)  # pyright: ignore
    return list(map(str, found))


def is_taken(name: str) -> bool:
    if name.startswith(SPECULATORS):
        return name.split()[1] in heads.BY_TYPE
    return name in BY_CLASS or name in LANGUAGE_MODELS


@pytest.mark.parametrize("one", ROWS, ids=lambda one: f"{one.target}: {one.draft}")
def test_a_row_is_so(one: PublishedDraft, tmp_path: Path) -> None:
    """Red where a target or a format comes to run, or ceases to, and the table does not say so."""
    found = [refusals_of_target(name, tmp_path) for name in one.architectures]
    if one.runs:
        assert found == [[] for _ in found] and is_taken(one.format)
        return
    told = [] if is_taken(one.format) or not one.format else refusals_of_draft(one.format)
    assert is_taken(one.format) or not one.format or one.format in told[0]
    assert all(any(one.refused in what for what in [*told, *of_one]) for of_one in found)


#: Of rows whose configuration was seen: the pair of `zoo`, by the draft, or else by the target.
SEEN = {
    "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge": "llama31-8b+lmsys-eagle3",
    "rasyosef/Llama-3.2-3B-Instruct-DSpark": "llama32-3b+dspark",
    "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge": "llama33-70b+specforge",
    "deepseek-ai/dspark_qwen3_4b_block7": "qwen3-4b+deepspec",
    "deepseek-ai/dspark_qwen3_8b_block7": "qwen3-8b+deepspec",
    "deepseek-ai/dspark_qwen3_14b_block7": "qwen3-14b+deepspec",
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": "qwen3-30b-2507+redhat-like",
    "incoai/Qwen3.8-27B-DFlash2": "qwen3.8-27b+dflash2",
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": "qwen3.6-35b+redhat-dspark",
    "RedHatAI/gpt-oss-20b-speculator.eagle3": "gpt-oss-20b+redhat",
    "RedHatAI/gpt-oss-120b-speculator.eagle3": "gpt-oss-20b+redhat",
    "RedHatAI/GLM-5.2-speculator.dspark": "glm5.2+redhat-dspark",
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": "kimi-k2+aq-medai",
    "thoughtworks/MiniMax-M2.5-Eagle3": "minimax-m2.5+thoughtworks",
    "google/gemma-3-270m-it": "gemma3-4b+270m",
    "Inferact/Kimi-K3-DSpark": "kimi-k3+head",
    "Inferact/MiniMax-M3-EAGLE3": "minimax-m3+head",
    "Qwen3.5, 3.6, 3.8, dense": "qwen3.5-27b",
    "Qwen3.5, 3.6, 3.8, MoE": "qwen3.5-35b",
    "DeepSeek V3, V3.1, R1": "deepseek-v3",
    "DeepSeek V3.2": "deepseek-v3.2",
    "GLM-4.5, 4.6, 4.7": "glm-4.5-air",
}


@pytest.mark.parametrize("one", ROWS, ids=lambda one: f"{one.target}: {one.draft}")
def test_a_row_says_what_its_configuration_says(one: PublishedDraft) -> None:
    """Red where doctor's row and its verdict disagree, or a number is another."""
    key = one.target if one.draft == MTP_LAYER else one.draft
    assert (key in SEEN) == bool(one.source), "a source for each that was seen, and for no other"
    if key not in SEEN:
        assert one.configuration == "not seen"
        return
    told = zoo.config_of(SEEN[key])
    layers = told.get("transformer_layer_config") or told.get("text_config") or told
    dtypes = [place.get(name) for place in (told, layers) for name in ("dtype", "torch_dtype")]
    assert one.context == layers["max_position_embeddings"] and one.dtype in dtypes
    assert one.block == base.block_options(told).get("block_size")
    windowed = "sliding_attention" in (layers.get("layer_types") or ())
    assert one.window == (layers["sliding_window"] if windowed else None)
    refused = [pair.refused for pair in PAIRS if SEEN[key] == (pair.draft or pair.target)]
    assert one.runs in [not what for what in refused]


@pytest.mark.parametrize(
    ("model", "architecture", "targets"),
    [
        ("Qwen/Qwen3-8B", None, ["Qwen3 8B"]),
        ("qwen3-8b", None, ["Qwen3 8B"]),
        ("Qwen/Qwen3-8B-Base/", "Qwen3ForCausalLM", ["Qwen3 8B"]),
        ("Qwen/Qwen3.8-27B-FP8", "Qwen3_5ForConditionalGeneration", 3),
        ("MiniMaxAI/MiniMax-M2.7", None, ["MiniMax M2 to M2.7"]),
        ("deepseek-ai/DeepSeek-V3.2-Exp", None, ["DeepSeek V3.2"]),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", None, []),
        ("deepseek-ai/DeepSeek-R1-0528", None, ["DeepSeek V3, V3.1, R1"]),
        ("moonshotai/Kimi-K2-Instruct", "DeepseekV3ForCausalLM", ["Kimi K2"]),
        ("weights/of-mine", "MiniMaxM2ForCausalLM", ["MiniMax M2 to M2.7"]),
        ("weights/of-mine", "LlamaForCausalLM", 3),
        ("weights/of-mine", None, []),
        ("Qwen/Qwen3-8B", "OPTForCausalLM", []),
    ],
)
def test_a_model_has_rows_by_its_name_or_class(
    model: str, architecture: str | None, targets: list[str] | int
) -> None:
    found = [one.target for one in drafts_of(model, architecture)]
    assert (len(found) if isinstance(targets, int) else found) == targets
