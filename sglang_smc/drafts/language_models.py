"""Compare the tensors of a language model's checkpoint with those of its class in transformers.

SGLang's loader leaves a parameter as it was made where there is no tensor for it, and skips a
tensor that has no place: a draft model that lacks a layer loads, and drafts noise.

What a class computes with is known from the class itself, built without memory for its weights.
Names and shapes are compared where a checkpoint has them as the class does. Elsewhere, that is for
quantized weights, classes of a checkpoint's own and those that transformers converts as it loads
them (experts, towers of images), the embedding alone is: its name and shape are nobody's choice.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from sglang_smc.drafts import reading
from sglang_smc.drafts.checkpoint import Shapes

_EMBEDDINGS = (
    "embed_tokens.weight",
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
# A parameter of a decoder's layer, with its number: `layers.1.mlp.up_proj.weight`.
_OF_LAYER = re.compile(r"(?:decoder\.)?(?:layers|h|blocks)\.(\d+)\..+\.(weight|bias)$")
# Of attention in older checkpoints: what is computed anew.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")


class Parameters(NamedTuple):
    """Hold what a class computes with, by names without the prefix of its base model."""

    shapes: Shapes
    prefix: str  # that names in a checkpoint may have or lack
    ignored: tuple[str, ...]  # patterns of names that may be there, or may not
    shared: frozenset[str]  # names of parameters that are another's
    num_layers: int
    predicts_ahead: bool  # by more layers, behind these
    has_biases: bool  # by a key that SGLang's class may read, and this one does not


def problems(config: Any, architecture: str, shapes: Shapes, packed: bool) -> Iterator[str]:
    """Yield what of a checkpoint SGLang would not load, or not compute with.

    Args:
        config: of transformers.
        architecture: the class that it names.
        shapes: of the tensors in the checkpoint.
        packed: whether weights are quantized in the checkpoint.
    """
    found = None if packed else _parameters(config, architecture)
    if found is None:
        yield from _embedding_problems(config.get_text_config(), shapes)
        return
    given = _given(found, shapes)
    wanted = _split(found.shapes)
    missing = [name for name in wanted if name not in given and not _is_ignored(found, name)]
    unread = [name for name in given if name not in wanted and _is_lost(found, name)]
    if unread and 2 * len(missing) > len(wanted):  # it has names of its own
        yield from _embedding_problems(config.get_text_config(), shapes)
        return
    if missing:
        yield f"lacks {reading.several(missing, 'tensor')} that {architecture} computes with"
    if unread:
        yield f"has {reading.several(unread, 'tensor')} that {architecture} has no place for"
    yield from reading.misshapen(given, wanted)


def _parameters(config: Any, architecture: str) -> Parameters | None:
    """Return what a class of transformers computes with; None where its checkpoints differ."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(deepcopy(config))
    except Exception:  # of transformers, whatever sizes that do not fit raise; SGLang names them
        return None
    if type(model).__name__ != architecture:
        return None
    if get_model_conversion_mapping(model, add_legacy=False):
        return None
    prefix = f"{model.base_model_prefix}."
    ignored = (model._keys_to_ignore_on_load_unexpected, model._keys_to_ignore_on_load_missing)
    shapes = {
        name.removeprefix(prefix): tuple(one.shape)
        for name, one in model.named_parameters()  # a shared one once
    }
    layers = [int(found[1]) for found in map(_OF_LAYER.match, shapes) if found]
    told = config.to_dict()
    return Parameters(
        shapes=shapes,
        prefix=prefix,
        ignored=tuple(one for patterns in ignored for one in patterns or ()),
        shared=frozenset(name.removeprefix(prefix) for name in model.all_tied_weights_keys),
        num_layers=max(layers, default=-1) + 1,
        predicts_ahead=bool(told.get("num_nextn_predict_layers")),
        has_biases=any(value is True for key, value in told.items() if "bias" in key),
    )


def _given(found: Parameters, shapes: Shapes) -> Shapes:
    """Return a checkpoint's tensors by the names that `Parameters` has."""
    return _split({name.removeprefix(found.prefix): shape for name, shape in shapes.items()})


def _split(shapes: Shapes) -> Shapes:
    """Return fused tensors as their parts, of unknown shape: SGLang's classes load either."""
    split: Shapes = {}
    for name, shape in shapes.items():
        split |= dict.fromkeys(reading.parts_of(name), ()) or {name: shape}
    return split


def _is_ignored(found: Parameters, name: str) -> bool:
    return name in found.shared or any(re.search(one, name) for one in found.ignored)


def _is_lost(found: Parameters, name: str) -> bool:
    """Return whether a tensor without a place is a parameter of a layer."""
    of_layer = _OF_LAYER.match(name)
    if of_layer is None or _BUFFERS.search(name) or _is_ignored(found, name):
        return False
    if found.predicts_ahead and int(of_layer[1]) >= found.num_layers:
        return False
    return of_layer[2] == "weight" or not found.has_biases


def _embedding_problems(config: Any, shapes: Shapes) -> Iterator[str]:
    told = config.to_dict()
    table = (told.get("vocab_size"), told.get("hidden_size"))
    wanted = {name: table for name in _EMBEDDINGS if None not in table}
    yield from reading.misshapen(shapes, wanted)
