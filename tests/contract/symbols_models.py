"""The contract with SGLang, as far as it is about models: their configurations, layers and KV."""

from contract.shape import Symbol

MODELS = (
    Symbol(
        "sglang.srt.configs.model_config.ModelConfig",
        attributes="is_hybrid_swa is_hybrid_swa_compress",
    ),
    Symbol("sglang.srt.model_executor.model_runner.ModelRunner", attributes="is_hybrid_swa"),
    Symbol(
        "sglang.srt.layers.radix_attention.RadixAttention",
        attributes="sliding_window_size logit_cap logit_capping_method use_irope "
        "xai_temperature_len k_scale v_scale k_scale_float v_scale_float is_cross_attention "
        "attn_type",
    ),
    Symbol(
        "sglang.srt.layers.radix_attention.AttentionType",
        attributes="DECODER ENCODER_ONLY",
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        "self layer loc_info cache_k cache_v k_scale v_scale",
    ),
    Symbol(
        "sglang.srt.layers.logits_processor.fused_softcap",
        "full_logits final_logit_softcapping",
    ),
)
