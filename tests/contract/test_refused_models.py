"""Models that SMC cannot run are refused by their configuration, and no others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resolved_args import resolve, with_other
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from transformers import CONFIG_MAPPING

from sglang_smc import upstream
from sglang_smc.models import head_kinds, supported
from sglang_smc.server import algorithm, arguments

LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {**LATENT, "arch": "DeepseekV3ForCausalLM"}
QWEN_NEXT = {"arch": "Qwen3NextForCausalLM", "full_attention_interval": 4, "num_hidden_layers": 4}
LLAMA_4 = {"text_config": {"model_type": "llama4_text", "num_hidden_layers": 8}}
MODELS: dict[str, dict[str, Any]] = {
    "sparse attention": {"model_type": "llama", "arch": "MiniMaxM3SparseForCausalLM"},
    r"sparse attention \(DSA, index_topk is 4\)": {
        **DEEPSEEK, "index_topk": 4, "index_head_dim": 8
    },
    r"queries that are scaled by position \(llama_4_scaling\)": {
        **DEEPSEEK, "llama_4_scaling": {"beta": 0.1}
    },
    "latent attention .MLA. of LongcatFlash": {**LATENT, "arch": "LongcatFlashForCausalLM"},
    "a recurrent": {"model_type": "falcon_h1", "arch": "FalconH1ForCausalLM"},
    "a recurrent (?=.*Qwen3_5ForCausalLM)": {"model_type": "qwen3_next", **QWEN_NEXT},
    "an encoder": {"model_type": "mllama", "arch": "MllamaForConditionalGeneration"},
    "inputs that are no text": {"model_type": "llava", "arch": "LlavaForConditionalGeneration"},
    "no next-token head": {"model_type": "llama", "arch": "LlamaForSequenceClassification"},
    "layers whose heads differ in width": {"model_type": "llama", "arch": "Gemma4ForCausalLM"},
    "chunked attention in .* of 8": {
        "model_type": "llama4", "arch": "Llama4ForConditionalGeneration", **LLAMA_4
    },
    "chunked attention": {"model_type": "llama4_text", "arch": "Llama4ForCausalLM"},
}  # fmt: skip

# With full attention in all layers, or with windows; engine/test_golden.py runs more.
ATTENTION: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {"model_type": "cohere2"},
    "Olmo3ForCausalLM": {"model_type": "olmo3"},
    "GptOssForCausalLM": {"model_type": "gpt_oss"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 4096},
    "Phi3ForCausalLM": {"model_type": "phi3", "sliding_window": 2047, "pad_token_id": 0},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2", "sliding_window": 4096},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False},
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "head_dim": 128,
    },
    "GemmaForCausalLM": {"model_type": "gemma", "head_dim": 256},
    "CohereForCausalLM": {"model_type": "cohere"},
    "GraniteForCausalLM": {"model_type": "granite"},
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
    "SmolLM3ForCausalLM": {"model_type": "smollm3", "use_sliding_window": False},
    "Gemma3ForConditionalGeneration": {"model_type": "gemma3"},
    "Qwen2VLForConditionalGeneration": {"model_type": "qwen2_vl"},
    "Qwen3VLForConditionalGeneration": {"model_type": "qwen3_vl"},
    "Qwen3VLMoeForConditionalGeneration": {"model_type": "qwen3_vl_moe"},
}

if "minicpm3" in CONFIG_MAPPING:  # 0.5.17 comes with a transformers that lacks it
    ATTENTION["MiniCPM3ForCausalLM"] = {**LATENT, "model_type": "minicpm3"}


def saved(folder: Path, arch: str, **config: Any) -> dict[str, str]:
    """Write a model's configuration; return the argument that makes it the draft."""
    told = {"architectures": [arch], "max_position_embeddings": 256, **config}
    (folder / "config.json").write_text(json.dumps(told))
    return {"speculative_draft_model_path": str(folder)}


@pytest.mark.parametrize("kind", MODELS)
def test_unsupported_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, smc: dict, tmp_path: Path, kind: str
) -> None:
    """As a draft, and as a target; a draft with a word on what else there is."""
    saved(tmp_path, **MODELS[kind])
    with pytest.raises(ValueError, match=f"--speculative-draft-model-path .* has {kind}") as error:
        resolve(**smc | saved(tmp_path, **MODELS[kind]))
    assert "Choose another draft: Llama, Qwen2 and Qwen3, Mistral" in str(error.value)
    args = with_other(resolve(**smc), model_path=str(tmp_path))
    monkeypatch.setattr(supported, "model_config_of", ModelConfig.from_server_args)
    with pytest.raises(ValueError, match=f"--model-path .* has {kind}"):
        algorithm.validate_server_args(args)


@pytest.mark.parametrize("arch", ATTENTION)
def test_a_model_whose_layers_attend_to_all_or_to_a_window_is_not_refused(
    smc: dict, tmp_path: Path, arch: str
) -> None:
    resolve(**smc | saved(tmp_path, arch, **ATTENTION[arch]))


@pytest.mark.parametrize(("head_dim", "refused"), [(512, True), (256, False), (None, False)])
def test_heads_that_kernels_do_not_take_are_refused(head_dim: int | None, refused: bool) -> None:
    model: Any = SimpleNamespace(head_dim=head_dim, attention_arch=AttentionArch.MHA)
    found = supported._head_problems("--model-path", "/gemma", model, 256)
    assert bool(found) == refused
    if found:
        assert "heads of 512 dimensions; allowed: at most 256" in found[0]
        assert "--speculative-smc-kernels torch" in found[0]
    assert supported._head_problems("--model-path", "/gemma", model, None) == []


@pytest.mark.parametrize(
    ("kernels", "device", "widest"),
    [(None, "cuda", 256), ("torch", "cuda", None), (None, "cpu", None), ("triton", "cpu", None)],
)
def test_heads_are_bounded_where_kernels_run(
    kernels: str | None, device: str, widest: int | None
) -> None:
    given = SimpleNamespace(speculative_smc_kernels=kernels, device=device)
    assert arguments._widest_heads(given) == widest


WITH_EXTRA_LAYERS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", "head_dim": 8},
    "Glm4MoeForCausalLM": {"model_type": "glm4_moe", "num_nextn_predict_layers": 1},
    "MiMoForCausalLM": {"model_type": "qwen2", "num_nextn_predict_layers": 1},
}


@pytest.mark.parametrize("arch", WITH_EXTRA_LAYERS)
def test_a_draft_is_not_taken_for_extra_layers(smc: dict, tmp_path: Path, arch: str) -> None:
    """For SMC; other algorithms go on drafting with them."""
    draft = saved(tmp_path, arch, num_hidden_layers=3, **WITH_EXTRA_LAYERS[arch])
    args = resolve(**smc | draft)
    whole = ModelConfig.from_server_args(args, model_path=str(tmp_path), is_draft_model=True)
    assert whole.hf_config.architectures == [arch]
    assert whole.num_nextn_predict_layers is None
    extra = ModelConfig(str(tmp_path), is_draft_model=True, speculative_algorithm="EAGLE")
    assert extra.hf_config.architectures != [arch]
    assert extra.num_nextn_predict_layers == 1


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_a_target_with_one_mtp_layer_needs_no_draft(
    smc: dict, tmp_path: Path, num_layers: int
) -> None:
    """It is its own draft then, and read for that layer, by a head's rules."""
    config = WITH_EXTRA_LAYERS["MiMoForCausalLM"] | {"num_nextn_predict_layers": num_layers}
    saved(tmp_path, "MiMoForCausalLM", **config)
    target = {"model_path": str(tmp_path), "speculative_draft_model_path": None}
    if num_layers != 1:
        with pytest.raises(ValueError, match="A target with an MTP layer needs none: Deepseek"):
            resolve(**smc | target)
        return
    found = upstream.resolved(resolve(**smc | target))
    assert found.speculative_draft_model_path == str(tmp_path)
    assert head_kinds.reads_states(found)
    matches = {"speculative_smc_ngram_weight": 1, "speculative_smc_mode": "exact"}
    found = upstream.resolved(resolve(**smc | target | matches))
    assert found.speculative_draft_model_path is None, "matches alone draft"


RECURRENT = {
    "arch": "Qwen3_5ForCausalLM",
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
}


@pytest.mark.parametrize(
    "config",
    # Extra layers of Nemotron-H have no state, of which SGLang is told by the draft's place.
    [{"arch": "NemotronHForCausalLM", "model_type": "nemotron_h"}, RECURRENT],
    ids=["Nemotron-H", "Qwen 3.5"],
)
def test_a_draft_with_states_is_refused(smc: dict, tmp_path: Path, config: dict[str, Any]) -> None:
    said = r"--speculative-draft-model-path .* has a recurrent.*Choose another draft"
    with pytest.raises(ValueError, match=said):
        resolve(**smc | saved(tmp_path, **config))


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="older releases are refused")
def test_a_target_with_states_runs_without_the_radix_cache(
    monkeypatch: pytest.MonkeyPatch, smc: dict, tmp_path: Path
) -> None:
    """At defaults, too, where SGLang itself ends in an assertion that names no flag."""
    saved(tmp_path, **RECURRENT)
    target, free = {"model_path": str(tmp_path)}, {"disable_radix_cache": True}
    without = r"linear attention[;,]? .* Pass --disable-radix-cache[.,]"
    with pytest.raises(ValueError, match=without):
        resolve(**smc | target)
    resolve(**smc | target | free)
    monkeypatch.setattr(supported, "model_config_of", ModelConfig.from_server_args)
    with pytest.raises(ValueError, match=without):
        algorithm.validate_server_args(with_other(resolve(**smc), **target))
    args = with_other(resolve(**smc), **target, **free)
    algorithm.validate_server_args(args)
    with pytest.raises(ValueError, match=r"Leave out --enable-streaming-session\."):
        algorithm.validate_server_args(with_other(args, enable_streaming_session=True))
