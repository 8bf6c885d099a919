"""The contract with SGLang, as far as models of latent attention (MLA) ask for it."""

from contract.shape import Symbol

LATENT = (
    Symbol(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
        "head_size rotary_dim max_position base is_neox_style rope_scaling dtype "
        "partial_rotary_factor device",
    ),
    Symbol(
        "sglang.srt.layers.rotary_embedding.factory.get_rope",
        "head_size rotary_dim max_position base is_neox_style rope_scaling dtype "
        "partial_rotary_factor",
    ),
    Symbol("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", calls="get_rope_cpu"),
    Symbol("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_key_buffer", "self layer_id"),
    # Which way to attend DeepSeek's layers take, by the name that a backend gives itself.
    Symbol(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry"
        ".register",
        "backend_name handler_func",
    ),
    Symbol(
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        "self forward_batch",
        calls="get_attn_backend AttentionBackendRegistry.get_handler handler",
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        attributes="prefill_attention_backend_str decode_attention_backend_str",
    ),
    Symbol("sglang.srt.configs.model_config.is_deepseek_dsa", "config"),
)
