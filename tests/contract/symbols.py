"""The contract with SGLang: every internal that this package touches, on all releases.

Models have `symbols_models.py`; what only some releases need stands in `symbols_older.py` (0.5.17)
and `symbols_newer.py`. Read by `test_symbols.py`, which compares it with the installed release
(`symbol_check.py`), and by `make upstream` (`upstream/`), which compares it with the source of any.
"""

from contract.shape import ASYNC_GENERATOR, COROUTINE, Symbol
from contract.symbols_heads import HEADS
from contract.symbols_latent import LATENT
from contract.symbols_models import MODELS
from contract.symbols_newer import NEWER, NEWEST
from contract.symbols_older import OLDER

_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."

# What the command-line flags need.
FLAGS = (
    Symbol("sglang.srt.arg_groups.arg_utils.Arg", attributes="help choices"),
    Symbol("sglang.srt.arg_groups.arg_utils.NS", attributes="path"),
    Symbol("sglang.srt.server_args.ServerArgs", attributes="speculative_algorithm from_cli_args"),
    Symbol("sglang.srt.server_args.ServerArgs.__post_init__", "self"),
    Symbol("sglang.srt.server_args.ServerArgs.check_server_args", "self"),
    Symbol("sglang.srt.server_args.prepare_server_args", "argv"),
    Symbol("sglang.srt.plugins.load_plugins", ""),
    # Every launch: once plugins are loaded, before the tokenizer manager and the schedulers.
    Symbol(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        calls="load_plugins server_args.check_server_args",
    ),
)

REGISTRATION = (
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry", attributes="_hooks _patched"),
    Symbol(
        "sglang.srt.plugins.hook_registry.HookRegistry.register", "target hook hook_type * source"
    ),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks", ""),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry._apply_target", "target hooks"),
    Symbol("sglang.srt.plugins.hook_registry.HookSource", "plugin_name dist_name"),
    Symbol(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register",
        "name * supports_overlap validate_server_args spec_class",
    ),
    Symbol(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map",
        "self device req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
    ),
    Symbol("sglang.srt.speculative.spec_registry.get_spec", "name"),
    Symbol(
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo.__init__",
        "self name factory * supports_overlap validate_server_args",
    ),
    Symbol(
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo"
        ".get_num_tokens_per_req_for_target_verify",
        "self num_draft_tokens is_draft_worker",
    ),
    Symbol(
        "sglang.srt.managers.overlap_utils.FutureMap.__init__",
        "self * device spec_algo req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
    ),
    Symbol("sglang.srt.arg_groups.overrides.resolved_view", "server_args"),
    Symbol("sglang.srt.configs.hybrid_arch.mambaish_config", "model_config"),
    Symbol(
        "sglang.srt.configs.model_config.ModelConfig",
        attributes="is_hybrid_swa is_encoder_decoder model_is_mrope is_draft_model "
        "speculative_algorithm num_nextn_predict_layers",
    ),
    Symbol("sglang.srt.configs.model_config.is_multimodal_model", "model_architectures"),
    # Where the hooks on drafts have to be in time, and what the second of them ends.
    Symbol(
        "sglang.srt.configs.model_config.ModelConfig.__init__",
        calls="self._config_draft_model self._derive_model_shapes",
    ),
    Symbol("sglang.srt.configs.model_config.ModelConfig._config_draft_model", "self"),
    Symbol("sglang.srt.configs.model_config.ModelConfig._derive_model_shapes", "self"),
)

# Targets of the hooks in patches/, and what those functions touch.
HOOKS = (
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        attributes="context_len allow_auto_truncate",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        "self request is_multimodal",
    ),
    Symbol(
        "sglang.srt.constrained.base_grammar_backend.create_grammar_backend",
        "server_args tokenizer vocab_size",
    ),
    Symbol("sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend", attributes="cache"),
    Symbol(
        "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.get_cached_or_future_value",
        calls="self.cache.get",
    ),
    Symbol(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend",
        attributes="grammar_compiler",
    ),
    Symbol(
        "sglang.srt.constrained.reasoner_grammar_backend.ReasonerGrammarBackend",
        attributes="grammar_backend",
    ),
    Symbol("sglang.srt.managers.schedule_batch.Req", attributes="finished_reason? finished_len?"),
    # Searched for nothing, where there are no patterns.
    Symbol(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish", "self new_accepted_len"
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "self obj request",
        kind=ASYNC_GENERATOR,
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "self obj input_ids",
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        "self meta_info recv_obj i",
    ),
    *(
        Symbol(f"sglang.srt.entrypoints.{path}", "self request raw_request", kind=COROUTINE)
        for path in (
            "anthropic.serving.AnthropicServing.handle_messages",
            "ollama.serving.OllamaServing.handle_chat",
            "ollama.serving.OllamaServing.handle_generate",
            "openai.serving_responses.OpenAIServingResponses.create_responses",
            "openai.serving_base.OpenAIServingBase.handle_request",
            "openai.serving_completions.OpenAIServingCompletion.handle_request",
        )
    ),
    # Whatever a route's request names as a LoRA adapter, and the HTTP request, come that far.
    Symbol(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path",
        "self request_model explicit_lora_path",
        calls="self._parse_model_parameter",
    ),
    *(
        Symbol(
            f"sglang.srt.entrypoints.openai.{path}._convert_to_internal_request",
            calls="self._resolve_lora_path",
            hands_on="lora_path",
        )
        for path in (
            "serving_chat.OpenAIServingChat",
            "serving_completions.OpenAIServingCompletion",
        )
    ),
    *(
        Symbol(
            f"sglang.srt.entrypoints.{path}",
            calls="self.tokenizer_manager.generate_request",
            hands_on="raw_request",
            kind=kind,
        )
        for path, kind in (
            ("ollama.serving.OllamaServing._generate_chat_response", COROUTINE),
            ("ollama.serving.OllamaServing._generate_generate_response", COROUTINE),
            (
                "openai.serving_responses.OpenAIServingResponses._generate_with_builtin_tools",
                ASYNC_GENERATOR,
            ),
        )
    ),
    Symbol(
        "sglang.srt.entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params",
        "self options",
    ),
    Symbol("sglang.srt.entrypoints.ollama.serving.OllamaServing.get_tags", "self"),
    Symbol("sglang.srt.entrypoints.ollama.serving.OllamaServing", attributes="tokenizer_manager"),
    Symbol(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing",
        attributes="openai_serving_chat _error_response",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase",
        attributes="tokenizer_manager create_error_response",
    ),
    *(
        Symbol(f"sglang.srt.entrypoints.openai.{path}", "self request ret created")
        for path in (
            "serving_chat.OpenAIServingChat._build_chat_response",
            "serving_completions.OpenAIServingCompletion._build_completion_response",
        )
    ),
    *(
        Symbol(
            f"sglang.srt.entrypoints.openai.{path}",
            "self adapted_request request raw_request",
            kind=ASYNC_GENERATOR,
        )
        for path in (
            "serving_chat.OpenAIServingChat._generate_chat_stream",
            "serving_completions.OpenAIServingCompletion._generate_completion_stream",
        )
    ),
    Symbol("sglang.srt.entrypoints.http_server.set_global_state", "global_state"),
    Symbol("sglang.srt.entrypoints.http_server.available_models", "", kind=COROUTINE),
    Symbol("sglang.srt.entrypoints.http_server.retrieve_model", "model", kind=COROUTINE),
    Symbol("sglang.srt.managers.io_struct.GenerateReqInput", attributes="lora_path"),
    Symbol("sglang.srt.managers.schedule_policy.PrefillAdder.__init__", "self"),
    Symbol(
        "sglang.srt.managers.schedule_policy.PrefillAdder",
        attributes="running_batch can_run_list",
    ),
    Symbol("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", "self req"),
    Symbol("sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", "self req"),
    Symbol("sglang.srt.managers.schedule_policy.PrefillAdder.preempt_to_schedule", "self req"),
    Symbol(
        "sglang.srt.managers.utils.validate_input_length",
        "req max_req_input_len allow_auto_truncate",
    ),
    Symbol(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        "model_config load_config tp_size",
    ),
    Symbol(
        "sglang.srt.session.streaming_session.StreamingSession._trim_overshoot",
        "self req finished_len",
    ),
    Symbol("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", "self"),
    Symbol("sglang.srt.speculative.spec_utils.spec_prepare_for_decode", "batch"),
    Symbol(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        "self requests page_size",
    ),
    Symbol(
        "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
        "self batch last_batch",
    ),
    Symbol(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "self result batch",
    ),
    Symbol("sglang.srt.managers.schedule_batch.Req.update_finish_state", "self new_accepted_len"),
    Symbol("sglang.srt.managers.schedule_batch.Req.reset_for_retract", "self"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter", "self"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "self recv_req"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.set_internal_state", "self recv_req"),
    Symbol("sglang.srt.managers.scheduler.Scheduler.pause_generation", "self recv_req"),
    Symbol(
        "sglang.srt.managers.scheduler.Scheduler",
        attributes="draft_worker metrics_reporter waiting_queue running_batch last_batch "
        "chunked_req grammar_manager _engine_paused",
    ),
    Symbol(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        attributes="is_stats_logging_rank current_scheduler_metrics_enabled metrics_collector",
    ),
    Symbol(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
        attributes="labels _counter_cls _gauge_cls _histogram_cls",
    ),
    *(
        Symbol(
            "sglang.srt.managers.scheduler_components.weight_updater"
            f".SchedulerWeightUpdaterManager.{name}",
            "self recv_req",
        )
        for name in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
        )
    ),
    *(
        Symbol(
            f"sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.{name}",
            "self obj request",
            kind=COROUTINE,
        )
        for name in ("release_memory_occupation", "resume_memory_occupation")
    ),
    Symbol(
        "sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput",
        attributes="model_path load_format recapture_cuda_graph flush_cache manifest",
    ),
)

# What the worker builds on.
WORKER = (
    Symbol("sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras", "self batch"),
    Symbol("sglang.srt.managers.scheduler.Scheduler", attributes="server_args result_queue"),
    Symbol(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "self batch forward_batch * is_verify",
    ),
    Symbol(
        "sglang.srt.managers.tp_worker.TpModelWorker",
        attributes="model_runner tokenizer random_seed set_hicache_consumer",
    ),
    Symbol(
        "sglang.srt.model_executor.model_runner.ModelRunner",
        attributes="model model_config dtype forward weight_updater req_to_token_pool "
        "token_to_kv_pool is_draft_worker",
    ),
    Symbol(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.alloc_memory_pool",
        "self memory_pool_config req_to_token_pool token_to_kv_pool_allocator",
    ),
    Symbol(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker",
        attributes="target_worker draft_worker alloc_memory_pool init_attention_backends "
        "req_to_token_pool spec_v2_attn_backends",
    ),
    Symbol(
        "sglang.srt.model_executor.model_runner.ModelRunner.compute_logprobs_only",
        "self logits_output forward_batch",
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        "batch model_runner * return_hidden_states_before_norm",
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        attributes="forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc "
        "seq_lens_sum positions mrope_positions extend_seq_lens extend_prefix_lens spec_algorithm "
        "capture_hidden_mode",
    ),
    Symbol("sglang.srt.model_executor.forward_context.forward_context", "ctx"),
    Symbol(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar",
        attributes="matcher accepted_tokens accept_token rollback is_terminated fill_vocab_mask",
    ),
    Symbol(
        "sglang.srt.constrained.reasoner_grammar_backend.ReasonerGrammarObject",
        attributes="grammar _thinking_match_history",
    ),
    Symbol(
        "sglang.srt.managers.schedule_batch.FINISH_ABORT.__init__",
        "self message status_code err_type",
    ),
    Symbol("sglang.srt.managers.schedule_batch.FINISH_MATCHED_TOKEN.__init__", "self matched"),
    Symbol("sglang.srt.sampling.custom_logit_processor.CustomLogitProcessor.from_str", "json_str"),
    Symbol("sglang.srt.distributed.parallel_state.graph_capture", "stream"),
    Symbol("sglang.srt.model_executor.runner_utils.capture_mode.model_capture_mode", ""),
    Symbol("sglang.srt.speculative.spec_info.SpecInput.__init__", "self spec_input_type"),
    Symbol(
        "sglang.srt.managers.utils.GenerationBatchResult",
        attributes="next_token_ids accept_lens new_seq_lens next_draft_input "
        "speculative_num_draft_tokens num_correct_drafts num_correct_drafts_per_req_cpu "
        "can_run_cuda_graph extra_keep_alive_refs copy_to_cpu",
    ),
    Symbol(
        "sglang.srt.managers.schedule_batch.Req",
        attributes="sampling_params output_ids stream kv decode_batch_idx grammar retraction_count "
        "eos_token_ids tokenizer vocab_size customized_info to_finish is_retracted "
        "spec_num_correct_drafts spec_correct_drafts_histogram "
        "update_spec_correct_drafts_histogram origin_input_ids custom_logit_processor "
        "output_ids_through_stop",
    ),
    Symbol("sglang.srt.managers.schedule_batch.ReqKvInfo", attributes="kv_allocated_len"),
    Symbol("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", attributes="req_to_token size write"),
    Symbol("sglang.srt.mem_cache.allocation.alloc_token_slots", "tree_cache num_tokens"),
    Symbol("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.evictable_size", "self"),
    Symbol("sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.available_size", "self"),
    Symbol(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.broadcast_object", "self obj src"
    ),
    Symbol("sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_object", "self obj"),
    Symbol("sglang.srt.runtime_context.get_server_args", ""),
)

# What SGLang asks the plain-CPU platform for, and where.
PLATFORM = (
    *(
        Symbol(path, calls=f"current_platform.{method}")
        for path, method in (
            (_POOLS + "_build_token_to_kv_pool_allocator", "get_paged_allocator_cls"),
            ("sglang.srt.utils.common.get_compiler_backend", "get_compile_backend"),
        )
    ),
    Symbol(
        "sglang.srt.platforms.interface.SRTPlatform",
        attributes="apply_server_args_defaults init_backend get_default_attention_backend "
        "get_paged_allocator_cls get_compile_backend get_dispatch_key_name",
    ),
)

EVERY = FLAGS + REGISTRATION + HOOKS + WORKER + MODELS + LATENT + HEADS + PLATFORM


def contract(newer: bool, newest: bool = False) -> tuple[Symbol, ...]:
    """What has to be there on the newer releases, or on the older; some on the newest alone."""
    return EVERY + (NEWER if newer else OLDER) + (NEWEST if newest else ())
