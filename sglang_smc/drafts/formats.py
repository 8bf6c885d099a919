"""Translate the configuration of a published draft to the keys that SGLang's classes read.

Three formats are in use:

- SGLang's and SpecForge's, with these keys. SpecForge has those of a DSpark block in its
  `dflash_config`, and other names of classes, as have AngelSlim and vLLM.
- That of EAGLE's authors: the same, but it names `LlamaForCausalLM`.
- That of `speculators`, which vLLM reads: the head's layers are a configuration of their own in
  `transformer_layer_config`, and layers of the target are counted as Hugging Face counts hidden
  states: 0 is the embedding, so that an id is SGLang's plus one (speculators 0.9.0, models/*/).

Nothing here reads a file; `checkpoint` and `models.draft_config` do.
"""

from collections.abc import Collection, Mapping
from typing import Any

Config = Mapping[str, Any]

SPECULATORS = "speculators_model_type"
"""The key by which a `speculators` checkpoint is recognised; it stays in what is made of one."""

LAYER_CONFIG = "transformer_layer_config"
EAGLE3 = "LlamaForCausalLMEagle3"
DFLASH = "DFlashDraftModel"
DSPARK = "Qwen3DSparkModel"
BLOCKS = (DFLASH, "MuseGlimmerAssistantModel")
DFLASH2 = "DFlash2DraftModel"
DFLASH2S = (DFLASH2, "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
LILICORR = "LiLiCorrDraftModel"
DSPARKS = ("DSparkDraftModel", DSPARK, "LingDSparkModel", "Lfm2DSparkDraftModel")
"""SGLang's classes of block heads: plain, with a selector of candidates, with a lattice of them,
and with a Markov head.

But for one of each they are aliases.
"""

ALL_BLOCKS = (*BLOCKS, *DFLASH2S, LILICORR, *DSPARKS)
CLASSES = {"eagle3": EAGLE3, "dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}
"""SGLang's class of each `speculators` type that it has one for."""

DOMINO = "domino"
"""The `projector_type` by which a DFlash head is a Domino head."""

P_EAGLE = "a P-EAGLE head, which drafts several tokens a pass from masks"
OTHER_TYPES = {
    "eagle": "an EAGLE 1 or 2 head in the format of speculators, which is not translated",
    "peagle": P_EAGLE,
    "xpress": "an XPress head, of a kind that is not supported",
    "mtp": "an MTP layer in the format of speculators, which SGLang has no class for",
}
"""What heads of the other `speculators` types are, which are refused."""

_VLLM_EAGLE3 = tuple(f"Eagle3{of}ForCausalLM" for of in ("Llama", "Qwen2_5vl", "Qwen3vl"))
_DOMINO_CLASS = "DominoDraftModel"
_ALIASES = {**dict.fromkeys(_VLLM_EAGLE3, EAGLE3), _DOMINO_CLASS: DFLASH}
"""SGLang's classes by the names that AngelSlim and vLLM, and SpecForge, have for them."""

EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"
BLOCK_LAYERS = "target_layer_ids"
"""The layers of the target that a head reads, in its `eagle_config` or `dflash_config`."""

QK_NORM = "use_qk_norm"
"""Whether an EAGLE-3 head normalizes queries and keys, as a layer of Qwen3 does."""

OWN_LM_HEAD = "has_own_lm_head"
"""Whether a block head's checkpoint has an LM head, in place of the target's."""

UNKNOWN = "unknown_settings"
"""Settings of a `speculators` checkpoint that have a value, and a meaning unknown here."""

SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Sizes of a DFlash2 block, in its `dflash_config`."""

LATTICE = "lilicorr_"
"""What the settings of a LiLiCorr head's lattice begin with, in its `dflash_config`."""

EAGLE3_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings of an EAGLE-3 head that add or move a norm."""

_BLOCK = "dflash_config"
_MARKOV = "dspark_config"
_SECTIONS = (LAYER_CONFIG, "speculators_config", "eagle_config", _BLOCK, _MARKOV)
# Of a block's section, what SGLang's classes read outside of it, by its name there.
_RAISED = {
    **{name: name for name in ("sample_from_anchor", "markov_rank", "markov_head_type")},
    **{name: name for name in ("enable_confidence_head", "confidence_head_with_markov")},
    "causal": "is_causal",  # vLLM's
}
_SPECULATORS_LAYERS = "aux_hidden_state_layer_ids"
_SIZES = ("block_size", "markov_rank", "draft_vocab_size", "mask_token_id")
_COMMON = ("dtype", "torch_dtype", "quantization_config", "target_hidden_size", "draft_vocab_size")
_OWN = {
    "eagle3": EAGLE3_SWITCHES,
    "dflash": ("block_size", "sample_from_anchor"),
    "dflash2": ("block_size", "sample_from_anchor"),
    "dspark": (
        *("block_size", "sample_from_anchor", "markov_rank", "markov_head_type"),
        *("enable_confidence_head", "confidence_head_with_markov"),
    ),
}
# Keys that are read under another name.
_TRANSLATED = {
    *("speculators_config", "mask_token_id", "sliding_window_non_causal", EAGLE3_LAYERS),
    *(_SPECULATORS_LAYERS, SPECULATORS, LAYER_CONFIG),
}
# Keys that describe, or are transformers' own.
_DESCRIBES = {
    *("architectures", "auto_map", "tie_word_embeddings", "speculators_version", "_name_or_path"),
    *("transformers_version", "id2label", "label2id", "return_dict", "model_type"),
    "chunk_size_feed_forward",
}
# Keys that concern training alone: whether embeddings learn, and positions of a text that drafts
# begin at (speculators 0.5 and 0.6).
_TRAINING = {"embed_requires_grad", "max_anchors"}


def architecture(config: Config) -> str:
    """Return the class that a configuration names; an empty text if it names none."""
    return (config.get("architectures") or [""])[0]


def block_options(config: Config) -> dict[str, Any]:
    """Return a block head's settings with those of its sections among them."""
    return {**config, **(config.get(_BLOCK) or {}), **(config.get(_MARKOV) or {})}


def known_fields(kind: str) -> set[str]:
    """Return the keys of a `speculators` configuration that are read, or have no meaning here.

    Args:
        kind: its type, one of `CLASSES`.
    """
    return {*_COMMON, *_OWN[kind], *_nested(kind), *_TRANSLATED, *_DESCRIBES, *_TRAINING}


def is_head(config: Config) -> bool:
    """Return whether a configuration's meaning may depend on which tensors are saved beside it."""
    kinds = (EAGLE3, *ALL_BLOCKS)
    return SPECULATORS in config or architecture(_named(config)) in kinds


def normalized(config: Config, tensors: Collection[str] | None = None) -> dict[str, Any]:
    """Return a draft's configuration with the keys of SGLang's classes; any other as it is.

    Applied to its result it changes nothing.

    Args:
        tensors: names in the checkpoint; None if they are not known.

    Raises ValueError for a section that is no object, for layers and sizes that are no whole
    numbers, for a setting with two values, and for a `speculators` layer that transformers cannot
    read.
    """
    _check(config)
    told = _flattened(config) if SPECULATORS in config else _named(config)
    if tensors is None:
        return told
    names = {name.removeprefix("model.") for name in tensors}
    if architecture(told) == EAGLE3:
        return told | _saved(told, names)
    if architecture(told) in ALL_BLOCKS and "lm_head.weight" in names:
        told[OWN_LM_HEAD] = True
    return told


def num_tokens(config: Config) -> int | None:
    """Return the draft tokens a round (K) that a `speculators` checkpoint proposes, if it does."""
    told = config.get("speculators_config") or {}
    methods = {one.get("proposal_type"): one for one in told.get("proposal_methods") or ()}
    return methods.get(told.get("default_proposal_method"), {}).get("speculative_tokens")


def target_name(config: Config) -> str | None:
    """Return the model that a `speculators` checkpoint says it was made for."""
    told = config.get("speculators_config") or {}
    return (told.get("verifier") or {}).get("name_or_path")


def _check(config: Config) -> None:
    """Raise ValueError for what is not of the kind that the code below reads."""
    sections = {name: config.get(name) for name in _SECTIONS}
    if wrong := [name for name, one in sections.items() if not isinstance(one, dict | None)]:
        raise ValueError(f"{', '.join(wrong)} of the configuration is no JSON object.")
    for place in (config, *filter(None, sections.values())):
        for name in (EAGLE3_LAYERS, BLOCK_LAYERS, _SPECULATORS_LAYERS):
            layers = place.get(name)
            if layers is not None and not _are_numbers(layers):
                raise ValueError(f"{name} of the configuration is {layers!r}, no list of layers.")
        for name in _SIZES:
            size = place.get(name)
            if not isinstance(size, int | None):
                raise ValueError(f"{name} of the configuration is {size!r}, no whole number.")
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(one, dict) for one in methods):
        raise ValueError(
            f"proposal_methods of the configuration is {methods!r}, no list of objects."
        )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)


def _named(config: Config) -> dict[str, Any]:
    """Name SGLang's class of a head, and put a block's settings where that class reads them.

    A `LlamaForCausalLM` with a draft vocabulary is an EAGLE-3 head: no language model has one.
    """
    told = dict(config)
    name = architecture(told)
    if name == "LlamaForCausalLM" and told.get("draft_vocab_size"):
        told["architectures"] = [EAGLE3]
    if name in _ALIASES:
        told["architectures"] = [_ALIASES[name]]
    if name == _DOMINO_CLASS:
        told[_BLOCK] = {"projector_type": DOMINO, **(told.get(_BLOCK) or {})}
    return _raised(told) if architecture(told) in ALL_BLOCKS else told


def _raised(config: Config) -> dict[str, Any]:
    """Return a block's configuration with one section, and `_RAISED` outside of it."""
    sections = [config[name] for name in (_BLOCK, _MARKOV) if config.get(name)]
    if not sections:
        return dict(config)
    block = _joined(*sections) if len(sections) > 1 else dict(*sections)
    outside = {new: block[name] for name, new in _RAISED.items() if name in block}
    told = _joined(config, outside) | {_BLOCK: block}
    told.pop(_MARKOV, None)
    return told


def _joined(first: Config, second: Config) -> dict[str, Any]:
    """Return the settings of both; raise ValueError for one that has two values."""
    given = {name: value for name, value in second.items() if value is not None}
    for name in sorted(given):
        if first.get(name) not in (None, given[name]):
            raise ValueError(
                f"{name} of the configuration is {first[name]!r} in one section and "
                f"{given[name]!r} in another. Write the value that the head was trained with in "
                "both."
            )
    return {**first, **given}


def _saved(config: Config, tensors: Collection[str]) -> dict[str, Any]:
    """Return settings of an EAGLE-3 head that follow from what is saved.

    `tie_word_embeddings` is often copied from the target's configuration. An LM head that is saved
    is the head's own. Where none is, and the vocabulary is whole, it is the target's, which
    SGLang's class takes if `draft_vocab_size` is None.
    """
    found: dict[str, Any] = {}
    if any(name.endswith("self_attn.q_norm.weight") for name in tensors):
        found[QK_NORM] = True
    has_head = any(name.startswith("lm_head.") for name in tensors)
    is_tied = config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors
    if has_head:
        found["tie_word_embeddings"] = False
    elif not is_tied and config.get("draft_vocab_size") == config.get("vocab_size"):
        found |= {"tie_word_embeddings": False, "draft_vocab_size": None}
    return found


def _flattened(config: Config) -> dict[str, Any]:
    """Return a `speculators` configuration with SGLang's keys; see the module."""
    if LAYER_CONFIG not in config:  # it is one already, or there is nothing to read
        return dict(config)
    kind = config[SPECULATORS]
    told = _layer(config[LAYER_CONFIG] or {})
    told |= {name: config[name] for name in _COMMON if config.get(name) is not None}
    told |= {name: config[name] for name in (SPECULATORS, "speculators_config") if name in config}
    told |= {"architectures": [CLASSES.get(kind, architecture(config))]}
    told |= {"tie_word_embeddings": False}
    own = _OWN.get(kind)
    if own is None:  # refused by its type
        return told
    told |= {name: config[name] for name in own if config.get(name) is not None}
    told |= _of_eagle3(config, told) if kind == "eagle3" else _of_blocks(config, told)
    known = known_fields(kind)
    if unknown := sorted(name for name in config if name not in known and config[name]):
        told[UNKNOWN] = unknown
    return told


def _layer(told: Config) -> dict[str, Any]:
    """Return all settings of a head's layers, with the defaults that were left out as it was saved.

    `speculators` reads a layer that names no model as Qwen3's.
    """
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(**{"model_type": "qwen3", **told}).to_dict()
    except Exception as error:  # of transformers, whatever its checks of a model type raise
        raise ValueError(f"{LAYER_CONFIG} of the configuration cannot be read: {error}") from error
    return {name: value for name, value in whole.items() if value is not None}


def _nested(kind: str) -> tuple[str, ...]:
    """Return the settings of a block head that SGLang has in its `dflash_config`."""
    return SELECTOR if kind == "dflash2" else ()


def _of_eagle3(config: Config, told: Config) -> dict[str, Any]:
    """Return the settings of an EAGLE-3 head that have other names in SGLang's.

    Without layers of the target, both take the same three.
    """
    found: dict[str, Any] = {QK_NORM: True} if told["model_type"] == "qwen3" else {}
    if (layers := config.get(EAGLE3_LAYERS)) is not None:
        found["eagle_config"] = {EAGLE3_LAYERS: [layer - 1 for layer in layers]}
    return found


def _of_blocks(config: Config, told: Config) -> dict[str, Any]:
    """Return the settings of a block head that have other names in SGLang's."""
    # Files of before the key existed draft from the masks alone, DSpark's too (speculators#760).
    found: dict[str, Any] = {"sample_from_anchor": bool(config.get("sample_from_anchor"))}
    block = {name: config[name] for name in _nested(config[SPECULATORS]) if name in config}
    if (layers := config.get(_SPECULATORS_LAYERS)) is not None:
        block[BLOCK_LAYERS] = [layer - 1 for layer in layers]
    if config.get("mask_token_id") is not None:
        block["mask_token_id"] = config["mask_token_id"]
    found[_BLOCK] = block
    # A window of W begins W before the last token there; in SGLang's classes W - 1 before a row.
    sees_block = config.get("sliding_window_non_causal", config[SPECULATORS] == "dflash2")
    if sees_block and "sliding_attention" in told.get("layer_types", ()):
        found["is_causal"] = False
    return found
