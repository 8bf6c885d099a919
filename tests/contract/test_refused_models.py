"""Models that SMC cannot run are refused by their configuration, and no others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resolved_args import resolve, with_other
from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from sglang_smc import upstream
from sglang_smc.models import supported
from sglang_smc.server import algorithm, arguments

WITH_WINDOWS = {"use_sliding_window": True, "sliding_window": 128, "no_rope_layers": [0] * 12}
MODELS = {
    "sliding-window attention": {"model_type": "gpt_oss", "arch": "GptOssForCausalLM"},
    "attention sinks": {"model_type": "gpt_oss", "arch": "GptOssForCausalLM"},
    "sparse attention": {"model_type": "llama", "arch": "MiniMaxM3SparseForCausalLM"},
    "latent attention": {
        "model_type": "deepseek_v2",
        "arch": "DeepseekV2ForCausalLM",
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "a recurrent": {"model_type": "falcon_h1", "arch": "FalconH1ForCausalLM"},
    "a recurrent (?=.*Qwen3_5ForCausalLM)": {
        "model_type": "qwen3_next",
        "arch": "Qwen3NextForCausalLM",
        "full_attention_interval": 4,
        "num_hidden_layers": 4,
    },
    "an encoder": {"model_type": "mllama", "arch": "MllamaForConditionalGeneration"},
    "inputs that are no text": {
        "model_type": "qwen2_vl",
        "arch": "Qwen2VLForConditionalGeneration",
    },
    "no next-token head": {"model_type": "llama", "arch": "LlamaForSequenceClassification"},
    "attention scores that are capped": {"model_type": "gemma2", "arch": "Gemma2ForCausalLM"},
    "chunked attention": {"model_type": "llama4_text", "arch": "Llama4ForCausalLM"},
    **{
        f"sliding-window attention in .* of {layers} layers": {
            "model_type": model_type,
            "arch": arch,
            "num_hidden_layers": layers,
            **other,
        }
        for layers, model_type, arch, other in (
            (6, "gemma2", "Gemma2ForCausalLM", {}),
            (7, "gemma3_text", "Gemma3ForCausalLM", {}),
            (8, "cohere2", "Cohere2ForCausalLM", {}),
            (9, "exaone4", "Exaone4ForCausalLM", {}),
            (10, "olmo3", "Olmo3ForCausalLM", {}),
            (11, "ministral", "MinistralForCausalLM", {}),
            (12, "smollm3", "SmolLM3ForCausalLM", WITH_WINDOWS),
        )
    },
}

# What SGLang gives full attention in all layers, whatever is said of windows.
FULL_ATTENTION: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 4096},
    "Phi3ForCausalLM": {"model_type": "phi3", "sliding_window": 2047, "pad_token_id": 0},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2", "sliding_window": 4096},
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
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
}


@pytest.fixture(params=MODELS)
def other_model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """What is said of a model, and a folder with its configuration."""
    config = {"max_position_embeddings": 256, **MODELS[request.param]}
    config["architectures"] = [config.pop("arch")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return request.param, str(tmp_path)


def test_unsupported_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, smc: dict, other_model: tuple[str, str]
) -> None:
    kind, path = other_model
    args = with_other(resolve(**smc), model_path=path)
    monkeypatch.setattr(supported, "model_config_of", ModelConfig.from_server_args)
    with pytest.raises(ValueError, match=f"--model-path .* has {kind}"):
        algorithm.validate_server_args(args)


def test_unsupported_draft_is_refused(smc: dict, other_model: tuple[str, str]) -> None:
    kind, path = other_model
    with pytest.raises(ValueError, match=f"--speculative-draft-model-path .* has {kind}"):
        resolve(**smc | {"speculative_draft_model_path": path})


@pytest.mark.parametrize("arch", FULL_ATTENTION)
def test_a_model_whose_layers_attend_to_everything_is_not_refused(
    smc: dict, tmp_path: Path, arch: str
) -> None:
    config = {"architectures": [arch], "max_position_embeddings": 256, **FULL_ATTENTION[arch]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolve(**smc | {"speculative_draft_model_path": str(tmp_path)})


def test_a_refused_model_is_told_what_else_there_is(smc: dict, tmp_path: Path) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Choose another draft: Llama, Qwen2 and Qwen3, Mistral"):
        resolve(**smc | {"speculative_draft_model_path": str(tmp_path)})


@pytest.mark.parametrize(("head_dim", "refused"), [(256, True), (128, False), (None, False)])
def test_heads_that_kernels_do_not_take_are_refused(head_dim: int | None, refused: bool) -> None:
    model: Any = SimpleNamespace(head_dim=head_dim, attention_arch=AttentionArch.MHA)
    found = supported._head_problems("--model-path", "/gemma", model, 128)
    assert bool(found) == refused
    if found:
        assert "heads of 256 dimensions; allowed: at most 128" in found[0]
        assert "--speculative-smc-kernels torch" in found[0]
    assert supported._head_problems("--model-path", "/gemma", model, None) == []


@pytest.mark.parametrize(
    ("kernels", "device", "widest"),
    [(None, "cuda", 128), ("torch", "cuda", None), (None, "cpu", None), ("triton", "cpu", None)],
)
def test_heads_are_bounded_where_kernels_run(
    kernels: str | None, device: str, widest: int | None
) -> None:
    given = SimpleNamespace(speculative_smc_kernels=kernels, device=device)
    assert arguments._widest_heads(given) == widest


def test_a_draft_that_sglang_takes_for_extra_layers_is_refused(smc: dict, tmp_path: Path) -> None:
    """Qwen3-MoE as a draft is loaded as one layer that reads the target's hidden states."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has the architecture Qwen3MoeForCausalLM, which"):
        resolve(**smc | {"speculative_draft_model_path": str(tmp_path)})


RECURRENT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "max_position_embeddings": 256,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
}


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="older releases are refused")
def test_a_target_with_states_runs_without_the_radix_cache(
    monkeypatch: pytest.MonkeyPatch, smc: dict, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT))
    monkeypatch.setattr(supported, "model_config_of", ModelConfig.from_server_args)
    cached, free = (
        with_other(resolve(**smc), model_path=str(tmp_path), disable_radix_cache=without)
        for without in (False, True)
    )
    with pytest.raises(ValueError, match=r"linear attention; .* Pass --disable-radix-cache\."):
        algorithm.validate_server_args(cached)
    algorithm.validate_server_args(free)


def test_a_draft_with_states_is_refused(smc: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT))
    with pytest.raises(ValueError, match=r"--speculative-draft-model-path .*Choose another draft"):
        resolve(**smc | {"speculative_draft_model_path": str(tmp_path)})
