"""Classify a draft's checkpoint: a language model, or a head that SGLang has a class for."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from sglang.srt.configs.model_config import ModelConfig

Kind = Literal["model", "eagle", "eagle3", "dflash", "mtp"]

EAGLE = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle")
EAGLE3 = "LlamaForCausalLMEagle3"
DFLASH = "DFlashDraftModel"
LATENT_EAGLE3 = "Eagle3DeepseekV2ForCausalLM"
DSPARK = ("DSparkDraftModel", "Qwen3DSparkModel")
MTP = {
    "DeepseekV3ForCausalLM": "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteForCausalLMNextN",
    "MiMoForCausalLM": "MiMoMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
}
"""SGLang's classes of MTP layers, by the class of the target whose checkpoint has one."""

HEADS: dict[str, Kind] = {
    **dict.fromkeys(EAGLE, "eagle"),
    **dict.fromkeys((EAGLE3, LATENT_EAGLE3), "eagle3"),
    **dict.fromkeys((DFLASH, *DSPARK), "dflash"),
    **dict.fromkeys(MTP.values(), "mtp"),
}
"""Kinds of heads, by SGLang's class."""

# Unsupported heads, by a part of their architecture's name.
_OTHER_HEADS = {
    "Eagle3": "an EAGLE-3 head of a class that is not supported",
    "Eagle": "an EAGLE head of a class that is not supported",
    "DFlash": "a block head of a kind that walks through candidates",
    "DSpark": "a DSpark head of a class that is not supported",
    "NextN": "an MTP layer of a kind that is not supported",
    "MTP": "an MTP layer of a kind that is not supported",
}
# What SGLang's class of EAGLE-3 heads has no part for, by the setting that says so.
_EAGLE3_EXTRAS = {
    "norm_before_residual": "a norm before the residual",
    "attention_bias": "biases of attention",
    "mlp_bias": "biases of the MLP",
    "bias": "biases",
    "parallel_drafting": "masks, for several tokens a pass",
    "parallel_draft_step": "further heads, for several tokens a pass",
    "next_layer_regular": "ordinary later layers",
    "layer_types": "windows",
    "norm_before_fc": "a norm of all states before fc",
}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NUM_DEFAULT_LAYERS = 3
_DFLASH_EXTRAS = {
    "projector_type": "a projector (Domino)",
    "selector_rank": "a selector of candidates",
    "conv_kernel_size": "convolutions over the block",
    "output_multiplier": "a multiplier of its output",
    "final_logit_softcapping": "a cap of its own on logits",
    "attention_sink_bias": "attention sinks",
}


def kind_of(config: ModelConfig) -> Kind:
    return HEADS.get(_named(config.hf_config), "model")


def has_mtp(path: str, revision: str | None, trust_remote_code: bool) -> bool:
    """Return whether a checkpoint is of a target with an MTP layer."""
    config = _config_at(path, revision, trust_remote_code)
    return _named(config) in MTP and 1 in _num_mtp(config)


def _num_mtp(config: Any) -> tuple[int | None, ...]:
    """Return the number of MTP layers by each key that a configuration may give it under."""
    told = config.to_dict() | config.get_text_config().to_dict()
    return told.get("num_nextn_predict_layers"), told.get("mtp_num_hidden_layers")


def take_mtp(config: ModelConfig) -> None:
    """Make a target's configuration that of its MTP layer, as SGLang does for drafts."""
    config.hf_config.architectures = [MTP[_named(config.hf_config)]]


def reads_states(server_args: Any) -> bool:
    """Return whether the draft of these arguments is a head over the target's hidden states."""
    path = server_args.speculative_draft_model_path
    of_target = server_args.model_path
    if path is None:
        return False
    revision = server_args.speculative_draft_model_revision
    trusts = server_args.trust_remote_code
    is_head = _named(_config_at(path, revision, trusts)) in HEADS
    return is_head or (path == of_target and has_mtp(path, revision, trusts))


def knows_all(path: str, revision: str | None, trust_remote_code: bool) -> bool:
    """Return whether a draft can propose every token: an EAGLE-3 head may lack rare ones."""
    config = _config_at(path, revision, trust_remote_code)
    if HEADS.get(_named(config)) != "eagle3":
        return True
    return (getattr(config, "draft_vocab_size", None) or config.vocab_size) >= config.vocab_size


@cache
def _config_at(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(path, trust_remote_code=trust_remote_code, revision=revision)


def _named(config: Any) -> str:
    """Return the architecture of a Hugging Face configuration."""
    return (config.architectures or [""])[0]


def mask_token(config: ModelConfig) -> int:
    return _dflash(config).mask_token_id


def is_dspark(config: ModelConfig) -> bool:
    """Return whether a block head has a Markov head (DSpark)."""
    return _named(config.hf_config) in DSPARK


def drafts_from_anchor(config: ModelConfig) -> bool:
    """Return whether a block's first row, that of the last token, drafts, as most of DSpark do."""
    return is_dspark(config) and config.hf_config.to_dict().get("sample_from_anchor", True)


def captured_layers(config: ModelConfig, num_layers: int) -> list[int] | None:
    """Return which of the target's layers give a head its hidden states; None: SGLang's default.

    They are counted as by SGLang.
    """
    if kind_of(config) == "dflash":
        parsed = _dflash(config)
        return parsed.resolve_target_layer_ids(
            target_num_layers=num_layers, draft_num_layers=config.num_hidden_layers
        )
    return _eagle(config).get(_LAYER_IDS)


def num_states(config: ModelConfig) -> int:
    """Return of how many of the target's layers an EAGLE head or MTP layer reads states."""
    if kind_of(config) != "eagle3":
        return 1
    return len(captured_layers(config, 0) or ()) or _NUM_DEFAULT_LAYERS


def head_problems(config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
    """Yield what in a draft's checkpoint does not fit a server, as phrases that follow its path."""
    name = _named(config.hf_config)
    kind = kind_of(config)
    if kind == "model":
        other = next((what for part, what in _OTHER_HEADS.items() if part in name), None)
        if other is not None:
            yield f"is {other} ({name})"
        elif "draft_vocab_size" in config.hf_config.to_dict():
            yield f"is an EAGLE-3 head that names {name} in its config.json: write {EAGLE3} there"
        return
    if kind == "eagle3":
        yield from _eagle3_problems(config, target)
    elif name == EAGLE[0] and config.hf_config.to_dict().get("bias"):
        yield "has bias in its config.json, of which SGLang makes biases of attention: remove it"
    elif kind == "eagle" and _is_tied(config) and not _is_tied(target):
        yield "ties its LM head to its embedding (tie_word_embeddings), and the target has two"
    elif kind == "mtp" and 1 not in (counts := _num_mtp(config.hf_config)):
        count = next((count for count in counts if count is not None), "no number of")
        yield f"has {count} MTP layers (num_nextn_predict_layers), and one alone drafts"
    elif kind == "dflash":
        yield from _block_problems(config, target, num_steps)
    yield from _width_problems(config, target)
    yield from _layer_problems(config, target)


def _eagle3_problems(config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    told = config.hf_config.to_dict() | _eagle(config)
    extras = {name: told.get(name) for name in _EAGLE3_EXTRAS}
    extras["parallel_draft_step"] = (told.get("parallel_draft_step") or 1) > 1
    extras["next_layer_regular"] = extras["next_layer_regular"] and config.num_hidden_layers > 1
    extras["layer_types"] = "sliding_attention" in (told.get("layer_types") or ())
    latent = _named(config.hf_config) == LATENT_EAGLE3
    extras["norm_before_fc"] = latent and told.get("norm_before_fc")
    for name in (name for name, value in extras.items() if value):
        yield f"is an EAGLE-3 head with {_EAGLE3_EXTRAS[name]} ({name})"
    reads = num_states(config)
    width = config.hidden_size
    if told.get("use_aux_hidden_state") is False:
        yield "is an EAGLE-3 head that reads the last layer alone (use_aux_hidden_state is False)"
    elif _LAYER_IDS in told and _LAYER_IDS not in _eagle(config):
        yield f"has {_LAYER_IDS} outside of eagle_config, where SGLang does not look for it"
    elif told.get("num_aux_hidden_states") not in (None, reads):
        count = told["num_aux_hidden_states"]
        yield f"has num_aux_hidden_states {count} and reads the states of {reads} layers"
    elif reads * target.hidden_size == width:
        yield f"reads states of its own width, {width}, to which SGLang's class applies no fc"
    if "draft_vocab_size" not in told and not latent:
        yield "has no draft_vocab_size in its config.json, which SGLang's class asks for"
    elif told.get("draft_vocab_size") is None and width != target.hidden_size:
        yield f"has width {width} without an LM head, and the target's has {target.hidden_size}"


def _block_problems(config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
    parsed = _dflash(config)
    whole = config.hf_config.to_dict()
    given = whole.get("dflash_config") or {}  # the oldest release does not parse extras
    extras = {name: given.get(name) or getattr(parsed, name, None) for name in _DFLASH_EXTRAS}
    extras["output_multiplier"] = extras["output_multiplier"] not in (None, 1.0)
    if is_dspark(config):
        extras["projector_type"] = extras["projector_type"] not in (None, "dspark")
        markov = whole.get("markov_head_type", "vanilla")
        if markov != "vanilla":
            yield f"has a Markov head of type {markov!r}, and 'vanilla' alone is supported"
    for name in (name for name, value in extras.items() if value):
        yield f"is a block head with {_DFLASH_EXTRAS[name]} ({name})"
    if parsed.mask_token_id is None:
        yield "has no mask_token_id in dflash_config"
    elif parsed.mask_token_id >= target.vocab_size:
        yield (
            f"has mask_token_id {parsed.mask_token_id}, and the target has an embedding for ids "
            f"below {target.vocab_size}"
        )
    most = parsed.resolve_block_size(default=16) - (not is_dspark(config))
    if num_steps > most:
        yield (
            f"drafts blocks of {most} tokens, and --speculative-num-steps is {num_steps}: pass "
            f"--speculative-num-steps {most} or less"
        )


def _width_problems(config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    """Yield mismatches of width: heads take hidden states, and mostly embeddings, of the target."""
    own = config.hf_config
    reads = own.to_dict().get("target_hidden_size") or config.hidden_size
    if reads != target.hidden_size:
        yield f"reads states of width {reads}, and the target's have {target.hidden_size}"
    has_all = kind_of(config) != "dflash" or is_dspark(config)
    if has_all and config.vocab_size != target.vocab_size:
        yield f"has vocab_size {config.vocab_size}, and the target {target.vocab_size}"


def _is_tied(config: ModelConfig) -> bool:
    return bool(config.hf_config.get_text_config().to_dict().get("tie_word_embeddings"))


def _layer_problems(config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    if kind_of(config) in ("eagle", "mtp"):  # they read the last layer's output
        return
    last = target.num_hidden_layers - 2  # the last layer's output is not captured
    try:
        layers = captured_layers(config, target.num_hidden_layers)
    except ValueError as error:
        yield f"cannot read the target's states: {error}"
        return
    boundaries = "GptOssForCausalLM" in (target.hf_config.architectures or ())
    if boundaries and max(layers or [0]) == target.num_hidden_layers:  # counted as layers' inputs
        return
    wrong = [layer for layer in layers or () if not 0 <= layer <= last]
    if wrong:
        yield f"reads what layers {wrong} of the target pass on; it gives out those of 0 to {last}"


def _eagle(config: ModelConfig) -> dict[str, Any]:
    return config.hf_config.to_dict().get("eagle_config") or {}


def _dflash(config: ModelConfig) -> Any:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    return parse_dflash_draft_config(draft_hf_config=config.hf_config)
