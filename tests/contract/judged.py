"""What SGLang may ask of us or accept for us, and what each of it means has been looked at.

Fields of server arguments and requests stand in tests/server_arg_fields.py and
tests/request_fields.py; here are the methods of classes that ours derive from, and of the one that
brings new weights. A method that SGLang adds is answered by SGLang's default, which may be wrong
for SMC and says nothing: the default of `BaseSpecWorker.weight_update_runners` would load the
target's weights into the draft. One that it drops is a method of ours that nobody calls.
"""

METHODS = {
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker": """
        activate_step_by_batch alloc_memory_pool clear_cache_pool draft_worker graph_memory_usage
        graph_time_usage init_attention_backends init_cuda_graphs note_request_finished
        on_verify_complete_cpu spec_v2_attn_backends target_worker update_weights_from_disk
        update_weights_from_ipc war_fastpath_runner weight_load_time
    """,
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo": """
        build_disagg_draft_input create_worker get_num_tokens_per_bs_for_target_verify
        get_num_tokens_per_req_for_target_verify handle_server_args has_draft_kv is_dflash
        is_dflash_family is_dspark is_eagle is_eagle3 is_frozen_kv_mtp is_ngram is_none is_some
        is_speculative is_standalone supports_grammar_overlap supports_ragged_verify
        supports_target_verify_for_draft
    """,
    "sglang.srt.speculative.spec_info.SpecInput": "is_draft_input is_verify_input",
    "sglang.srt.managers.overlap_utils.FutureMap": """
        _lazy_init_forward_buf _maybe_init_dsa_topk_indices_buf _resolve_spec_extras publish
        resolve_confidence_cpu resolve_seq_lens_cpu stash
    """,
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend": """
        draft_extend_metadata_captured_in_graph forward forward_decode forward_extend forward_mixed
        get_cuda_graph_seq_len_fill_value get_indexer_metadata init_cuda_graph_state
        init_forward_metadata init_forward_metadata_for_breakable_cuda_graph_capture
        init_forward_metadata_in_graph init_forward_metadata_out_graph on_after_cuda_graph_warmup
        prepare_forward_metadata_for_breakable_cuda_graph_replay
        prepare_full_cuda_graph_chunked_prefix support_triton
        update_verify_buffers_to_fill_after_draft verify_mask
    """,
    "sglang.srt.platforms.interface.SRTPlatform": """
        apply_server_args_defaults get_compile_backend get_default_attention_backend
        get_dispatch_key_name get_dsa_kv_pool_cls get_graph_runner_cls get_mha_kv_pool_cls
        get_mla_kv_pool_cls get_paged_allocator_cls get_piecewise_backend_cls
        get_quantization_config init_backend support_cuda_graph support_piecewise_cuda_graph
        supports_fp8
    """,
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": """
        _assert_weight_cache_inactive _observe_weight_load check_weights
        destroy_weights_update_group flush_cache_after_weight_update get_weights_by_name
        init_weights_update_group release_memory_occupation resume_memory_occupation
        save_remote_model save_sharded_model update_weights_from_disk
        update_weights_from_distributed update_weights_from_ipc update_weights_from_tensor
    """,
}

# The worker puts a larger `req_to_token` into the pool before attention backends are built, which
# keep the tensor. Whoever else keeps it may have the one from before, and read it without an error.
MAY_KEEP_TABLE = (
    "sglang.srt.layers.attention.",
    "sglang.srt.hardware_backend.npu.attention.",
)
