"""List the fields of SGLang's server arguments that an SMC server cannot honor, and why.

A field is listed if SMC would fail with it, or ignore it. Some fields exist in some releases of
SGLang only; one that this release lacks cannot be set.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs

from sglang_smc.options.server import Range, flag_of, integers, one_of
from sglang_smc.upstream import IS_NEWER, IS_NEWEST, Arguments, argument_defaults, release


class Requirement(NamedTuple):
    """The allowed values of a field of `ServerArgs`."""

    field: str
    allowed: tuple[Any, ...]
    because: str
    instead: str = "Leave it out."


_SHARED_KV = "particles share and exchange KV slot by slot, on one rank"
_NO_BATCH_SYNC = "rounds do not balance batches between ranks"
_NO_PLUGINS = "SGLang loads no plugins in those processes"
_NO_BLOCKS = "the attention over particles reads no KV of 4 bits or in blocks"
_NO_DRAFT_KV = "the draft's KV would not be kept beside the target's"
_NO_ADAPTERS = "this release runs none in a pass over particles: 0.5.22 and later do"
_NO_EXPERTS = "rounds keep experts by KV slot, as 0.5.22 and later do"
_NO_WAIT = "a round loads the adapters of its requests, and waits for none"
_NO_PAGES = "rows of particles are put in the order of pages on 0.5.23 and later alone"
_NO_HOST_POOL = "the host keeps all of the draft's KV on 0.5.23 and later alone"
_OWN_ATTENTION = "particles have an attention of their own, which this would not reach"
_NO_EFFECT = "this belongs to other algorithms and would have no effect"
_TEXT_ONLY = "an SMC server generates text, in one process, from text"
_CACHE_TYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# Allowed values where n-gram matches are used, from SGLang's arguments; its defaults else.
_NGRAM: dict[str, Callable[[Any], Range]] = {
    "speculative_ngram_max_trie_depth": lambda view: integers(2),
    "speculative_ngram_min_bfs_breadth": lambda view: integers(1),
    "speculative_ngram_max_bfs_breadth": lambda view: integers(
        view.speculative_ngram_min_bfs_breadth
    ),
    "speculative_ngram_capacity": lambda view: integers(view.speculative_ngram_max_trie_depth + 1),
    "speculative_ngram_match_type": lambda view: one_of(("BFS", "PROB")),
}

# Fields that keep SGLang's default, by the reason; a release may lack some.
_AT_DEFAULT = {
    _SHARED_KV: "enable_dp_attention dcp_size attn_cp_size enable_prefill_cp enable_unified_memory "
    "enable_prefill_context_parallel enable_dsa_prefill_context_parallel",
    "draft and target run in one process, one stage": "pp_size enable_pdmux "
    "enable_pd_role_switch decoupled_spec_role",
    _NO_BATCH_SYNC: "moe_dp_size dwdp_size moe_a2a_backend elastic_ep_backend enable_waterfill",
    _NO_PLUGINS: "tokenizer_worker_num use_ray",
    _NO_DRAFT_KV: "enable_hisparse enable_unified_cache_external_linker "
    "enable_lmcache enable_flexkv radix_cache_backend disaggregation_decode_enable_offload_kvcache "
    "disaggregation_decode_host_receive_threshold hicache_host_memory_mode",
    "rounds are captured, and timed, with the weights in place": "startup_weight_load_mode",
    "a captured round cannot wait for experts": "enable_paged_experts",
    _TEXT_ONLY: "prefill_only_disable_kv_cache is_embedding encoder_only language_only",
    "a diffusion model has no next token to draft": "dllm_algorithm",
    "the draft reads no prompts of several items": "enable_mis",
    "particles are drawn by samplers that leave no mark": "enable_watermark",
    "prefill and rounds are separate batches": "enable_mixed_chunk",
    "a round is one batch": "enable_two_batch_overlap enable_single_batch_overlap",
    "the text does not follow the target exactly": "rl_on_policy_target",
    _OWN_ATTENTION: "enable_page_major_kv_layout decode_attention_backend "
    "speculative_attention_mode enable_nvidia_megakernel enable_amd_monokernel",
    "prefill leaves every rank all of a prompt": "enable_layernorm_sp",
    "rounds are captured by SMC itself, which this would not reach": "enable_torch_compile "
    "disable_cuda_graph_padding",
    "it watches SGLang's own forward passes, and rounds run the models themselves": "kv_canary "
    "msprobe_dump_config enable_eplb expert_distribution_recorder_mode "
    "enable_expert_distribution_metrics expert_balancedness_report_mode "
    "enable_return_hidden_states enable_return_aux_hidden_states return_hidden_states_mode "
    "enable_return_indexer_topk",
    "it adapts K alone; SMC's own is --speculative-smc-adaptive": "speculative_adaptive "
    "speculative_adaptive_config",
    "SMC verifies in its own way; see --speculative-smc-tilt": "speculative_use_rejection_sampling "
    "speculative_accept_threshold_single speculative_accept_threshold_acc "
    "speculative_use_block_verification",
    _NO_EFFECT: "speculative_skip_dp_mlp_sync enable_multi_layer_eagle "
    "speculative_dflash_block_size speculative_domino_candidate_pool_size uno_lora_path "
    "speculative_dspark_block_size speculative_dspark_sps_table_path "
    "speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier "
    "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
    "speculative_ngram_external_corpus_max_tokens decoupled_spec_bind_endpoint "
    "decoupled_spec_connect_endpoints decoupled_spec_rank spec_trace_dir "
    "enable_linear_replayssm enable_linear_replayssm_spec linear_attn_verify_backend",
    f"it acts on n-gram matches, without {flag_of('ngram_matches')}": " ".join(_NGRAM),
}
_OTHERS = (
    Requirement(
        "attn_dp_size",
        (1,),
        _SHARED_KV,
        "Leave it and --enable-dp-attention out; --dp-size alone counts whole replicas.",
    ),
    Requirement("speculative_moe_a2a_backend", (None, "none"), _NO_BATCH_SYNC),
    Requirement("smg_grpc_mode", (False,), _NO_PLUGINS, "Leave it out; --grpc-port serves gRPC."),
    Requirement("grpc_mode", (False,), _NO_PLUGINS, "Leave it out; --grpc-port serves gRPC."),
    Requirement(
        "kv_cache_dtype", _CACHE_TYPES, _NO_BLOCKS, "Pass --kv-cache-dtype auto or fp8_e4m3."
    ),
    Requirement("speculative_draft_kv_cache_dtype", (None, *_CACHE_TYPES), _NO_BLOCKS),
    Requirement(
        "disaggregation_decode_retraction_backup", (None, "cpu_tensor", "none"), _NO_DRAFT_KV
    ),
    Requirement(
        "enable_deterministic_inference",
        (False,),
        "what it promises of other attention is not known of that over particles",
        "Leave it out; with a sampling_seed a text is the same up to floating-point differences.",
    ),
    Requirement(
        "preferred_sampling_params",
        (None,),
        "they are merged into a request behind the check of what SMC can honour",
        "Let clients send them, or write them into the model's generation_config.json.",
    ),
    Requirement(
        "grammar_backend",
        (None, "xgrammar", "none"),
        "each particle has a copy of its grammar's state, which only xgrammar's can give",
    ),
    Requirement("enable_lean_attention", (None, False), _OWN_ATTENTION),
    Requirement("speculative_eagle_topk", (None, 1), "each particle is one chain, not a tree"),
)
if IS_NEWER:
    _OF_RELEASE = (Requirement("enable_lora_overlap_loading", (None, False), _NO_WAIT),)
else:
    _OF_RELEASE = (
        Requirement("enable_return_routed_experts", (False,), _NO_EXPERTS),
        Requirement("enable_lora", (None, False), _NO_ADAPTERS),
        Requirement("lora_paths", (None, []), _NO_ADAPTERS),
    )
if not IS_NEWEST:
    _OF_RELEASE += (
        Requirement("enable_hierarchical_cache", (False,), _NO_HOST_POOL),
        Requirement("page_size", (1,), _NO_PAGES, "Pass --page-size 1, or install 0.5.23."),
    )


def _at_default() -> Iterator[Requirement]:
    defaults = argument_defaults()
    for because, fields in _AT_DEFAULT.items():
        for field in fields.split():
            if field in defaults:
                yield Requirement(field, (defaults[field],), because)


REQUIREMENTS = (*_at_default(), *_OTHERS, *_OF_RELEASE)


def unmet(server_args: Arguments) -> list[str]:
    """Return a sentence for each requirement that is not met, and what to do."""
    # Until resolution ends, fields may lag behind the values that earlier steps have set.
    view = resolved_view(server_args)
    return [
        f"--{required.field.replace('_', '-')} is {value!r}; allowed: "
        f"{' or '.join(map(repr, required.allowed))}, since {required.because}. {required.instead}"
        for required in REQUIREMENTS
        if hasattr(view, required.field)
        if not (view.speculative_smc_ngram_matches and required.field in _NGRAM)
        if (value := _value_of(required, server_args, view)) not in required.allowed
    ] + [
        *_draft_problems(view),
        *_expert_problems(view),
        *_storage_problems(view),
        *_ngram_problems(view),
        *_environment_problems(),
    ]


def _value_of(required: Requirement, server_args: Arguments, view: Any) -> Any:
    """Return what a field is judged by.

    Of what would have no effect that is the given value: SGLang sets some for a family of models.
    """
    return getattr(server_args if required.because == _NO_EFFECT else view, required.field)


def _ngram_problems(view: Any) -> Iterator[str]:
    """Yield n-gram settings with which SGLang's cache cannot be built, or ends the process."""
    if not view.speculative_smc_ngram_matches:
        return
    own = flag_of("ngram_matches")
    if view.enable_multimodal:
        yield (
            f"--enable-multimodal is True with {own}; allowed: one of them, since tokens of images "
            "would be matched. Leave one out."
        )
    if not IS_NEWER:
        yield (
            f"{own} is True on SGLang {release()}; allowed: False, since its n-gram cache does not "
            "compile everywhere. Leave it out, or install SGLang 0.5.22 or later."
        )
        return
    for field, allowed in _NGRAM.items():
        value = getattr(view, field)
        values = allowed(view)
        flag = field.replace("_", "-")
        if not values.holds(value):
            yield f"--{flag} is {value!r}; allowed: {values.words}. Leave it out."


def _draft_problems(view: Any) -> Iterator[str]:
    """Yield settings of the draft alone that differ from the target's."""
    given = view.speculative_moe_runner_backend
    of_target = view.moe_runner_backend
    if given not in (None, of_target):
        yield (
            f"--speculative-moe-runner-backend is {given!r}; allowed: {of_target!r}, as "
            "--moe-runner-backend, since the draft's experts run as the target's do. Leave it out."
        )


def _expert_problems(view: Any) -> Iterator[str]:
    """Yield settings by which KV comes to other slots than those that experts are kept by."""
    if not IS_NEWER or not view.enable_return_routed_experts:
        return
    others = {
        "--page-size": view.page_size > 1,
        "--enable-hierarchical-cache": view.enable_hierarchical_cache,
        "--disaggregation-mode": view.disaggregation_mode != "null",
    }
    if given := [flag for flag, moves in others.items() if moves]:
        yield (
            f"--enable-return-routed-experts is True with {', '.join(given)}; allowed: without, "
            "since the experts of tokens do not move with their KV. Leave one out."
        )


def _storage_problems(view: Any) -> Iterator[str]:
    """Yield settings with which a storage lacks KV of the draft, or has no name for the weights."""
    if (backend := view.hicache_storage_backend) is None:
        return
    needed = {
        "--hicache-storage-backend file": backend == "file",
        "--enable-hierarchical-cache": view.enable_hierarchical_cache,
        "--tp-size 1": view.tp_size == 1,  # of a draft beside latents rank 0's heads alone are kept
        "--load-format auto": view.load_format in ("auto", "safetensors"),
        "no --enable-memory-saver": not view.enable_memory_saver,  # its weights come by updates
    }
    if lacking := [flag for flag, is_so in needed.items() if not is_so]:
        yield (
            f"--hicache-storage-backend is {backend!r}; allowed: with {', '.join(lacking)}, since "
            "else KV is not kept for both models, or not named by their weights. Leave it out."
        )


def _environment_problems() -> Iterator[str]:
    if envs.SGLANG_RUST_SERVER.get():
        yield (
            "SGLANG_RUST_SERVER is set; allowed: SGLang's own HTTP server, in which requests are "
            "checked for what SMC can honour. Unset it."
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        yield (
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set; allowed: false, since it sizes the KV "
            "pool by what SGLang's decode graphs leave, of which there are none: the pool would "
            "take the memory that rounds need. Unset it."
        )
