"""Settings and models: what cannot be is refused with value, range and remedy, and no other."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from published_drafts import rewrite
from resolved_args import field_names, options, resolve, with_other
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.server_args import ServerArgs
from tiny_models import ENGINE_DEFAULTS, smc_arguments
from transformers import CONFIG_MAPPING

from sglang_smc import upstream
from sglang_smc.kv import arena
from sglang_smc.models import head_kinds, supported
from sglang_smc.models.weight_update import name_of_kv
from sglang_smc.options.server import (
    MODES,
    RESAMPLING_METHODS,
    SERVER_ARGS_FIELDS,
    SMCConfig,
    flag_of,
)
from sglang_smc.server import algorithm, arguments
from sglang_smc.server.requirements import REQUIREMENTS, unmet

NAN = math.nan
INF = math.inf

#: Of each setting what is allowed, in words, values outside and values at the limits.
RANGES: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "num_steps": ("an integer >= 1", (0, "4", 8.0), (1,)),
    # 8.0 equals the default, but is no integer.
    "num_particles": ("an integer from 1 to 1024", (0, 1025, 10**400, True, 2.0, 8.0), (1, 1024)),
    "ess_threshold": ("a number from 0", (-0.1, 1.1, NAN, "0.5"), (0, 1.0)),
    "resampling_method": (", ".join(RESAMPLING_METHODS), ("killing",), RESAMPLING_METHODS),
    "resample_at": ("block, token", ("round",), ("block", "token")),
    "selection": ("sample, argmax", ("best",), ("sample", "argmax")),
    "mode": (", ".join(MODES), ("fast", "mixed", None), MODES),
    "power": ("a finite number > 0", (0, -1.0, INF, 10**400, NAN, True, "2"), (1e-3, 100)),
    "evidence_threshold": ("a finite number >= 0", (-0.1, INF, NAN, False), (0, 1e9, None)),
    "tilt": ("a finite number >= 0", (-0.1, NAN), ()),
    "draft_temperature": ("a finite number >= 1e-06", (1e-7, 0, INF, [1.0]), (1e-6, None)),
    "ngram_matches": ("True or False", (1, "yes"), (False,)),
    "max_lag": ("an integer >= 1", (0,), (1,)),
    "adaptive": ("auto, on, off", (True, "yes"), ("auto", "on", "off")),
}

#: Settings that do not go together, and what is said of it.
TOGETHER: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"mode": "smc", "tilt": 0.1}, ("--speculative-smc-tilt is 0.1 and", "'smc'", "'auto'")),
    *(
        ({"mode": mode, "power": 2.0}, ("power is 2.0; allowed: mode 'smc'", "-mode", repr(mode)))
        for mode in ("exact", "auto")
    ),
    (
        {"mode": "auto", "tilt": 0.1, "evidence_threshold": 0.25},
        ("--speculative-smc-tilt is 0.1 and --speculative-smc-evidence-threshold is 0.25",),
    ),
    (
        {"power": 0.5, "evidence_threshold": 0.25},
        ("--speculative-smc-power is 0.5", "--speculative-smc-evidence-threshold is 0.25"),
    ),
    (
        {"mode": "exact", "ngram_matches": True, "draft_temperature": 0.5},
        ("draft-temperature is 0.5 and", "ngram-matches is True; allowed"),
    ),
    (
        {"mode": "smc", "ngram_matches": True},
        ("ngram-matches is True; allowed", "is 'smc' and", "'exact'"),
    ),
]
ALLOWED: list[dict[str, Any]] = [
    {"mode": "auto", "tilt": 0.0},
    {"mode": "auto", "evidence_threshold": 0.0},
    *({"mode": mode, "power": 1.0} for mode in MODES),
    *({"mode": mode, "ngram_matches": True} for mode in ("exact", "auto")),
    *({"power": 2.0, "evidence_threshold": threshold} for threshold in (None, 0, 0.0)),
    {"power": 1.0, "evidence_threshold": 0.5},
]


@pytest.mark.parametrize("name", RANGES)
def test_bad_value_names_flag_value_range_and_remedy(name: str) -> None:
    allowed, outside, at_limits = RANGES[name]
    for value in outside:
        with pytest.raises(ValueError) as error:
            SMCConfig(**{name: value}).validate()
        for part in (flag_of(name), repr(value), allowed, "leave the flag out"):
            assert part in str(error.value)
    for value in at_limits:
        SMCConfig(**{name: value}).validate()


def test_settings_that_do_not_go_together_are_refused() -> None:
    for given, parts in TOGETHER:
        with pytest.raises(ValueError) as error:
            SMCConfig(**given).validate()
        assert [part for part in parts if part not in str(error.value)] == [], given
    for given in ALLOWED:
        SMCConfig(**given).validate()


def test_every_field_is_declared_as_a_setting() -> None:
    """But for what the draft's checkpoint says."""
    assert set(SERVER_ARGS_FIELDS) | {"drafts_all", "page_size"} == set(SMCConfig.__struct_fields__)


def server_args(**changed: Any) -> Any:
    """Arguments as `unmet` reads them, all of them as SMC wants them."""
    meeting = {requirement.field: requirement.allowed[0] for requirement in REQUIREMENTS}
    experts = {"moe_runner_backend": "auto", "speculative_moe_runner_backend": None}
    own = {"speculative_smc_ngram_matches": None, "enable_multimodal": None}
    own |= dict.fromkeys(("enable_return_routed_experts", "enable_hierarchical_cache"), False)
    own |= {"page_size": 1, "disaggregation_mode": "null", "hicache_storage_backend": None}
    own |= {"enable_memory_saver": False}
    own |= {"tp_size": 1, "load_format": "auto"}
    return SimpleNamespace(**{**own, **meeting, **experts, **changed})


def other_than(allowed: tuple[Any, ...]) -> Any:
    """A value of about the same kind that is not allowed."""
    first = allowed[0]
    if isinstance(first, bool):
        return not first
    return max(allowed[-1], first) + 1 if isinstance(first, int | float) else "something else"


def test_what_smc_cannot_honour_is_refused() -> None:
    for field, allowed, *_ in REQUIREMENTS:
        for value in allowed:
            assert unmet(server_args(**{field: value})) == []
        (problem,) = unmet(server_args(**{field: other_than(allowed)}))
        assert problem.startswith(f"--{field.replace('_', '-')} is ")
        assert "; allowed: " in problem and problem.endswith(".")
        lacking = server_args()
        delattr(lacking, field)  # as a release that has no such field
        assert unmet(lacking) == []


def test_requirement_is_an_option_where_sglang_has_the_field() -> None:
    flags = {r.field: f"--{r.field.replace('_', '-')}" for r in REQUIREMENTS}
    taken = options()
    known = {name for name, flag in flags.items() if flag in taken}
    assert known == flags.keys() & set(field_names())


def test_experts_of_the_draft_run_as_the_targets_do() -> None:
    assert unmet(server_args(moe_runner_backend="triton")) == []
    same = {"moe_runner_backend": "triton", "speculative_moe_runner_backend": "triton"}
    assert unmet(server_args(**same)) == []
    (problem,) = unmet(server_args(**{**same, "speculative_moe_runner_backend": "cutlass"}))
    assert problem.startswith("--speculative-moe-runner-backend is 'cutlass'; allowed: 'triton'")


@pytest.mark.skipif(not upstream.IS_NEWER, reason="refused whatever is beside it")
def test_experts_are_kept_where_kv_stays_in_its_slots() -> None:
    assert unmet(server_args(enable_return_routed_experts=True)) == []
    (problem,) = unmet(server_args(enable_return_routed_experts=True, disaggregation_mode="decode"))
    assert problem.startswith("--enable-return-routed-experts is True with --disaggregation-mode;")


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="refused whatever is beside it")
def test_a_storage_is_of_files_and_keeps_kv_of_both_models() -> None:
    with_files = {"hicache_storage_backend": "file", "enable_hierarchical_cache": True}
    assert unmet(server_args(**with_files)) == []
    for other, needed in (
        ({"hicache_storage_backend": "nixl"}, "--hicache-storage-backend file,"),
        ({"enable_hierarchical_cache": False}, "--enable-hierarchical-cache,"),
        ({"tp_size": 2}, "--tp-size 1,"),
        ({"load_format": "remote_instance"}, "--load-format auto,"),
        ({"enable_memory_saver": True}, "no --enable-memory-saver,"),
    ):
        (problem,) = unmet(server_args(**{**with_files, **other}))
        assert problem.startswith("--hicache-storage-backend is ") and f"with {needed}" in problem


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="no storage holds KV of both models")
def test_a_storage_is_named_by_all_that_its_kv_depends_on(tiny: Callable[..., str]) -> None:
    target = tiny(seed=1)
    draft = tiny(seed=2)
    given = ENGINE_DEFAULTS | smc_arguments(target, draft)

    def name(**changed: Any) -> str:
        return name_of_kv(resolve(**given | changed))

    names = [
        name(),
        name(kv_cache_dtype="bf16"),
        name(json_model_override_args='{"rope_theta": 5.0}'),
    ]
    for path in (target, draft):
        (file,) = Path(path).glob("*.safetensors")
        os.utime(file)
        names.append(name())
    assert len({*names}) == len(names)
    assert name(served_model_name="another", schedule_policy="lpm") == names[-1]


# What SMC leaves to SGLang to refuse: it does without something that SMC refuses, as half of a
# disaggregated pair, attention DP, all-to-all experts, tokenizer workers, or an external cache.
LEFT_TO_SGLANG: dict[str, Any] = {
    "enable_http_worker_reuseport": True,
    "enable_kv_cache_sharding": True,
    "enable_linker_mla_dedup": True,
    "enable_megamoe_for_layernorm_sp": True,
    "enable_tp_lm_head_all_to_all": True,
    "flashinfer_a2a_dispatch_type": "bf16",
    "prefill_kv_cache_dequant_dtype": "fp8_e4m3",
}


def test_what_is_left_to_sglang_it_refuses(smc: dict) -> None:
    for name in [name for name in LEFT_TO_SGLANG if hasattr(ServerArgs, name)]:
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises((ValueError, AssertionError), match=flag) as error:
            ServerArgs(**smc, **{name: LEFT_TO_SGLANG[name]}).resolve_once()
        assert "SMC cannot start" not in str(error.value)


has_cache = pytest.mark.skipif(not upstream.IS_NEWER, reason="this SGLang has no cache")
MATCHES: dict[str, Any] = {
    "speculative_smc_ngram_matches": True,
    "speculative_smc_mode": "exact",
    "speculative_draft_model_path": None,
}
#: Flags of n-gram matches: a value that acts, and one that the cache cannot be built with, where
#: SGLang's own thread would end the process in the middle of a request.
NGRAM: dict[str, tuple[Any, Any, str]] = {
    "max_trie_depth": (8, 1, "an integer >= 2"),
    "min_bfs_breadth": (2, 0, "an integer >= 1"),
    "max_bfs_breadth": (3, 0, "an integer >= 1"),
    "capacity": (5000, 18, "an integer >= 19"),
    "match_type": ("PROB", "best", "one of BFS, PROB"),
    "external_corpus_path": (None, "texts.jsonl", "None"),
    "external_sam_budget": (0, 4, "0"),
}


@has_cache
def test_flags_of_ngram_matches_act_with_these_and_are_refused_without(smc: dict) -> None:
    given = {f"speculative_ngram_{name}": value for name, (value, _, _) in NGRAM.items()}
    resolve(**{**smc, **MATCHES, **given})
    for name, (value, bad, allowed) in NGRAM.items():
        flag = f"--speculative-ngram-{name.replace('_', '-')}"
        field = f"speculative_ngram_{name}"
        if value:
            with pytest.raises(
                ValueError, match=f"{flag} is {value!r}; allowed.*without --.*ngram-matches"
            ):
                resolve(**smc, **{field: value})
        with pytest.raises(ValueError, match=f"{flag} is {bad!r}; allowed: {allowed}"):
            resolve(**{**smc, **MATCHES, field: bad})


def test_images_are_for_models_that_take_them_in_rounds_and_without_matches(smc: dict) -> None:
    asked = {**smc, "enable_multimodal": True}
    with pytest.raises(ValueError, match=r"target of Llama\w+; allowed: .*Qwen3VL") as error:
        resolve(**asked)
    assert "ngram" not in str(error.value)
    with pytest.raises(ValueError, match=r"-multimodal is True with .*-ngram-matches"):
        resolve(**{**asked, **MATCHES})


@has_cache
def test_ngram_matches_take_no_draft_model(smc: dict) -> None:
    resolve(**{**smc, **MATCHES})
    with pytest.raises(ValueError, match="matches is True and --speculative-draft-model-path"):
        resolve(**{**smc, **MATCHES, "speculative_draft_model_path": smc["model_path"]})
    with pytest.raises(ValueError, match="without one, --speculative-smc-ngram-matches drafts"):
        resolve(**{**smc, **MATCHES, "speculative_smc_ngram_matches": None})


def test_a_token_map_is_for_a_language_model_beside_bonus_tokens(smc: dict, tmp_path: Path) -> None:
    given = {**smc, "speculative_token_map": "map.pt"}
    resolve(**given)
    for other in (MATCHES, saved(tmp_path, **HEAD)):
        with pytest.raises(ValueError, match=r"-map is 'map\.pt'; allowed: with a language model"):
            resolve(**given | other)
    with pytest.raises(ValueError, match="evidence_threshold 0, beside a draft that knows a part"):
        resolve(**given, speculative_smc_evidence_threshold=0)


# --- Models that SMC cannot run are refused by their configuration, and no others

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
    # As a draft its extra layers have no state, of which SGLang is told by the draft's place.
    "a recurrent .Mamba-like. state": {"model_type": "nemotron_h", "arch": "NemotronHForCausalLM"},
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
        "model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": True,
        "max_window_layers": 2, "head_dim": 128,
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
}  # fmt: skip

if "minicpm3" in CONFIG_MAPPING:  # the oldest SGLang comes with a transformers that lacks it
    ATTENTION["MiniCPM3ForCausalLM"] = {**LATENT, "model_type": "minicpm3"}


def saved(folder: Path, arch: str, **config: Any) -> dict[str, str]:
    """Write a model's configuration; return what makes it the draft, without weights."""
    told = {"architectures": [arch], "max_position_embeddings": 256, **config}
    (folder / "config.json").write_text(json.dumps(told))
    return {"speculative_draft_model_path": str(folder), "speculative_draft_load_format": "dummy"}


def test_a_draft_model_without_weights_is_refused(smc: dict, tmp_path: Path) -> None:
    """By flag, folder and tensor, before the target is loaded; with dummy weights it is taken."""
    draft = str(shutil.copytree(PAIR / "draft", tmp_path / "draft"))
    given = smc | {"model_path": str(PAIR / "target"), "speculative_draft_model_path": draft}
    config = json.loads(Path(draft, "config.json").read_text()) | {"num_hidden_layers": 9}
    Path(draft, "config.json").write_text(json.dumps(config))
    told = f"--speculative-draft-model-path {draft} lacks tensors layers"
    with pytest.raises(ValueError, match=re.escape(told)):
        resolve(**given)
    Path(draft, "model.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape(f"{draft} has no weights, *.safetensors or")):
        resolve(**given)
    resolve(**given | {"speculative_draft_load_format": "dummy"})


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
def test_attention_to_all_or_a_window_is_not_refused(smc: dict, tmp_path: Path, arch: str) -> None:
    resolve(**smc | saved(tmp_path, arch, **ATTENTION[arch]))


@pytest.mark.parametrize(("head_dim", "refused"), [(512, True), (256, False), (None, False)])
def test_heads_that_kernels_do_not_take_are_refused(head_dim: int | None, refused: bool) -> None:
    model: Any = SimpleNamespace(head_dim=head_dim, attention_arch=AttentionArch.MHA)
    found = supported._head_problems("--model-path", "/gemma", model, 256)
    said = "heads of 512 dimensions; allowed: at most 256.*--speculative-smc-kernels torch"
    assert [bool(re.search(said, one)) for one in found] == [True] * refused
    assert supported._head_problems("--model-path", "/gemma", model, None) == []


@pytest.mark.parametrize(
    ("kernels", "device", "widest"),
    [(None, "cuda", 256), ("torch", "cuda", None), (None, "cpu", None), ("triton", "cpu", None)],
)
def test_kernels_bound_the_heads(kernels: str | None, device: str, widest: int | None) -> None:
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
def test_one_mtp_layer_needs_no_draft(smc: dict, tmp_path: Path, num_layers: int) -> None:
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
    matches = {"speculative_smc_ngram_matches": True, "speculative_smc_mode": "exact"}
    found = upstream.resolved(resolve(**smc | target | matches))
    assert found.speculative_draft_model_path is None, "matches draft"


PAIR = Path(__file__).parents[2] / "bench" / "pair"


def test_a_published_head_is_taken_with_the_k_that_it_proposes(smc: dict, tmp_path: Path) -> None:
    """SGLang's own reader ends in 'Unrecognized model', before any algorithm is asked."""
    given = {**smc, "model_path": str(PAIR / "target"), "speculative_num_steps": None}
    given["speculative_draft_model_path"] = rewrite(PAIR / "eagle3", tmp_path / "head")
    assert upstream.resolved(resolve(**given)).speculative_num_steps == 4
    found = resolve(**given | {"speculative_num_steps": 6})
    assert upstream.resolved(found).speculative_num_steps == 6
    with pytest.raises(ValueError, match="speculators_model_type is 'peagle'"):
        told = {"speculators_model_type": "peagle"}
        folder = rewrite(PAIR / "eagle3", tmp_path / "other", **told)
        resolve(**given | {"speculative_draft_model_path": folder})


def test_a_head_is_read_by_the_file_that_is_named(smc: dict, tmp_path: Path) -> None:
    """As stock SGLang does: --decrypted-draft-config-file, in place of config.json."""
    shutil.copytree(PAIR / "eagle3", tmp_path / "head")
    (tmp_path / "head" / "config.json").rename(tmp_path / "plain.json")
    given = {**smc, "model_path": str(PAIR / "target")}
    given["speculative_draft_model_path"] = str(tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text('{"ciphered": true}')
    resolve(**given, decrypted_draft_config_file=str(tmp_path / "plain.json"))


RECURRENT = {
    "arch": "Qwen3_5ForCausalLM",
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
}


def test_a_draft_with_states_is_refused(smc: dict, tmp_path: Path) -> None:
    said = r"--speculative-draft-model-path .* has a recurrent.*Choose another draft"
    with pytest.raises(ValueError, match=said):
        resolve(**smc | saved(tmp_path, **RECURRENT))


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="older releases are refused")
def test_a_target_with_states_runs_without_the_radix_cache(
    monkeypatch: pytest.MonkeyPatch, smc: dict, tmp_path: Path
) -> None:
    """At defaults, too, where SGLang itself ends in an assertion that names no flag."""
    saved(tmp_path, **RECURRENT)
    target = {"model_path": str(tmp_path)}
    free = {"disable_radix_cache": True}
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


HEAD_CLASS = "sglang_smc.proposers.eagle3:EagleHead"
NO_MODEL = "sglang_smc.proposers.ngram:UniformDraft"
ALONE = {"speculative_draft_model_path": None}
#: A drafter of the operator's own beside what does not go with it, and what is said of it.
DRAFTERS: list[tuple[str, dict[str, Any], str]] = [
    (NO_MODEL, {}, "runs_model is False, and --speculative-draft-model-path is"),
    (HEAD_CLASS, ALONE, "runs_model is True, without --speculative-draft-model-path"),
    (
        NO_MODEL,
        ALONE | {"speculative_smc_mode": "exact", "speculative_smc_ngram_matches": True},
        "UniformDraft' and --speculative-smc-ngram-matches is True; allowed: one of both",
    ),
    (HEAD_CLASS, {"disaggregation_mode": "decode"}, "wants_states is True, and --disaggregation"),
    ("json:loads", ALONE, "a subclass of sglang_smc.proposers.base.DraftProposer. Name the class"),
]


@pytest.mark.parametrize(("path", "given", "said"), DRAFTERS)
def test_a_drafter_is_refused_beside_what_it_does_not_use(
    smc: dict, path: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve(**smc | {"speculative_smc_draft_class": path} | given)


def test_a_drafter_of_ones_own_needs_no_draft_model(smc: dict) -> None:
    args = resolve(**smc | ALONE | {"speculative_smc_draft_class": NO_MODEL})
    assert SMCConfig.from_server_args(upstream.resolved(args)).draft_class == NO_MODEL


HEAD = {"arch": "LlamaForCausalLMEagle3", "model_type": "llama"}
WINDOWS = {"arch": "MellumForCausalLM", "model_type": "gpt_oss"}
#: What goes with no decode server, and what is said of it.
NOT_TRANSFERRED: list[tuple[dict[str, Any], str]] = [
    ({"disaggregation_mode": "prefill"}, "'prefill' with SMC; allowed: SMC on the decode server"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache True; allowed: none"),
    ({"enable_strict_thinking": True, "reasoning_parser": "qwen3"}, "-strict-thinking True"),
    ({"speculative_smc_power": 2.0}, "--speculative-smc-power 2.0; allowed: none"),
    ({"speculative_smc_potential": ["count=steered:Count"]}, "--speculative-smc-potential ..count"),
    ({"disaggregation_decode_retraction_backup": "host_pool"}, "-backup is 'host_pool'; allowed"),
    ({"disaggregation_decode_host_receive_threshold": 0.5}, "-receive-threshold is 0.5; allowed"),
    ({**HEAD, "draft_vocab_size": 64}, "no hidden states are sent"),
    (HEAD, "has no draft_vocab_size in its config.json"),
    ({**RECURRENT, "disable_radix_cache": True}, "without recurrent states, of which none"),
    (WINDOWS, "--disable-hybrid-swa-memory to both"),
]


@pytest.mark.skipif(not upstream.IS_NEWEST, reason="older releases are refused")
def test_a_decode_server_takes_what_is_sent_to_it(smc: dict, tmp_path: Path) -> None:
    decode = {"disaggregation_mode": "decode"}
    made = [resolve(**smc, **decode, num_reserved_decode_tokens=size) for size in (1, 10_000)]
    few, many = map(upstream.resolved, made)
    config = SMCConfig.from_server_args(few)
    assert few.num_reserved_decode_tokens == arena.arena(config, config.lag)
    assert many.num_reserved_decode_tokens == arena.max_arena(config)
    assert few.disaggregation_decode_retraction_backup == "cpu_tensor"
    for number, (given, said) in enumerate(NOT_TRANSFERRED):
        own = {name: value for name, value in given.items() if name in field_names()}
        if model := {name: value for name, value in given.items() if name not in own}:
            (folder := tmp_path / str(number)).mkdir()
            of = "speculative_draft_model_path" if "Eagle" in model["arch"] else "model_path"
            own[of] = saved(folder, **model)["speculative_draft_model_path"]
        with pytest.raises(ValueError, match=said):
            resolve(**smc | decode | own)
