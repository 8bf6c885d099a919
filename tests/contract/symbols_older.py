"""The contract with SGLang, as far as only 0.5.17 is held to it; goes with that release."""

from contract.shape import Symbol

_ARGS = "sglang.srt.server_args.ServerArgs"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."

OLDER = (
    # Server arguments are a dataclass. They resolve as they are built, and hold what was resolved:
    # an algorithm and a platform are handed the object itself, read it and write to it.
    Symbol("sglang.srt.arg_groups.arg_utils.namespace_of", "cls"),
    Symbol("sglang.srt.arg_groups.arg_utils.resolvable_fields", "cls"),
    Symbol(_ARGS, attributes="__dataclass_fields__"),
    Symbol(_ARGS + ".__init__"),
    Symbol(
        _ARGS + ".__post_init__",
        calls="handle_speculative_decoding current_platform.apply_server_args_defaults",
    ),
    Symbol(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        "server_args",
        calls="algo.validate_server_args algo.handle_server_args",
    ),
    Symbol(_ARGS + ".get_model_config", "self"),
    # Requests and admission.
    Symbol(
        "sglang.srt.managers.schedule_batch.Req",
        attributes="kv? kv_committed_len cache_protected_len req_pool_idx?",
    ),
    Symbol(
        "sglang.srt.managers.schedule_policy.PrefillAdder",
        attributes="rem_total_token_offset cur_rem_token_offset",
    ),
    Symbol(
        "sglang.srt.session.streaming_session.StreamingSession._free_kv_aligned",
        "self pool_idx target end",
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        "self tokenized_obj",
    ),
    # Workers are handed their place among ranks. Of these keywords `SMCWorker.__init__` takes all.
    Symbol(
        "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker",
        "self",
        passes="server_args gpu_id ps nccl_port target_worker",
    ),
    Symbol(
        "sglang.srt.managers.tp_worker.TpModelWorker.__init__",
        "self * server_args gpu_id ps nccl_port is_draft_worker",
    ),
    Symbol(
        "sglang.srt.runtime_context.ParallelContext",
        attributes="tp_size tp_group",
    ),
    # Who hands new weights to the worker's methods; each call stands by itself.
    *(
        Symbol(
            _UPDATER + f"update_weights_from_{source}",
            calls=f"{worker}.update_weights_from_{source}",
        )
        for source, worker in (
            ("disk", "self.draft_worker"),
            ("ipc", "self.draft_worker"),
            ("tensor", "worker"),
            ("distributed", "self.tp_worker"),
        )
    ),
    Symbol(_UPDATER + "flush_cache_after_weight_update", "self recv_req"),
    Symbol(
        "sglang.srt.managers.tp_worker.TpModelWorker._deserialize_own_rank",
        "self serialized_named_tensors",
    ),
    # The plain-CPU platform.
    Symbol(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_oot_mha_kv_pool",
        calls="current_platform.get_mha_kv_pool_cls",
    ),
    Symbol("sglang.srt.platforms.interface.SRTPlatform", attributes="get_mha_kv_pool_cls"),
    Symbol(
        "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask", "vocab_size batch_size"
    ),
    Symbol(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        "self logits vocab_mask",
    ),
)
