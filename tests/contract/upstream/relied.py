"""What this package asks of SGLang and does not say where it can be read.

Imports, calls, hooks, overridden methods and attributes of annotated parameters are read from our
files (`ours.py`). Here is the rest: what is read of objects that come unannotated, and what has to
go on in functions of SGLang's for a hook or a method of ours to be called at all.

An entry is `name(parameters): attributes`, each with its release family's names alone:

- parameters of a function or class: the first, in order; behind `*` what is taken by keyword.
- attributes of a class: also those that its methods set on `self`; with `?` None at times.
- `| kind` of function: coroutine or async generator.
- `| calls`: the ends of expressions that it calls. `| hands on`: the ends of what it gives to
  calls. `| passes`: all the keywords of some call or dictionary in it.

A name that begins with a dot goes with the one before that does not.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# On every release.
EVERY = """
srt.server_args.ServerArgs: speculative_algorithm from_cli_args
    .__post_init__(self)
srt.entrypoints.engine.Engine._launch_subprocesses | calls load_plugins
        server_args.check_server_args
srt.plugins.hook_registry.HookRegistry
    .register(target hook hook_type * source)
    ._apply_target(target hooks) | calls _propagate_patch
srt.plugins.hook_registry._propagate_patch(original wrapped source_module)
srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map(self device req_to_token_pool
        needs_cpu_seq_lens needs_confidence_relay)
srt.speculative.spec_registry.CustomSpecAlgo(name factory * supports_overlap
        validate_server_args)
srt.managers.overlap_utils.FutureMap(* device spec_algo req_to_token_pool
        needs_cpu_seq_lens needs_confidence_relay)
srt.configs.model_config.ModelConfig: is_hybrid_swa model_is_mrope speculative_algorithm
    .__init__ | calls self._config_draft_model self._derive_model_shapes
        self._derive_context_length self._verify_quantization
    .from_server_args | hands on json_model_override_args
srt.layers.rotary_embedding.base.RotaryEmbedding: cos_sin_cache head_size is_neox_style rotary_dim
        use_fallback_kernel
    .forward_native(self positions query key)
    .forward_cuda(self positions query key)
srt.layers.layernorm.RMSNorm: weight variance_epsilon variance_size_override
srt.layers.linear.LinearBase: quant_method
srt.models.llama.LlamaAttention: rotary_emb qkv_proj o_proj attn q_size kv_size
    .forward_prepare_native(self positions hidden_states) | calls self.rotary_emb
    .forward | calls self.attn self.forward_prepare_native
srt.models.llama.LlamaMLP: gate_up_proj down_proj
srt.models.llama.LlamaDecoderLayer: self_attn mlp input_layernorm post_attention_layernorm
    .forward(self positions hidden_states forward_batch)
srt.models.qwen2.Qwen2Attention: rotary_emb qkv_proj o_proj attn q_size kv_size
    .forward | calls self.rotary_emb self.attn
srt.models.qwen2.Qwen2MLP: gate_up_proj down_proj
srt.models.qwen2.Qwen2DecoderLayer: self_attn mlp input_layernorm post_attention_layernorm
    .forward(self positions hidden_states forward_batch)
srt.models.qwen3.Qwen3Attention: rotary_emb qkv_proj o_proj attn q_size kv_size q_norm k_norm
        head_dim alt_stream
    .forward_prepare_native(self positions hidden_states) | calls self.rotary_emb
    .forward | calls self.attn self.forward_prepare_native
srt.models.qwen3.Qwen3DecoderLayer: self_attn mlp input_layernorm post_attention_layernorm
    .forward(self positions hidden_states forward_batch)
srt.constrained.base_grammar_backend.BaseGrammarBackend: cache
    .get_cached_or_future_value | calls self.cache.get
srt.constrained.xgrammar_backend.XGrammarGrammarBackend: grammar_compiler
srt.constrained.reasoner_grammar_backend.ReasonerGrammarBackend: grammar_backend
srt.managers.schedule_batch.Req: finished_reason? finished_len? decode_batch_idx
        is_retracted grammar? to_finish? output_ids_through_stop surr_offset? read_offset?
    ._check_str_based_finish(self new_accepted_len)
    .update_finish_state(self new_accepted_len)
    .init_incremental_detokenize(self)
srt.entrypoints.openai.serving_base.OpenAIServingBase
    .handle_request(self request raw_request) | kind coroutine
    ._resolve_lora_path(self request_model explicit_lora_path) | calls self._parse_model_parameter
srt.entrypoints.openai.protocol.UsageInfo: reasoning_tokens
srt.entrypoints.openai.protocol.ChatCompletionResponse: usage
srt.entrypoints.openai.protocol.CompletionResponse: usage
srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request | calls
        self._process_messages self._resolve_lora_path | hands on lora_path
srt.entrypoints.anthropic.serving.AnthropicServing._handle_non_streaming | calls
        self.openai_serving_chat._convert_to_internal_request
srt.entrypoints.anthropic.serving.AnthropicServing._handle_streaming | calls
        self.openai_serving_chat._convert_to_internal_request
srt.entrypoints.openai.serving_responses.OpenAIServingResponses._make_request | calls
        self._process_messages
srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._convert_to_internal_request |
        calls self._resolve_lora_path | hands on lora_path
srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream | kind
        async generator | calls self.tokenizer_manager.generate_request | hands on raw_request
srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_stream_content(self * content index
        request choice_logprobs) | kind async generator
srt.entrypoints.openai.serving_responses.OpenAIServingResponses._generate_with_builtin_tools | kind
        async generator | calls self.tokenizer_manager.generate_request | hands on raw_request
srt.managers.detokenizer_manager.DecodeStatus: sent_offset
srt.managers.detokenizer_manager.DetokenizerManager: tokenizer vocab_size decode_status
        disable_tokenizer_batch_decode is_tool_call_parser_gpt_oss
    ._decode_batch_token_id_output(self recv_obj) | calls self.trim_matched_stop
srt.entrypoints.http_server
    .available_models() | kind coroutine
    .retrieve_model(model) | kind coroutine
srt.managers.scheduler.Scheduler: waiting_queue
    .pause_generation(self recv_req)
srt.managers.io_struct.UpdateWeightFromDiskReqInput: flush_cache
srt.managers.tp_worker.TpModelWorker: set_hicache_consumer
    .forward_batch_generation(self batch forward_batch * is_verify)
srt.model_executor.model_runner.ModelRunner: forward weight_updater is_draft_worker
srt.speculative.base_spec_worker.BaseSpecWorker: target_worker req_to_token_pool
srt.model_executor.forward_batch_info.ForwardBatch.init_new(batch model_runner *
        return_hidden_states_before_norm)
srt.constrained.xgrammar_backend.XGrammarGrammar: matcher accepted_tokens accept_token rollback
        is_terminated fill_vocab_mask
srt.constrained.reasoner_grammar_backend.ReasonerGrammarObject: grammar _thinking_match_history
srt.managers.schedule_batch.FINISH_ABORT(message status_code err_type)
srt.speculative.spec_info.SpecInput(spec_input_type)
srt.managers.utils.GenerationBatchResult: next_token_ids accept_lens new_seq_lens next_draft_input
        speculative_num_draft_tokens num_correct_drafts num_correct_drafts_per_req_cpu
        can_run_cuda_graph extra_keep_alive_refs
srt.managers.schedule_batch.ReqKvInfo: kv_allocated_len
srt.mem_cache.memory_pool.ReqToTokenPool: req_to_token size write
srt.mem_cache.allocation.alloc_token_slots(tree_cache num_tokens)
srt.mem_cache.base_prefix_cache.BasePrefixCache.evictable_size(self)
srt.mem_cache.allocator.token.TokenToKVPoolAllocator.available_size(self)
srt.distributed.parallel_state.GroupCoordinator
    .broadcast_object(self obj src)
    .all_gather_object(self obj)
srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer(self layer loc_info cache_k cache_v k_scale
        v_scale)
srt.layers.rotary_embedding.factory.get_rope_wrapper | calls get_rope_cpu
srt.mem_cache.memory_pool.MLATokenToKVPool.get_key_buffer(self layer_id)
srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register(backend_name
        handler_func)
srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method(self forward_batch) |
        calls get_attn_backend AttentionBackendRegistry.get_handler handler
srt.layers.attention.base_attn_backend.AttentionBackend: prefill_attention_backend_str
        decode_attention_backend_str
srt.models.llama_eagle3.LlamaForCausalLMEagle3: model hot_token_id load_lm_head_from_target
        load_weights lm_head
srt.models.llama_eagle3.LlamaModel: embed_tokens
    .forward(self input_ids positions forward_batch) | calls layer
srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM: model lm_head hot_token_id
        load_lm_head_from_target load_weights
srt.models.kimi_k25_eagle3.Eagle3MLAModel: embed_tokens midlayer
srt.models.kimi_k25_eagle3.Eagle3MLADecoderLayer: self_attn
srt.models.llama_eagle.LlamaForCausalLMEagle: model lm_head
srt.models.llama_eagle.LlamaModel: embed_tokens fc
srt.models.qwen2_eagle.Qwen2ForCausalLMEagle: model lm_head
srt.models.qwen2_eagle.Qwen2Model: embed_tokens fc
srt.models.deepseek_nextn.DeepseekV3ForCausalLMNextN: model lm_head
srt.models.glm4_moe_nextn.Glm4MoeForCausalLMNextN: model lm_head
srt.models.glm4_moe_lite_nextn.Glm4MoeLiteForCausalLMNextN: model lm_head
srt.models.mimo_mtp.MiMoMTP: model lm_head
srt.models.dflash.DFlashDraftModel: layers
    .forward(self input_ids positions forward_batch * input_embeds)
    .project_target_hidden(self target_hidden)
    .prepare_context_hidden_for_kv(self layer ctx_hidden)
srt.models.dspark.Qwen3DSparkModel: markov_head
srt.models.dspark.VanillaMarkov
    .get_prev_embeddings(self token_ids)
    .project_bias(self latent_states)
srt.models.dspark.GatedMarkovHead: gate_proj
    .compute_gate(self token_ids hidden_states)
srt.models.dspark.RNNHead: joint_proj
    ._rnn_step(self state prev_embeddings hidden_states)
srt.models.dflash.DFlashAttention: attn num_kv_heads head_dim
    .kv_proj_only(self hidden_states)
    .apply_k_norm(self k)
    .apply_k_rope(self positions k)
srt.speculative.dflash_utils.DFlashDraftConfig
    .resolve_target_layer_ids(self * target_num_layers draft_num_layers)
    .resolve_block_size(self * default)
srt.models.llama.LlamaForCausalLM
    .set_eagle3_layers_to_capture(self layer_ids)
    .set_dflash_layers_to_capture(self layer_ids)
    .get_embed_and_head(self)
    .get_input_embeddings(self)
srt.layers.logits_processor.LogitsProcessorOutput: hidden_states
srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator | calls
        current_platform.get_paged_allocator_cls
srt.utils.common.get_compiler_backend | calls current_platform.get_compile_backend
"""

# On the oldest release, whose server arguments are a dataclass that resolves as it is built.
OLDER = """
srt.arg_groups.arg_utils.resolvable_fields(cls)
srt.server_args.ServerArgs: __dataclass_fields__
    .__post_init__ | calls handle_speculative_decoding current_platform.apply_server_args_defaults
    .get_model_config(self)
srt.arg_groups.speculative_hook.handle_speculative_decoding(server_args) | calls
        algo.validate_server_args algo.handle_server_args
srt.managers.schedule_batch.Req: kv? kv_committed_len cache_protected_len req_pool_idx?
srt.session.streaming_session.StreamingSession._free_kv_aligned(self pool_idx target end)
srt.managers.scheduler.Scheduler.maybe_init_draft_worker(self) | passes server_args gpu_id ps
        nccl_port target_worker
srt.managers.tp_worker.TpModelWorker._deserialize_own_rank(self serialized_named_tensors)
srt.runtime_context.ParallelContext: tp_size tp_group
srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager
    .update_weights_from_disk | calls self.draft_worker.update_weights_from_disk
    .update_weights_from_ipc | calls self.draft_worker.update_weights_from_ipc
    .update_weights_from_tensor | calls worker.update_weights_from_tensor
    .update_weights_from_distributed | calls self.tp_worker.update_weights_from_distributed
srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_oot_mha_kv_pool | calls
        current_platform.get_mha_kv_pool_cls
"""

# Since 0.5.22: server arguments are a struct of what was given, resolved beside it; workers ask for
# their place among ranks, and name the runners that new weights concern.
NEWER = """
srt.models.dflash.DFlashDecoderLayer: attention_conv mlp_conv
srt.models.dflash.DFlashGroupedConv: block_size
srt.models.dflash.DFlashDraftModel: prefix_gru embed_proj
srt.models.dflash.DFlash2DraftModel: candidate_selector
    ._transform_unary_logits(self logits)
srt.models.dflash.CandidateSelector: predecessor_codebook successor_codebook hidden_projection top_k
srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus
    .batch_put(self batch_tokens)
    .synchronize(self)
    .reset(self)
    .batch_get(self req_ids batch_tokens total_lens) | calls _get_state_id
    .erase_match_state(self req_ids) | calls erase_states
srt.managers.scheduler.Scheduler
    ._reqs_finishing_inflight(self batch) | calls req.next_output_finishes_by_length
    .maybe_init_draft_worker(self) | passes server_args gpu_id nccl_port target_worker
srt.server_args.ServerArgs: __struct_fields__
    .resolve_once(self) | calls run_resolution_pipeline
srt.entrypoints.engine.Engine: server_args_class
    .__init__ | calls self.server_args_class
srt.arg_groups.speculative_hook.handle_speculative_decoding(server_args) | calls
        record_foreign_defaults | hands on algo.validate_server_args algo.handle_server_args
srt.arg_groups.platform_hook.handle_platform_defaults | calls record_foreign_defaults | hands on
        current_platform.apply_server_args_defaults
srt.arg_groups.model_override_base.model_config_of(server_args)
srt.managers.schedule_batch.ReqKvInfo: req_pool_idx? kv_committed_len cache_protected_len holds_kv
srt.mem_cache.prefill_budget.PrefillBudget: total_offset current_offset
srt.session.streaming_session.StreamingSession._free_kv_aligned(self kv target end)
srt.managers.tp_worker.TpModelWorker.weight_update_runners(self)
srt.arg_groups.fields.parallel.Parallel: tp_size tp_group dp_rank
srt.model_executor.model_runner.ModelRunner: kv_index_translator
    .init_kv_index_translator(self) | passes req_to_token token_to_kv_pool_allocator
        token_to_kv_pool page_size device is_draft_worker
    .init_attention_backends(self) | calls self.kv_index_translator.bind_and_verify_backends
srt.speculative.base_spec_worker.BaseSpecWorker
    .weight_update_runners(self)
    ._build_hicache_draft_plan(self) | calls self._draft_model_runners
srt.mem_cache.unified_radix_cache.UnifiedRadixCache: ongoing_write_through ongoing_load_back
    .check_hicache_events(self)
srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost
    .load_to_device_per_layer | passes src_layers dst_layers src_indices dst_indices page_size
    .backup_from_device_all_layer | passes src_layers dst_layers src_indices dst_indices page_size
srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost
    .load_to_device_per_layer | passes src_layers dst_layers src_indices dst_indices page_size
    .backup_from_device_all_layer | passes src_layers dst_layers src_indices dst_indices page_size
srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager
    ._select_runners(self selector) | calls self.tp_worker.weight_update_runners
        self.draft_worker.weight_update_runners
    .update_weights_from_disk | calls self._select_runners
    .update_weights_from_ipc | calls self._select_runners
    .update_weights_from_tensor | calls self._select_runners
    .update_weights_from_distributed | calls self._select_runners
    .begin_weight_update(self recv_req)
    .end_weight_update(self recv_req)
srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class(self * kind default)
        | calls current_platform.get_kv_pool_cls
"""

# Since 0.5.23: SGLang's own speculative decoding on our platform.
NEWEST = """
srt.managers.detokenizer_manager.DetokenizerManager: tool_close_token_ids
srt.models.qwen3_5_mtp.Qwen3_5ForCausalLMMTP: model lm_head
srt.models.qwen3_5.Qwen3_5ForConditionalGeneration.get_embed_and_head(self)
srt.models.qwen3_5_text.Qwen3_5ForCausalLM.get_embed_and_head(self)
srt.speculative.eagle_utils.eagle_sample | calls _can_use_sparse_uno_tree_target_sampling
        sample_uno_tree_target_tokens verify_tree_greedy_func
srt.speculative.spec_info.SpeculativeAlgorithm.get_platform_worker_cls | calls
        current_platform.get_speculative_worker_cls
kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func | calls platform_fn
srt.arg_groups.speculative_hook._check_oot_speculative_algorithm | calls
        current_platform.supports_speculative_algorithm
srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch(probs top_ks top_ps min_ps
        need_min_p_sampling sampling_seed positions)
"""

FAMILIES = {"OLDER": OLDER, "NEWER": NEWER, "NEWEST": NEWEST}


class Symbol(NamedTuple):
    """An SGLang name that must exist, with the shape that this package counts on."""

    path: str
    parameters: str | None = None  # None: not compared
    attributes: str = ""
    kind: str = ""
    calls: str = ""
    hands_on: str = ""
    passes: str = ""


def symbols(of: frozenset[str]) -> tuple[Symbol, ...]:
    texts = [EVERY, *(text for name, text in FAMILIES.items() if name in of)]
    return tuple(symbol for text in texts for symbol in read(text))


def read(text: str) -> Iterator[Symbol]:
    owner = ""
    for entry in re.sub(r"\n {8}", " ", text).strip().splitlines():
        what, *more = (part.strip() for part in entry.split(" | "))
        found = re.fullmatch(r"([\w.]+)(?:\((.*?)\))?(?:: (.+))?", what)
        assert found is not None, f"no entry: {entry}"
        name, parameters, attributes = found.groups()
        owner = owner if name.startswith(".") else name
        path = "sglang." + (owner + name if name.startswith(".") else name)
        body = {}
        for part in more:
            key = next(k for k in ("kind", "calls", "hands on", "passes") if part.startswith(k))
            body[key.replace(" ", "_")] = part.removeprefix(key).strip()
        yield Symbol(path, parameters, attributes or "", **body)
