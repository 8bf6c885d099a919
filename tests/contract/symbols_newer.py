"""The contract with SGLang, as far as 0.5.17 is not held to it."""

from contract.shape import COROUTINE, Symbol

_REQ = "sglang.srt.managers.schedule_batch.Req."
_ARGS = "sglang.srt.server_args.ServerArgs"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."

_OPS = "sglang.kernels.ops."

# Models with linear attention, on the plain CPU.
RECURRENT = (
    Symbol(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "runner full_attn_backend",
    ),
    Symbol(
        _OPS + "attention.fla.layernorm_gated.rms_norm_gated",
        "* x weight bias z eps group_size norm_before_gate is_rms_norm activation",
    ),
    Symbol(
        _OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
        "mixed_qkvz mixed_ba num_heads_qk num_heads_v head_qk head_v",
    ),
    Symbol(_OPS + "elementwise.elementwise.fused_sigmoid_mul", "attn_output gate inplace quant"),
)

# SGLang's n-gram cache, for matches.
_NGRAM = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus."
MATCHES = (
    Symbol(
        _NGRAM + "__init__",
        "self max_trie_depth min_bfs_breadth max_bfs_breadth draft_token_num match_type capacity",
    ),
    Symbol(_NGRAM + "batch_put", "self batch_tokens"),
    Symbol(_NGRAM + "synchronize", "self"),
    Symbol(_NGRAM + "reset", "self"),
    Symbol(_NGRAM + "batch_get", "self req_ids batch_tokens total_lens", calls="_get_state_id"),
    Symbol(_NGRAM + "erase_match_state", "self req_ids", calls="erase_states"),
)

NEWER = (
    *MATCHES,
    # Who is left out of a batch, since the result under way finishes him.
    Symbol(_REQ + "next_output_finishes_by_length", "self"),
    Symbol(
        "sglang.srt.managers.scheduler.Scheduler._reqs_finishing_inflight",
        "self batch",
        calls="req.next_output_finishes_by_length",
    ),
    # Server arguments are a struct of what the operator gave. What was resolved stands beside it:
    # an algorithm and a platform are handed a recorder, whose fields they read and write.
    Symbol(_ARGS, attributes="__struct_fields__ resolve_once"),
    Symbol(_ARGS + ".resolve_once", "self", calls="run_resolution_pipeline"),
    Symbol("sglang.srt.entrypoints.engine.Engine", attributes="server_args_class"),
    Symbol("sglang.srt.entrypoints.engine.Engine.__init__", calls="self.server_args_class"),
    Symbol(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        "server_args",
        calls="record_foreign_defaults",
        hands_on="algo.validate_server_args algo.handle_server_args",
    ),
    Symbol(
        "sglang.srt.arg_groups.platform_hook.handle_platform_defaults",
        calls="record_foreign_defaults",
        hands_on="current_platform.apply_server_args_defaults",
    ),
    Symbol("sglang.srt.arg_groups.model_override_base.model_config_of", "server_args"),
    # Requests and admission.
    Symbol(
        "sglang.srt.managers.schedule_batch.ReqKvInfo",
        attributes="req_pool_idx? kv_committed_len cache_protected_len holds_kv",
    ),
    Symbol("sglang.srt.managers.schedule_policy.PrefillAdder", attributes="memory_budget"),
    Symbol(
        "sglang.srt.mem_cache.prefill_budget.PrefillBudget",
        attributes="total_offset current_offset",
    ),
    Symbol(
        "sglang.srt.session.streaming_session.StreamingSession._free_kv_aligned",
        "self kv target end",
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        "self tokenized_obj",
        kind=COROUTINE,
    ),
    # Workers ask for their place among ranks. Of these keywords `SMCWorker.__init__` takes all.
    Symbol(
        "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker",
        "self",
        passes="server_args gpu_id nccl_port target_worker",
    ),
    Symbol(
        "sglang.srt.managers.tp_worker.TpModelWorker.__init__",
        "self * server_args gpu_id nccl_port is_draft_worker context_length",
    ),
    # What `get_parallel()` has.
    Symbol(
        "sglang.srt.arg_groups.fields.parallel.Parallel",
        attributes="tp_size tp_group dp_rank",
    ),
    # Who keeps the table that the worker exchanges, and hands it to attention backends.
    Symbol(_RUNNER, attributes="kv_index_translator"),
    Symbol(
        _RUNNER + ".init_kv_index_translator",
        "self",
        passes="req_to_token token_to_kv_pool_allocator token_to_kv_pool page_size device "
        "is_draft_worker",
    ),
    Symbol(
        _RUNNER + ".init_attention_backends",
        "self",
        calls="self.kv_index_translator.bind_and_verify_backends",
    ),
    # Who is given new weights: the runners that a worker names.
    Symbol("sglang.srt.speculative.base_spec_worker.BaseSpecWorker.weight_update_runners", "self"),
    Symbol("sglang.srt.managers.tp_worker.TpModelWorker.weight_update_runners", "self"),
    Symbol(
        _UPDATER + "_select_runners",
        "self selector",
        calls="self.tp_worker.weight_update_runners self.draft_worker.weight_update_runners",
    ),
    *(
        Symbol(_UPDATER + f"update_weights_from_{source}", calls="self._select_runners")
        for source in ("disk", "ipc", "tensor", "distributed")
    ),
    *(Symbol(_UPDATER + f"{verb}_weight_update", "self recv_req") for verb in ("begin", "end")),
    Symbol(_UPDATER + "flush_cache_after_weight_update", "self recv_req success message"),
    Symbol(
        "sglang.srt.managers.tp_worker.TpModelWorker.deserialize_own_rank",
        "self serialized_named_tensors",
    ),
    # The plain-CPU platform.
    Symbol(
        _POOLS + "_resolve_kv_pool_class",
        "self * kind default",
        calls="current_platform.get_kv_pool_cls",
    ),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls", "self * kind"),
    Symbol("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", "self"),
)

_SPEC = "sglang.srt.speculative."
_OPS = "sglang.kernels.ops.speculative."

# SGLang's own speculative decoding on our platform: what its hooks stand for, and what it asks.
NEWEST = (
    *RECURRENT,
    Symbol(
        _SPEC + "draft_utils.DraftBackendFactory._create_backend",
        "self backend_name backend_map error_template stamps_children",
    ),
    Symbol(
        _SPEC + "draft_utils.DraftBackendFactory",
        attributes="draft_model_runner topk speculative_num_steps",
    ),
    Symbol(_SPEC + "spec_utils._select_top_k_tokens_later"),
    Symbol(
        _SPEC + "eagle_utils.eagle_sample",
        calls="_can_use_sparse_uno_tree_target_sampling sample_uno_tree_target_tokens "
        "verify_tree_greedy_func",
    ),
    Symbol(
        _SPEC + "eagle_utils._can_use_sparse_uno_tree_target_sampling", "max_top_k sampling_info"
    ),
    Symbol(
        _SPEC + "uno_utils.sample_uno_tree_target_tokens",
        "* next_token_logits sampling_info batch_size verify_width max_top_k",
    ),
    Symbol("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", ""),
    Symbol("sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode", ""),
    Symbol(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "req_pool_indices req_to_token start_offset end_offset out_cache_loc batch_size",
    ),
    Symbol(
        _OPS + "cache_locs.assign_draft_cache_locs_contiguous_func",
        "req_pool_indices req_to_token seq_lens out_cache_loc topk num_cols positions mrope",
    ),
    Symbol(
        _OPS + "cache_locs.fill_front_out_cache_loc_func",
        "num_front out_cache_loc front_out_cache_loc",
    ),
    Symbol(
        _OPS + "eagle.fill_accept_out_cache_loc_func",
        "accept_index out_cache_loc accept_out_cache_loc size",
    ),
    Symbol(
        _OPS + "eagle.fill_bonus_tokens_func",
        "accept_tokens accept_lens bonus_tokens accept_stride batch_size",
    ),
    Symbol(
        _OPS + "spec_tree.build_tree_kernel_efficient_func",
        "parent_list top_scores_index seq_lens tree_mask positions retrieve_index "
        "retrieve_next_token retrieve_next_sibling topk spec_steps num_verify_tokens "
        "tree_mask_mode",
    ),
    Symbol(
        _OPS + "spec_tree.verify_tree_greedy_func",
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token "
        "retrieve_next_sibling target_predict topk",
    ),
    Symbol(
        "sglang.srt.platforms.interface.SRTPlatform",
        attributes="supports_speculative_algorithm get_speculative_cache_locs_fn "
        "get_speculative_worker_cls",
    ),
    Symbol(
        _SPEC + "spec_info.SpeculativeAlgorithm.get_platform_worker_cls",
        calls="current_platform.get_speculative_worker_cls",
    ),
    Symbol(_OPS + "cache_locs.assign_extend_cache_locs_func", calls="platform_fn"),
    Symbol(
        "sglang.srt.arg_groups.speculative_hook._check_oot_speculative_algorithm",
        calls="current_platform.supports_speculative_algorithm",
    ),
    Symbol(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions",
    ),
)
