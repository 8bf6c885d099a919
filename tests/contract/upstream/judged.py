"""Methods that SGLang may ask of us, on any supported release, each of which somebody looked at.

Fields of server arguments and requests stand in tests/server_arg_fields.py and
tests/request_fields.py; here are the methods of classes that ours derive from, and of the one that
brings new weights. A method that SGLang adds is answered by SGLang's default, which may be wrong
for SMC and says nothing. One that it drops, and that ours override, is a method of ours that nobody
calls.

Defaults that are wrong for SMC, all of the newer releases, and what is right:

- `BaseSpecWorker.weight_update_runners` has the draft, so that the target's weights would be loaded
  into it wherever an update names no `selector`. It has to be asked for by name.
- `SRTPlatform.get_kv_pool_cls` has the stock pool, which launches a Triton kernel as it is built.
  On a CPU: a subclass that does not.
- `SRTPlatform.supports_speculative_algorithm` is False: nothing but SMC runs on `smc_cpu`. True for
  what its attention can verify.

`capabilities` of a platform claims nothing, as is right for `smc_cpu`: no Triton, no graphs.
"""

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"


METHODS = {
    # The target runner is the last to read what the scheduler writes, by an event that nobody
    # records in a round, so the scheduler waits for all of it. The hierarchical cache, and with it
    # its plans for a draft's pool, are refused.
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker": """
        _build_hicache_draft_plan _draft_model_runners _wait_for_fused_hicache_load
        activate_step_by_batch alloc_memory_pool clear_cache_pool draft_swa_window draft_worker
        graph_memory_usage graph_time_usage hicache_draft_plan init_attention_backends
        init_cuda_graphs init_hicache_draft_plan last_shared_read_runner note_request_finished
        on_verify_complete_cpu preloaded_weights_bytes prewarm_sampling primary_draft_kv_pool
        spec_v2_attn_backends target_worker update_weights_from_disk update_weights_from_ipc
        war_fastpath_runner weight_load_time weight_update_runners
    """,
    # Mixed chunks are refused; the draft reads a prompt behind the target; a round is never wider
    # than speculative_num_draft_tokens, since budgets only shrink.
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo": """
        build_disagg_draft_input create_worker get_num_tokens_per_bs_for_target_verify
        get_num_tokens_per_req_for_target_verify handle_server_args has_draft_kv is_dflash
        is_dflash_family is_dspark is_eagle is_eagle3 is_frozen_kv_mtp is_ngram is_none is_some
        is_speculative is_standalone is_uno resolve_max_speculative_num_draft_tokens
        supports_grammar_overlap supports_mixed_chunk supports_prefill_shared_read_done
        supports_ragged_verify supports_target_verify_for_draft
    """,
    # Asked of forwards that are padded for other ranks' sake, by attention of data-parallel ranks,
    # which is refused.
    "sglang.srt.speculative.spec_info.SpecInput": """
        is_draft_input is_verify_input pad_batch
    """,
    # Buffers that other workers offer; NGRAM's; HiSparse's and mixed chunks', both refused.
    "sglang.srt.managers.overlap_utils.FutureMap": """
        _adopt_relay _lazy_init_forward_buf _maybe_init_dsa_topk_indices_buf
        _maybe_init_forward_bufs _maybe_init_ngram_bufs _resolve_spec_extras make_staged_spec_input
        publish resolve_confidence_cpu resolve_mixed_spec_tails resolve_seq_lens_cpu stash
        stash_bonus_tokens
    """,
    # Asked by SGLang's own graph runners, of its own backends; of an eager prefill, where the
    # answer is that reads may go on to its end; by models that write KV in fused kernels.
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend": """
        _snapshot_prefill_shared_reads draft_extend_metadata_captured_in_graph forward
        forward_decode forward_extend forward_mixed get_cuda_graph_seq_len_fill_value
        get_fused_kv_write_buffers get_indexer_metadata glue_draft_metadata
        glue_target_verify_metadata init_cuda_graph_state init_forward_metadata
        init_forward_metadata_for_breakable_cuda_graph_capture init_forward_metadata_in_graph
        init_forward_metadata_out_graph late_layer_num_tokens on_after_cuda_graph_warmup
        prepare_forward_metadata_for_breakable_cuda_graph_replay
        prepare_full_cuda_graph_chunked_prefix prepare_prefill_shared_read_snapshot
        resolve_prefill_shared_read_ends shared_read_ends support_triton
        update_verify_buffers_to_fill_after_draft validate_elastic_cuda_graph_recapture verify_mask
    """,
    # Defaults: the stock class, a CPU, False. DFLASH alone asks for a draft's backend.
    "sglang.srt.platforms.interface.SRTPlatform": """
        apply_server_args_defaults get_compile_backend get_default_attention_backend
        get_default_speculative_draft_attention_backend get_dispatch_key_name get_dsa_kv_pool_cls
        get_full_graph_backend_cls get_graph_runner_cls get_group_coordinator_device get_kv_pool_cls
        get_mha_kv_pool_cls get_mla_kv_pool_cls get_paged_allocator_cls get_piecewise_backend_cls
        get_quantization_config get_speculative_cache_locs_fn get_speculative_graph_runner_cls
        get_speculative_worker_cls init_backend post_load_model support_cuda_graph
        support_mamba_cache_extra_buffer support_piecewise_cuda_graph supports_fp8
        supports_speculative_algorithm supports_speculative_draft_attention_backend
    """,
    # All of them ask the worker which runners they concern.
    _UPDATER + ".SchedulerWeightUpdaterManager": """
        _assert_weight_cache_inactive _observe_weight_load _select_runners begin_weight_update
        check_weights destroy_weights_update_group end_weight_update flush_cache_after_weight_update
        get_weights_by_name init_weights_update_group record_weight_version_after_update
        release_memory_occupation resume_memory_occupation save_remote_model save_sharded_model
        update_weights_from_disk update_weights_from_distributed update_weights_from_ipc
        update_weights_from_tensor
    """,
}

# The worker puts a larger `req_to_token` into the pool before attention backends are built, which
# keep the tensor. Whoever else keeps it may have the one from before, and read it without an error.
MAY_KEEP_TABLE = (
    "sglang.srt.layers.attention.",
    "sglang.srt.hardware_backend.npu.attention.",
    # Built before, and again by the worker (`upstream.refresh_tables`).
    "sglang.srt.mem_cache.kv_index_translator",
    # Built by the scheduler after the worker; reads it for mixed chunks alone.
    "sglang.srt.managers.overlap_utils",
)
