"""Read a published draft's configuration by the keys of SGLang's classes, and check its tensors.

Three formats are in use:

- SGLang's and SpecForge's, with these keys. SpecForge has those of a DSpark block in its
  `dflash_config`, and other names of classes, as have AngelSlim and vLLM.
- That of EAGLE's authors: the same, but it names `LlamaForCausalLM`.
- That of `speculators`, which vLLM reads: the head's layers are a configuration of their own in
  `transformer_layer_config`, and layers of the target are counted as Hugging Face counts hidden
  states: 0 is the embedding, so that an id is SGLang's plus one (speculators 0.9.0, models/*/).

SGLang's classes skip a tensor that they have no place for, and leave a parameter as it was made
where there is no tensor for it: a head that lacks half of its weights loads, and drafts noise.

Nothing here reads a file; `checkpoint` and `models.draft_config` do. `heads` has what one kind
alone has.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads import BY_CLASS, BY_TYPE, HEADS, head_of
from sglang_smc.drafts.heads.base import (
    BLOCK,
    MARKOV,
    Config,
    architecture,
    is_reduced,
    named,
    numbers_of,
)
from sglang_smc.drafts.heads.dflash import BLOCK_LAYERS, SPECULATORS_LAYERS
from sglang_smc.drafts.heads.eagle3 import EAGLE3_LAYERS

Read = Callable[[str], Any]
"""Returns a tensor of the checkpoint by its name, or None."""

SPECULATORS = "speculators_model_type"
"""The key by which a `speculators` checkpoint is recognised; it stays in what is made of one."""

LAYER_CONFIG = "transformer_layer_config"

UNKNOWN = "unknown_settings"
"""Settings of a `speculators` checkpoint that have a value, and a meaning unknown here."""

_SECTIONS = (LAYER_CONFIG, "speculators_config", "eagle_config", BLOCK, MARKOV)
# Of a block's section, what SGLang's classes read outside of it, by its name there.
_RAISED = {
    **{name: name for name in ("sample_from_anchor", "markov_rank", "markov_head_type")},
    **{name: name for name in ("enable_confidence_head", "confidence_head_with_markov")},
    "causal": "is_causal",  # vLLM's
}
_SIZES = ("block_size", "markov_rank", "draft_vocab_size", "mask_token_id")
_COMMON = ("dtype", "torch_dtype", "quantization_config", "target_hidden_size", "draft_vocab_size")
# Keys that are read under another name.
_TRANSLATED = {
    *("speculators_config", "mask_token_id", "sliding_window_non_causal", EAGLE3_LAYERS),
    *(SPECULATORS_LAYERS, SPECULATORS, LAYER_CONFIG),
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

_MOST_NAMED = 5
# Of SGLang's classes: names in older checkpoints, by those that they have.
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_FUSED = {
    "self_attn.qkv_proj.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    "mlp.gate_up_proj.": ("mlp.gate_proj.", "mlp.up_proj."),
}
#: Tensors that a head does not compute with: the mask that goes with `d2t`, buffers, the target's
#: own weights, and what predicts how many drafts are accepted.
LEFT_OUT = ("t2d", "rotary_emb.inv_freq", "verifier_norm.", "verifier_lm_head.", "confidence_head.")


def known_fields(kind: str) -> set[str]:
    """Return the keys of a `speculators` configuration that are read, or have no meaning here.

    Args:
        kind: its type, one of `heads.BY_TYPE`.
    """
    own = BY_TYPE[kind].speculators
    assert own is not None
    return {*_COMMON, *own.keys, *own.nested, *_TRANSLATED, *_DESCRIBES, *_TRAINING}


def is_head(config: Config) -> bool:
    """Return whether a configuration's meaning may depend on which tensors are saved beside it."""
    found = BY_CLASS.get(architecture(_named(config)))
    return SPECULATORS in config or (found is not None and found.saved is not None)


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
    found = BY_CLASS.get(architecture(told))
    if tensors is None or found is None or found.saved is None:
        return told
    return told | found.saved(told, {name.removeprefix("model.") for name in tensors})


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
        for name in (EAGLE3_LAYERS, BLOCK_LAYERS, SPECULATORS_LAYERS):
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
    """Name SGLang's class of a head, and put a block's settings where that class reads them."""
    for head in HEADS:
        if head.renamed is not None:
            config = head.renamed(config)
    return _raised(config) if is_block(config) else dict(config)


def _raised(config: Config) -> dict[str, Any]:
    """Return a block's configuration with one section, and `_RAISED` outside of it."""
    sections = [config[name] for name in (BLOCK, MARKOV) if config.get(name)]
    if not sections:
        return dict(config)
    block = _joined(*sections) if len(sections) > 1 else dict(*sections)
    outside = {new: block[name] for name, new in _RAISED.items() if name in block}
    told = _joined(config, outside) | {BLOCK: block}
    told.pop(MARKOV, None)
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


def _flattened(config: Config) -> dict[str, Any]:
    """Return a `speculators` configuration with SGLang's keys; see the module."""
    if LAYER_CONFIG not in config:  # it is one already, or there is nothing to read
        return dict(config)
    head = BY_TYPE.get(config[SPECULATORS])
    told = _layer(config[LAYER_CONFIG] or {})
    told |= {name: config[name] for name in _COMMON if config.get(name) is not None}
    told |= {name: config[name] for name in (SPECULATORS, "speculators_config") if name in config}
    told |= {"tie_word_embeddings": False}
    if head is None or head.speculators is None:  # refused by its type
        return named(told, architecture(config))
    own = head.speculators
    told = named(told, own.architecture)
    told |= {name: config[name] for name in own.keys if config.get(name) is not None}
    told |= own.translate(config, told)
    known = known_fields(own.type)
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


def proposed_steps(config: Config) -> int | None:
    """Return the K that a draft's configuration sets, if it does.

    A `speculators` checkpoint says it; any other block drafts its columns in one pass.
    """
    if (told := num_tokens(config)) is not None:
        return told
    found = head_of(config)
    if found is None or found.sizes is None:
        return None
    try:
        return found.sizes(config).max_steps
    except ValueError:  # told by the checks of the draft
        return None


def is_block(config: Config) -> bool:
    """Return whether a configuration names a class of block heads."""
    found = BY_CLASS.get(architecture(config))
    return found is not None and found.kind == "dflash"


def expected(config: Config) -> Shapes | None:
    """Return name and shape of each tensor that a head must have; None if they are not listed.

    Raises ValueError for a configuration that lacks a size.
    """
    head = head_of(config)
    if head is None or head.tensors is None:
        return None
    numbers_of(config, "num_hidden_layers", "vocab_size")
    return head.tensors(config)


def problems(config: Config, shapes: Shapes, read: Read) -> Iterator[str]:
    """Yield what of a head's checkpoint would not be computed with, as phrases after its path.

    Nothing is yielded for classes whose tensors are not listed here.

    Args:
        config: with SGLang's keys; see `normalized`.
        shapes: of the tensors in the checkpoint.
        read: reads `d2t`.
    """
    try:
        wanted = expected(config)
    except ValueError as error:
        yield f"cannot be checked: {str(error).rstrip('.')}"
        return
    if wanted is None:
        return
    given = _given(shapes)
    packed = bool(config.get("quantization_config"))
    found = {name: shape for name, shape in given.items() if not _is_left_out(name)}
    every = wanted | _optional(config)
    place: Callable[[str], str] = _module if packed else str
    places = {place(name) for name in every}
    filled = {place(name) for name in found}
    unread = [name for name in found if place(name) not in places]
    missing = [name for name in wanted if place(name) not in filled]
    if unread:
        yield f"has {several(unread, 'tensor')} that {architecture(config)} has no place for"
    if missing:
        yield f"lacks {several(missing, 'tensor')} that {architecture(config)} computes with"
    if not packed:
        yield from misshapen(found, every)
    yield from _vocabulary_problems(config, shapes, read)


def misshapen(found: Shapes, wanted: Shapes) -> Iterator[str]:
    """Yield the tensors that have another shape than wanted; () is any."""
    wrong = [
        f"{name} of {list(shape)} instead of {list(wanted[name])}"
        for name, shape in found.items()
        if wanted.get(name) and shape and shape != wanted[name]
    ]
    if wrong:
        yield f"has {several(wrong, 'tensor')}"


def _given(shapes: Shapes) -> Shapes:
    """Return shapes by SGLang's names; a fused tensor's parts have none, ()."""
    found: Shapes = {}
    for name, shape in shapes.items():
        own = renamed(name)
        found |= dict.fromkeys(parts_of(own), ()) or {own: shape}
    return found


def parts_of(name: str) -> list[str]:
    """Return the names of a fused tensor's parts; none for another tensor."""
    return [name.replace(old, part) for old, new in _FUSED.items() if old in name for part in new]


def renamed(name: str) -> str:
    """Return SGLang's name of a tensor, without `model.`."""
    name = name.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _optional(config: Config) -> Shapes:
    """Return tensors that a head may have; without them the target's are taken, or all tokens."""
    table = (config["vocab_size"], config["hidden_size"])
    found: Shapes = {"embed_tokens.weight": table, "d2t": ()}
    if not is_block(config) and config.get("draft_vocab_size") is None:
        found["lm_head.weight"] = table
    return found


def _vocabulary_problems(config: Config, shapes: Shapes, read: Read) -> Iterator[str]:
    """Yield what is wrong with `d2t`: ids of the target's tokens, less their ids in the draft."""
    vocab_size = config["vocab_size"]
    rows = config.get("draft_vocab_size") or vocab_size
    name = next((name for name in shapes if name.removeprefix("model.") == "d2t"), None)
    if name is None:
        if is_reduced(config):
            yield (
                f"has draft_vocab_size {rows} and no d2t, which says what {rows} of the target's "
                f"{vocab_size} tokens it drafts"
            )
        return
    shifts = read(name).long()  # [rows]
    if list(shifts.shape) != [rows]:
        yield f"has a d2t of {list(shifts.shape)}, and draft_vocab_size is {rows}"
        return
    ids = shifts + shifts.new_tensor(range(rows))
    if _ascends(ids, vocab_size):
        return
    if _ascends(shifts, vocab_size):
        yield (
            "has the target's ids themselves in d2t; allowed: their differences from the draft's "
            "own (d2t - torch.arange(len(d2t)))"
        )
        return
    order = "" if bool((ids.diff() > 0).all()) else ", and do not ascend"
    yield (
        f"has a d2t whose ids run from {int(ids.min())} to {int(ids.max())}{order}; allowed: "
        f"ascending ids of the target's {vocab_size} tokens, less 0, 1, 2, ..."
    )


def _ascends(ids: Any, vocab_size: int) -> bool:
    inside = bool((ids >= 0).all()) and bool((ids < vocab_size).all())
    return inside and bool((ids.diff() > 0).all())


def _is_left_out(name: str) -> bool:
    return any(name.startswith(part) or name.endswith(part) for part in LEFT_OUT)


def _module(name: str) -> str:
    """Return the module of a tensor, which has several where its weight is quantized."""
    return name.rpartition(".")[0] or name


def several(names: list[str], what: str) -> str:
    """Return names after what they are, the first of them."""
    shown = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{'a ' if len(names) == 1 else ''}{what}{'s' * (len(names) > 1)} {shown}{more}"
