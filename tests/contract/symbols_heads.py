"""The contract with SGLang, as far as heads that draft ask for it."""

from contract.shape import Symbol

HEADS = (
    Symbol(
        "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3",
        attributes="model hot_token_id load_lm_head_from_target load_weights set_embed "
        "set_embed_and_head",
    ),
    Symbol("sglang.srt.models.llama_eagle3.LlamaModel", attributes="fc"),
    Symbol(
        "sglang.srt.models.llama_eagle3.LlamaModel.forward",
        "self input_ids positions forward_batch",
    ),
    Symbol("sglang.srt.models.dflash.DFlashDraftModel", attributes="layers"),
    Symbol(
        "sglang.srt.models.dflash.DFlashDraftModel.forward",
        "self input_ids positions forward_batch * input_embeds",
    ),
    Symbol("sglang.srt.models.dflash.DFlashDraftModel.project_target_hidden", "self target_hidden"),
    Symbol(
        "sglang.srt.models.dflash.DFlashDraftModel.prepare_context_hidden_for_kv",
        "self layer ctx_hidden",
    ),
    Symbol("sglang.srt.models.dflash.DFlashAttention.kv_proj_only", "self hidden_states"),
    Symbol("sglang.srt.models.dflash.DFlashAttention.apply_k_norm", "self k"),
    Symbol("sglang.srt.models.dflash.DFlashAttention.apply_k_rope", "self positions k"),
    Symbol(
        "sglang.srt.models.dflash.DFlashAttention",
        attributes="attn num_kv_heads head_dim",
    ),
    Symbol("sglang.srt.speculative.dflash_utils.parse_dflash_draft_config", "* draft_hf_config"),
    Symbol(
        "sglang.srt.speculative.dflash_utils.DFlashDraftConfig.resolve_target_layer_ids",
        "self * target_num_layers draft_num_layers",
    ),
    Symbol(
        "sglang.srt.speculative.dflash_utils.DFlashDraftConfig.resolve_block_size", "self * default"
    ),
    Symbol(
        "sglang.srt.models.llama.LlamaForCausalLM.set_eagle3_layers_to_capture", "self layer_ids"
    ),
    Symbol(
        "sglang.srt.models.llama.LlamaForCausalLM.set_dflash_layers_to_capture", "self layer_ids"
    ),
    Symbol("sglang.srt.models.llama.LlamaForCausalLM.get_embed_and_head", "self"),
    Symbol("sglang.srt.models.llama.LlamaForCausalLM.set_embed_and_head", "self embed head"),
    Symbol("sglang.srt.models.llama.LlamaForCausalLM.set_embed", "self embed"),
    Symbol("sglang.srt.models.llama.LlamaForCausalLM.get_input_embeddings", "self"),
    Symbol("sglang.srt.layers.logits_processor.LogitsProcessorOutput", attributes="hidden_states"),
)
