"""Classify a draft's checkpoint: a language model, or a head that SGLang has a class for."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_smc.drafts import checkpoint, formats, weights
from sglang_smc.drafts.weights import is_reduced
from sglang_smc.models import draft_config

Kind = Literal["model", "eagle", "eagle3", "dflash", "mtp"]

EAGLE = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle")
EAGLE3 = formats.EAGLE3
DFLASH = formats.DFLASH
LATENT_EAGLE3 = "Eagle3DeepseekV2ForCausalLM"
DSPARK = formats.DSPARKS
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
    **dict.fromkeys((*formats.BLOCKS, *DSPARK), "dflash"),
    **dict.fromkeys(MTP.values(), "mtp"),
}
"""Kinds of heads, by SGLang's class."""

# Unsupported heads, by a part of their architecture's name; the first that is found counts.
_OTHER_HEADS = {
    "Gemma4Assistant": "a Gemma 4 assistant, which attends to the target's own KV",
    "Gemma4UnifiedAssistant": "a Gemma 4 assistant, which attends to the target's own KV",
    "LiLiCorr": "a LiLiCorr head, which walks through a lattice of candidates",
    "PEagle": "a P-EAGLE head, which drafts several tokens a pass from masks",
    "XPress": "an XPress head, of a kind that is not supported",
    "Eagle3": "an EAGLE-3 head of a class that is not supported",
    "Eagle": "an EAGLE head of a class that is not supported",
    "DFlash2": "a DFlash2 head, which walks through candidates",
    "DFlash": "a DFlash head of a class that is not supported",
    "DSpark": "a DSpark head of a class that is not supported",
    "NextN": "an MTP layer of a kind that is not supported",
    "MTP": "an MTP layer of a kind that is not supported",
}
# Unsupported heads by the type that `speculators` gives them.
_OTHER_TYPES = {
    "peagle": _OTHER_HEADS["PEagle"],
    "dflash2": _OTHER_HEADS["DFlash2"],
    "xpress": _OTHER_HEADS["XPress"],
    "mtp": "an MTP layer in the format of speculators, which SGLang has no class for",
}
# What SGLang's class of EAGLE-3 heads has no part for, by the setting that says so.
_EAGLE3_EXTRAS = {
    "attention_bias": "biases of attention",
    "mlp_bias": "biases of the MLP",
    "bias": "biases",
    "parallel_drafting": "masks, for several tokens a pass",
    "parallel_draft_step": "further heads, for several tokens a pass",
    "next_layer_regular": "ordinary later layers",
    "layer_types": "windows",
    "norm_before_fc": "a norm of all states before fc",
    "norm_before_residual": "a norm before the residual",
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
    "is_causal": "windows that see the block in both directions",
}


def kind_of(config: ModelConfig) -> Kind:
    return HEADS.get(_named(config.hf_config), "model")


class Place(NamedTuple):
    """Where a checkpoint's configuration is read, by a server's resolved arguments."""

    path: str
    revision: str | None
    trusts: bool  # code of the checkpoint
    file: str | None  # in place of config.json

    @classmethod
    def of_draft(cls, view: Any) -> "Place":
        path, revision = view.speculative_draft_model_path, view.speculative_draft_model_revision
        file = (view.decrypted_draft_config_file or "").strip()
        return cls(path, revision, view.trust_remote_code, file or None)

    @classmethod
    def of_target(cls, view: Any) -> "Place":
        file = (view.decrypted_config_file or "").strip()
        return cls(view.model_path, view.revision, view.trust_remote_code, file or None)


def has_mtp(place: Place) -> bool:
    """Return whether a checkpoint is of a target with an MTP layer."""
    config = _config_at(place)
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
    if server_args.speculative_draft_model_path is None:
        return False
    place = Place.of_draft(server_args)
    is_head = _named(_config_at(place)) in HEADS
    return is_head or (place.path == server_args.model_path and has_mtp(place))


def proposed_tokens(server_args: Any) -> int | None:
    """Return the K that a draft's checkpoint proposes, if it does; see `formats.num_tokens`."""
    if server_args.speculative_draft_model_path is None:
        return None
    return formats.num_tokens(_config_at(Place.of_draft(server_args)).to_dict())


def knows_all(server_args: Any) -> bool:
    """Return whether a draft can propose every token: a head may lack rare ones."""
    config = _config_at(Place.of_draft(server_args))
    return HEADS.get(_named(config)) not in ("eagle3", "dflash") or not is_reduced(config.to_dict())


@cache
def _config_at(place: Place) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    other = {"_configuration_file": place.file} if place.file else {}
    return draft_config.read(get_config, place.path, place.trusts, place.revision, **other)


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
    return bool(config.hf_config.to_dict().get("sample_from_anchor", is_dspark(config)))


def has_own_lm_head(config: ModelConfig) -> bool:
    """Return whether a block head has an LM head of its own; others read by the target's."""
    return bool(config.hf_config.to_dict().get(formats.OWN_LM_HEAD))


def drafts_part(config: ModelConfig) -> bool:
    """Return whether a block head drafts some of the target's tokens alone."""
    return is_reduced(config.hf_config.to_dict())


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
    told = config.hf_config.to_dict()
    if (type_of := told.get(formats.SPECULATORS)) and type_of not in formats.CLASSES:
        what = _OTHER_TYPES.get(type_of, "a head of an unknown type")
        yield f"is {what} ({formats.SPECULATORS} is {type_of!r})"
        return
    if kind == "model":
        other = next((what for part, what in _OTHER_HEADS.items() if part in name), None)
        if other is not None:
            yield f"is {other} ({name})"
        elif "draft_vocab_size" in told:
            yield f"is an EAGLE-3 head that names {name} in its config.json: write {EAGLE3} there"
        return
    if unknown := told.get(formats.UNKNOWN):
        yield f"sets {', '.join(unknown)} in its config.json, which nothing here reads"
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
    if misfits := [*_width_problems(config, target), *_layer_problems(config, target)]:
        yield from misfits
        return
    yield from _tensor_problems(config, target)


def _tensor_problems(config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    """Yield what of a checkpoint would not be computed with, by its files."""
    try:
        folder = checkpoint.folder_of(config.model_path, config.revision)
        shapes = checkpoint.shapes_in(folder)
    except (OSError, ValueError):  # told as the weights are loaded
        return
    if not shapes:
        return
    told = config.hf_config.to_dict()
    yield from weights.problems(told, shapes, partial(checkpoint.tensor_in, folder))
    name = next((name for name in shapes if name.endswith("embed_tokens.weight")), None)
    if kind_of(config) == "dflash" and name and not _is_targets(folder, name, target):
        yield f"has {name} of its own, which is not the target's; block heads embed by the target's"


def _is_targets(folder: Path, name: str, target: ModelConfig) -> bool:
    """Return whether a draft's embedding equals the target's, by their files."""
    of_target = checkpoint.folder_of(target.model_path, target.revision)
    names = (one for one in checkpoint.shapes_in(of_target) if one.endswith("embed_tokens.weight"))
    tables = checkpoint.tensor_in(folder, name), checkpoint.tensor_in(of_target, next(names, ""))
    own, known = tables
    return own is not None and known is not None and torch.equal(own, known.to(own.dtype))


def _eagle3_problems(config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    told = config.hf_config.to_dict() | _eagle(config)
    extras = {name: told.get(name) for name in _EAGLE3_EXTRAS}
    extras["parallel_draft_step"] = (told.get("parallel_draft_step") or 1) > 1
    extras["next_layer_regular"] = extras["next_layer_regular"] and config.num_hidden_layers > 1
    extras["layer_types"] = "sliding_attention" in (told.get("layer_types") or ())
    latent = _named(config.hf_config) == LATENT_EAGLE3
    extras["norm_before_fc"] = latent and told.get("norm_before_fc")
    extras["norm_before_residual"] = latent and told.get("norm_before_residual")
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
    extras = {name: given.get(name) or vars(parsed).get(name) for name in _DFLASH_EXTRAS}
    extras["output_multiplier"] = extras["output_multiplier"] not in (None, 1.0)
    if is_dspark(config):
        extras["projector_type"] = extras["projector_type"] not in (None, "dspark")
        markov = whole.get("markov_head_type", "vanilla")
        if markov != "vanilla":
            yield f"has a Markov head of type {markov!r}, and 'vanilla' alone is supported"
    windowed = "sliding_attention" in (whole.get("layer_types") or ())
    extras["is_causal"] = windowed and whole.get("is_causal") is False
    for name in (name for name, value in extras.items() if value):
        yield f"is a block head with {_DFLASH_EXTRAS[name]} ({name})"
    if parsed.mask_token_id is None:
        yield "has no mask_token_id in dflash_config"
    elif parsed.mask_token_id >= target.vocab_size:
        yield (
            f"has mask_token_id {parsed.mask_token_id}, and the target has an embedding for ids "
            f"below {target.vocab_size}"
        )
    most = parsed.resolve_block_size(default=16) - (not drafts_from_anchor(config))
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
    if layers is None:  # SGLang's default for EAGLE-3, as inputs of the layers behind
        count = target.num_hidden_layers
        layers = [1, count // 2 - 1, count - 4]
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        yield (
            f"reads layers {layers} of the target, {twice} more than once; SGLang gives out the "
            "states of different layers"
        )
        return
    boundaries = "GptOssForCausalLM" in (target.hf_config.architectures or ())
    if boundaries and max(layers) == target.num_hidden_layers:  # counted as layers' inputs
        return
    wrong = [layer for layer in layers if not 0 <= layer <= last]
    if wrong:
        yield f"reads what layers {wrong} of the target pass on; it gives out those of 0 to {last}"


def _eagle(config: ModelConfig) -> dict[str, Any]:
    return config.hf_config.to_dict().get("eagle_config") or {}


def _dflash(config: ModelConfig) -> Any:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    return parse_dflash_draft_config(draft_hf_config=config.hf_config)
