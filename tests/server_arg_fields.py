"""Every field of SGLang's server arguments, and what it means for an SMC server.

Those that SMC refuses stand in `sglang_smc.server.requirements`. A field that SGLang adds belongs
to neither until someone has looked at it. Some have come or gone with a supported release: `make
upstream` reads all of them.
"""

ACTS: dict[str, str] = {
    # Read by SMC itself, or by its checks.
    "in SMC": """
        model_path speculative_algorithm speculative_draft_model_path
        speculative_draft_model_revision speculative_draft_load_format
        speculative_draft_model_quantization speculative_num_steps speculative_num_draft_tokens
        max_running_requests max_total_tokens random_seed decode_log_interval device
        disable_overlap_schedule cuda_graph_config disable_cuda_graph disable_decode_cuda_graph
        cuda_graph_backend_decode cuda_graph_max_bs_decode cuda_graph_bs_decode
        model_impl model_config_parser json_model_override_args
        disable_hybrid_swa_memory speculative_moe_runner_backend
    """,
    # SGLang's own code around the worker, which knows nothing of particles.
    "around the worker": """
        tokenizer_path tokenizer_mode tokenizer_backend detokenizer_worker_num skip_tokenizer_init
        trust_remote_code context_length revision sampling_defaults allow_auto_truncate
        mem_fraction_static max_queued_requests chunked_prefill_size max_prefill_tokens
        prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
        default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        radix_eviction_policy radix_eviction_policy_config disable_radix_cache
        enable_session_radix_cache prefill_decode_interval prefill_decode_interval_min_bs
        disable_chunked_prefix_cache scheduler_recv_interval min_free_slots_delay
        enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms watchdog_timeout soft_watchdog_timeout sleep_on_idle
        custom_sigquit_handler numa_node gc_threshold enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode stream_interval
        batch_notify_size incremental_streaming_output enable_cache_report
        enable_custom_logit_processor constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        disable_outlines_disk_cache
        enable_streaming_session
    """,
    "recurrent states of requests": """
        max_mamba_cache_size mamba_ssm_dtype mamba_full_memory_ratio linear_attn_backend
        linear_attn_prefill_backend
    """,
    "the HTTP server": """
        host port fastapi_root_path grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar
        sidecar_args skip_server_warmup warmups http2_max_concurrent_streams
        http2_initial_connection_window_size enable_http2 ssl_keyfile ssl_certfile ssl_ca_certs
        ssl_keyfile_password enable_ssl_refresh
        api_key admin_api_key served_model_name weight_version chat_template hf_chat_template_name
        completion_template file_storage_path reasoning_parser default_chat_template_kwargs
        strip_thinking_cache enable_strict_thinking tool_call_parser tool_server
        stream_response_default_include_usage engine_info_bootstrap_port enable_response_store
        trust_request_chat_template return_input_ids return_output_ids
    """,
    "logs and metrics": """
        log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs enable_request_time_stats_logging
        kv_events_config enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint
        export_metrics_to_file export_metrics_to_file_dir stat_loggers load_publish_endpoint
        otlp_service_name
    """,
    # Randomness and decisions are computed alike on all ranks; replicas know nothing of each other.
    "ranks and replicas": """
        tp_size dp_size load_balance_method nnodes node_rank nccl_port dist_timeout dist_init_addr
        base_gpu_id gpu_id_step ep_size enable_p2p_check disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem enable_nccl_nvls enable_symm_mem pre_warm_nccl
        enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode boundary_reduction gated_launch_port
        enable_fused_moe_sum_all_reduce disable_attn_tp_gather
        enable_attn_tp_input_scattered moe_dense_tp_size
    """,
    # What becomes of a model's weights and layers, of the target's and the draft's alike.
    "loading": """
        load_format model_loader_extra_config quantization_param_path download_dir model_checksum
        delete_ckpt_after_loading decrypted_config_file decrypted_draft_config_file
        custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
        weight_cache_timeout modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
        enable_weights_cpu_backup enable_memory_saver enable_draft_weights_cpu_backup
        language_model_only
    """,
    "layers": """
        dtype quantization enable_fp32_lm_head enable_tf32_matmul torchao_config cpu_offload_gb
        offload_group_size offload_num_in_group offload_prefetch_step offload_mode
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend moe_runner_backend
        flashinfer_mxfp4_moe_precision
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion ep_num_redundant_experts ep_dispatch_algorithm
        init_expert_location disable_flashinfer_autotune flashinfer_autotune_skip_ops
        enable_fused_qk_norm_rope kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token forward_hooks
        debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        enable_layerwise_nvtx_marker
    """,
    # Prefill is SGLang's own; --attention-backend chooses for it alone.
    "prefill": """
        attention_backend prefill_attention_backend speculative_draft_attention_backend
        cuda_graph_backend_prefill cuda_graph_max_bs_prefill cuda_graph_bs_prefill
        cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context
        cuda_graph_tc_compiler disable_prefill_cuda_graph enable_profile_cuda_graph
        enable_cudagraph_gc debug_cuda_graph
    """,
}

MOOT: dict[str, str] = {
    # They would act on something else that is refused or never there.
    "without what is refused": """
        pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking dcp_comm_backend
        dcp_replicate_q_proj cp_strategy dsa_prefill_cp_mode prefill_cp_mode
        enable_cp_decode_attn_tp enable_dsa_cache_layer_split
        enable_dp_attention_local_control_broadcast enable_dp_lm_head
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts encoder_transfer_backend
        encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder pdmux_config_path sm_group_num smg_http_sidecar_port
        enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
        lora_drain_wait_threshold tbo_token_distribution_threshold hicache_ratio hicache_size
        hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config hisparse_config
        lmcache_config_file flexkv_config_file dllm_algorithm_config dllm_fdfo deepep_mode
        fuseep_mode deepep_dispatcher_output_dtype deepep_config eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_buffer_size
        enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode
        ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout
        elastic_ep_rejoin kv_canary_real_data kv_canary_sweep_interval torch_compile_max_bs
        enable_torch_compile_debug_mode disaggregation_decode_allocation_policy
        disaggregation_decode_host_receive_threshold
        disaggregation_enable_kv_checksum hicache_host_memory_fraction hicache_host_memory_mode
        hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
        unified_cache_external_linker_backend unified_cache_external_linker_config
        paged_experts_num_resident sampling_mask_max_tokens deepep_v2_mode enable_w4a4_mxfp4_megamoe
        speculative_enable_w4a4_mxfp4_megamoe return_aux_hidden_state_layer_ids
        watermark_config
    """,
    # Without something that SMC refuses: half of a disaggregated pair, attention DP, all-to-all
    # experts, several tokenizer workers, an external cache, KV in NVFP4, sequence parallelism.
    "refused by SGLang": """
        enable_kv_cache_sharding enable_tp_lm_head_all_to_all
        enable_http_worker_reuseport enable_linker_mla_dedup prefill_kv_cache_dequant_dtype
        flashinfer_a2a_dispatch_type enable_megamoe_for_layernorm_sp
    """,
    # No flag: SGLang finds them as it resolves the others, or notes what was given.
    "filled in by SGLang": """
        _radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set
        _swa_full_tokens_ratio_explicitly_set aux_hidden_state_capture enable_cp_tp_group_sharing
        speculative_boundary_reduction watermark_key watermark_key_b watermark_context_window
        watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all
    """,
    "for devices that SMC does not run on": "mlx_enable_sampling c128_page_size",
    "read by nothing in this version": "num_continuous_decode_steps",
    # Particles have samplers and an attention of their own, on every backend; SGLang resolves these
    # for each server, so that one that a user gave cannot be told from its own choice.
    "not for particles": """
        sampling_backend triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size linear_attn_decode_backend
    """,
    # Targets with recurrent states run without the radix cache.
    "for a radix cache of recurrent states": """
        mamba_max_states_per_path mamba_radix_cache_strategy uses_mamba_radix_cache
        mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size
    """,
    "for models that are refused": """
        swa_full_tokens_ratio flashinfer_mla_disable_ragged dsa_prefill_backend dsa_decode_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend enable_deepseek_v4_fp4_indexer mamba_backend
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        linear_replayssm_cache_len enable_scattered_sconv mm_attention_backend
        enable_precise_embedding_interpolation enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num limit_mm_data_per_request enable_mm_global_cache
        disable_fast_image_processor mm_feature_transport keep_mm_feature_on_device
        asr_max_buffer_seconds asr_max_concurrent_sessions allowed_media_domains
        image_processor_backend media_url_max_file_size_mb mm_global_cache_backend
        mm_preprocess_cache_size_mb trust_mm_content_hashes dsa_triton_union
        dsv4_attn_backend dsv4_prefill_backend enable_dsa_fused_indexer speculative_dsa_topk_backend
        qsa_indexer_dtype swa_prefix_tails enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay ple_offload_embedding ple_offload_backend ple_offload_dir
        enable_dense_mlp_attn_tp enable_shared_experts_attn_tp shared_experts_tp_size
    """,
}

LOOKED_AT = [
    field for group in (ACTS, MOOT) for fields in group.values() for field in fields.split()
]
