"""The contract with SGLang, as far as 0.5.17 is not held to it."""

from contract.shape import COROUTINE, Symbol

_ARGS = "sglang.srt.server_args.ServerArgs"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."

NEWER = (
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
