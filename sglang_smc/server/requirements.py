"""List the fields of SGLang's server arguments that an SMC server cannot honor, and why.

A field is listed if SMC would fail with it, or ignore it. Some fields exist in some releases of
SGLang only; one that this release lacks cannot be set.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs

from sglang_smc.options.server import SETTINGS, flag_of, integers, one_of
from sglang_smc.upstream import HAS_NGRAM_CACHE, IS_NEWER, release

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class Requirement(NamedTuple):
    """The allowed values of a field of `ServerArgs`."""

    field: str
    allowed: tuple[Any, ...]
    because: str
    instead: str = "Leave it out."


_SHARED_KV = "particles share and exchange KV slot by slot, on one rank"
_ONE_PROCESS = "draft and target run in one process, one stage"
_NO_ADAPTERS = "this release runs none in a pass over particles: 0.5.22 and later do"
_NO_WAIT = "a round loads the adapters of its requests, and waits for none"
_NO_PLUGINS = "SGLang loads no plugins in those processes"
_NO_REJECTION = "SMC weighs the draft's tokens, it rejects none"
_OWN_ADAPTIVE = "it adapts K alone; SMC's own is --speculative-smc-adaptive"
_OTHER = "this belongs to other algorithms and would have no effect"
_MATCHES = f"it acts on n-gram matches, and {flag_of('ngram_weight')} is 0"
_OWN_FORWARD = "it watches SGLang's own forward passes, and rounds run the models themselves"
_OWN_ATTENTION = "particles have an attention of their own, which this would not reach"
_OWN_GRAPHS = "rounds are captured by SMC itself, which this would not reach"
_NO_DRAFT_KV = "the draft's KV would not be kept beside the target's"
_ITS_COPIES = "each particle has a copy of its grammar's state, which only xgrammar's can give"
_NO_BATCH_SYNC = "rounds do not balance batches between ranks"
_NO_STAGING = "rounds are recorded, and timed, with the weights in place"
_TEXT_ONLY = "an SMC server generates text, in one process, from text"

_PARALLELISM = (
    Requirement("enable_dp_attention", (False,), _SHARED_KV),
    Requirement(
        "attn_dp_size",
        (1,),
        _SHARED_KV,
        "Leave it and --enable-dp-attention out; --dp-size alone counts whole replicas.",
    ),
    Requirement("dcp_size", (1,), _SHARED_KV),
    Requirement("attn_cp_size", (1,), _SHARED_KV),
    Requirement("enable_prefill_cp", (False,), _SHARED_KV),
    Requirement("enable_prefill_context_parallel", (False,), _SHARED_KV),
    Requirement("enable_dsa_prefill_context_parallel", (False,), _SHARED_KV),
    Requirement("pp_size", (1,), _ONE_PROCESS),
    Requirement("disaggregation_mode", ("null",), _ONE_PROCESS),
    Requirement("enable_pd_role_switch", (False,), _ONE_PROCESS),
    Requirement("decoupled_spec_role", ("null",), _ONE_PROCESS),
    Requirement("enable_pdmux", (False,), _ONE_PROCESS),
    Requirement("moe_dp_size", (1,), _NO_BATCH_SYNC),
    Requirement("dwdp_size", (1,), _NO_BATCH_SYNC),
    Requirement("moe_a2a_backend", ("none",), _NO_BATCH_SYNC),
    Requirement("speculative_moe_a2a_backend", (None, "none"), _NO_BATCH_SYNC),
    Requirement("elastic_ep_backend", (None,), _NO_BATCH_SYNC),
    Requirement("tokenizer_worker_num", (1,), _NO_PLUGINS),
    Requirement("use_ray", (False,), _NO_PLUGINS),
    Requirement("smg_grpc_mode", (False,), _NO_PLUGINS, "Leave it out; --grpc-port serves gRPC."),
    Requirement("grpc_mode", (False,), _NO_PLUGINS, "Leave it out; --grpc-port serves gRPC."),
)

_MEMORY = (
    Requirement(
        "page_size",
        (1,),
        _SHARED_KV,
        "Pass --page-size 1, with an --attention-backend for prefill that takes it.",
    ),
    Requirement(
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        "the attention over particles reads no KV of 4 bits or in blocks",
        "Pass --kv-cache-dtype auto or fp8_e4m3.",
    ),
    Requirement(
        "speculative_draft_kv_cache_dtype",
        (None, "auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        "the attention over particles reads no KV of 4 bits or in blocks",
    ),
    Requirement("enable_page_major_kv_layout", (False,), _OWN_ATTENTION),
    Requirement("enable_unified_memory", (False,), _SHARED_KV),
    Requirement("prefill_only_disable_kv_cache", (False,), _TEXT_ONLY),
    Requirement("enable_hierarchical_cache", (False,), _NO_DRAFT_KV),
    Requirement(
        "disaggregation_decode_retraction_backup", (None, "cpu_tensor", "none"), _NO_DRAFT_KV
    ),
    Requirement("enable_hisparse", (False,), _NO_DRAFT_KV),
    Requirement("enable_unified_cache_external_linker", (False,), _NO_DRAFT_KV),
    Requirement("enable_lmcache", (False,), _NO_DRAFT_KV),
    Requirement("enable_flexkv", (False,), _NO_DRAFT_KV),
    Requirement("radix_cache_backend", (None,), _NO_DRAFT_KV),
    Requirement("startup_weight_load_mode", ("serial",), _NO_STAGING),
    Requirement("enable_paged_experts", (False,), "a recorded round cannot wait for experts"),
)

_MODES = (
    Requirement("is_embedding", (False,), _TEXT_ONLY),
    Requirement("encoder_only", (False,), _TEXT_ONLY),
    Requirement("language_only", (False,), _TEXT_ONLY),
    Requirement("enable_multimodal", (None, False), _TEXT_ONLY),
    Requirement("dllm_algorithm", (None,), "a diffusion model has no next token to draft"),
    Requirement("enable_mis", (False,), "the draft reads no prompts of several items"),
    Requirement("enable_watermark", (False,), "particles are drawn by samplers that leave no mark"),
    Requirement("enable_mixed_chunk", (False,), "prefill and rounds are separate batches"),
    Requirement("enable_two_batch_overlap", (False,), "a round is one batch"),
    Requirement("enable_single_batch_overlap", (False,), "a round is one batch"),
    Requirement(
        "enable_deterministic_inference",
        (False,),
        "what it promises of other attention is not known of that over particles",
        "Leave it out; with a sampling_seed a text is the same up to floating-point differences.",
    ),
    Requirement("rl_on_policy_target", (None,), "the text does not follow the target exactly"),
    Requirement(
        "preferred_sampling_params",
        (None,),
        "they are merged into a request behind the check of what SMC can honour",
        "Let clients send them, or write them into the model's generation_config.json.",
    ),
)

_OWN_WAYS = (
    Requirement("grammar_backend", (None, "xgrammar", "none"), _ITS_COPIES),
    Requirement("decode_attention_backend", (None,), _OWN_ATTENTION),
    Requirement("speculative_attention_mode", ("prefill",), _OWN_ATTENTION),
    Requirement("enable_lean_attention", (None, False), _OWN_ATTENTION),
    Requirement("enable_nvidia_megakernel", (False,), _OWN_ATTENTION),
    Requirement("enable_amd_monokernel", (False,), _OWN_ATTENTION),
    Requirement("enable_layernorm_sp", (False,), "prefill leaves every rank all of a prompt"),
    Requirement("enable_torch_compile", (False,), _OWN_GRAPHS),
    Requirement("disable_cuda_graph_padding", (False,), _OWN_GRAPHS),
    Requirement("kv_canary", ("none",), _OWN_FORWARD),
    Requirement("msprobe_dump_config", (None,), _OWN_FORWARD),
    Requirement("enable_eplb", (False,), _OWN_FORWARD),
    Requirement("expert_distribution_recorder_mode", (None,), _OWN_FORWARD),
    Requirement("enable_expert_distribution_metrics", (False,), _OWN_FORWARD),
    Requirement("expert_balancedness_report_mode", ("off",), _OWN_FORWARD),
    Requirement("enable_return_hidden_states", (False,), _OWN_FORWARD),
    Requirement("enable_return_aux_hidden_states", (False,), _OWN_FORWARD),
    Requirement("return_hidden_states_mode", (None,), _OWN_FORWARD),
    Requirement("enable_return_routed_experts", (False,), _OWN_FORWARD),
    Requirement("enable_return_indexer_topk", (False,), _OWN_FORWARD),
)

_OTHER_ALGORITHMS = (
    Requirement("speculative_adaptive", (False,), _OWN_ADAPTIVE),
    Requirement("speculative_adaptive_config", (None,), _OWN_ADAPTIVE),
    Requirement("speculative_eagle_topk", (None, 1), "each particle is one chain, not a tree"),
    Requirement("speculative_accept_threshold_single", (1.0,), _NO_REJECTION),
    Requirement("speculative_accept_threshold_acc", (1.0,), _NO_REJECTION),
    Requirement("speculative_use_rejection_sampling", (False,), _NO_REJECTION),
    Requirement("speculative_use_block_verification", (False,), _NO_REJECTION),
    Requirement("speculative_token_map", (None,), "the draft must reach the whole vocabulary"),
    Requirement("speculative_draft_window_size", (None,), _OTHER),
    Requirement("speculative_draft_sink_size", (None,), _OTHER),
    Requirement("speculative_skip_dp_mlp_sync", (False,), _OTHER),
    Requirement("enable_multi_layer_eagle", (False,), _OTHER),
    Requirement("speculative_dflash_block_size", (None,), _OTHER),
    Requirement("speculative_domino_candidate_pool_size", (2048,), _OTHER),
    Requirement("uno_lora_path", (None,), _OTHER),
    Requirement("speculative_dspark_block_size", (None,), _OTHER),
    Requirement("speculative_dspark_sps_table_path", (None,), _OTHER),
    Requirement("speculative_dspark_confidence_sts_path", (None,), _OTHER),
    Requirement("speculative_dspark_align_verify_tokens_to_graph_tier", (False,), _OTHER),
    Requirement("speculative_ngram_external_corpus_path", (None,), _OTHER),
    Requirement("speculative_ngram_external_sam_budget", (0,), _OTHER),
    Requirement("speculative_ngram_external_corpus_max_tokens", (10_000_000,), _OTHER),
    Requirement("decoupled_spec_bind_endpoint", (None,), _OTHER),
    Requirement("decoupled_spec_connect_endpoints", (None,), _OTHER),
    Requirement("decoupled_spec_rank", (None,), _OTHER),
    Requirement("spec_trace_dir", (None,), _OTHER),
    Requirement("enable_linear_replayssm", (False,), _OTHER),
    Requirement("enable_linear_replayssm_spec", (False,), _OTHER),
    Requirement("linear_attn_verify_backend", (None,), _OTHER),
)

_NGRAM = (
    Requirement("speculative_ngram_min_bfs_breadth", (1,), _MATCHES),
    Requirement("speculative_ngram_max_bfs_breadth", (10,), _MATCHES),
    Requirement("speculative_ngram_match_type", ("BFS",), _MATCHES),
    Requirement("speculative_ngram_max_trie_depth", (18,), _MATCHES),
    Requirement("speculative_ngram_capacity", (10_000_000,), _MATCHES),
)

if IS_NEWER:
    _LORA = (Requirement("enable_lora_overlap_loading", (None, False), _NO_WAIT),)
else:
    _LORA = (
        Requirement("enable_lora", (None, False), _NO_ADAPTERS),
        Requirement("lora_paths", (None, []), _NO_ADAPTERS),
    )

REQUIREMENTS = (
    *(*_PARALLELISM, *_MEMORY, *_MODES, *_LORA),
    *(*_OWN_WAYS, *_OTHER_ALGORITHMS, *_NGRAM),
)


def unmet(server_args: "ServerArgs") -> list[str]:
    """Return a sentence for each requirement that is not met, and what to do."""
    # Until resolution ends, fields may lag behind the values that earlier steps have set.
    view = resolved_view(server_args)
    skipped = _NGRAM if _keeps_texts(view) else ()
    return [
        f"--{required.field.replace('_', '-')} is {getattr(view, required.field)!r}; allowed: "
        f"{' or '.join(map(repr, required.allowed))}, since {required.because}. {required.instead}"
        for required in REQUIREMENTS
        if required not in skipped and hasattr(view, required.field)
        if getattr(view, required.field) not in required.allowed
    ] + [*_draft_problems(view), *_ngram_problems(view), *_environment_problems()]


def _keeps_texts(view: Any) -> bool:
    weight = view.speculative_smc_ngram_weight
    return weight is not None and SETTINGS["ngram_weight"].allowed.holds(weight) and weight > 0


def _ngram_problems(view: Any) -> Iterator[str]:
    """Yield n-gram settings with which SGLang's cache cannot be built, or ends the process."""
    if not _keeps_texts(view):
        return
    if not HAS_NGRAM_CACHE:
        yield (
            f"{flag_of('ngram_weight')} is {view.speculative_smc_ngram_weight!r} on SGLang "
            f"{release()}; allowed: 0, since its n-gram cache does not compile everywhere. "
            "Leave it out, or install SGLang 0.5.22 or later."
        )
        return
    allowed = {
        "max_trie_depth": integers(2),
        "min_bfs_breadth": integers(1),
        "max_bfs_breadth": integers(view.speculative_ngram_min_bfs_breadth),
        "capacity": integers(view.speculative_ngram_max_trie_depth + 1),
        "match_type": one_of(("BFS", "PROB")),
    }
    for name, values in allowed.items():
        value = getattr(view, f"speculative_ngram_{name}")
        if not values.holds(value):
            flag = f"--speculative-ngram-{name.replace('_', '-')}"
            yield f"{flag} is {value!r}; allowed: {values.words}. Leave it out."


def _draft_problems(view: Any) -> Iterator[str]:
    """Yield settings of the draft alone that differ from the target's."""
    given, of_target = view.speculative_moe_runner_backend, view.moe_runner_backend
    if given not in (None, of_target):
        yield (
            f"--speculative-moe-runner-backend is {given!r}; allowed: {of_target!r}, as "
            "--moe-runner-backend, since the draft's experts run as the target's do. Leave it out."
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
