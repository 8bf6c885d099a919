"""Every field of a request, and what it means for an SMC server.

What SMC refuses is written down in sglang_smc/server/refusals.py and malformed.py. A field that
SGLang adds belongs nowhere until someone has looked at it: SMC might accept it and ignore it.
"""

_REQUEST: dict[str, str] = {
    "refused where it is used": """
        max_thinking_tokens image_data video_data audio_data input_embeds
        positional_embed_overrides return_hidden_states return_routed_experts return_indexer_topk
        return_sampling_mask return_entropy watermark kv_hints multi_item_delimiter_indices
        token_indices_to_pool
    """,
    "in SMC": """
        text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num
        token_ids_logprob custom_logit_processor session_params lora_path
    """,
    # SGLang's own code around the worker, which knows nothing of particles.
    "around the worker": """
        rid session_id stream log_metrics return_text_in_logprobs return_flat_raw_top_logprobs
        return_flat_raw_top_logprobs_b64 routing_key routed_dp_rank conversation_id
        http_worker_ipc background require_reasoning priority extra_key no_logs custom_labels
        return_bytes return_prompt_token_ids external_trace_header received_time cache_salt
        data_parallel_rank return_flat_raw_output_top_logprobs
    """,
    "without what is refused": """
        mm_hashes use_audio_in_video modalities routed_experts_start_len lora_id bootstrap_host
        bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank
        need_wait_for_mm_inputs num_items_assigned mm_data_mooncake encoder_urls max_dynamic_patch
        min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config
        mm_content_hashes video_config mm_processor_kwargs sampling_logprobs_mode
    """,
}

_SAMPLING: dict[str, str] = {
    "refused where it is used": "beam_width watermark",
    "in SMC": """
        max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p
        frequency_penalty presence_penalty repetition_penalty min_new_tokens n json_schema regex
        ebnf ebnf_full_assistant structural_tag ignore_eos logit_bias sampling_seed custom_params
    """,
    # Detokenization.
    "around the worker": """
        skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval
    """,
    # SGLang fills them in; refused from a client.
    "internal": """
        stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized
    """,
}

GENERATE_REQUEST = [field for fields in _REQUEST.values() for field in fields.split()]
SAMPLING_PARAMS = [field for fields in _SAMPLING.values() for field in fields.split()]
REFUSED = _REQUEST["refused where it is used"].split()
REFUSED_SAMPLING = _SAMPLING["refused where it is used"].split()

# Which of them only some releases have.
GENERATE_REQUEST_SOME: dict[str, str] = {
    "0.5.17": "mm_data_mooncake",
    "0.5.22 0.5.23": """
        cache_salt data_parallel_rank kv_hints mm_content_hashes return_flat_raw_output_top_logprobs
        sampling_logprobs_mode token_indices_to_pool video_config watermark
    """,
    "0.5.23": "mm_processor_kwargs",
}
SAMPLING_PARAMS_SOME: dict[str, str] = {"0.5.22 0.5.23": "beam_width ebnf_full_assistant watermark"}
