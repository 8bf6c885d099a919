"""Limit the attention of a draft to the end of a text, and to its first keys.

A draft that was trained on short texts never meets a distance between tokens that it does not know
in a window no longer than those. First keys beside a window, attention sinks, are those of
StreamingLLM (arXiv 2309.17453). SGLang's backends do not see the limit, which this package's
attention applies to all that a draft reads: prompts and rounds.
"""

from typing import NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention

_LIMIT = "draft_window"  # an attribute of SGLang's layers that a draft's have here


class KeyWindow(NamedTuple):
    """The keys that a query attends to, beside its own."""

    before: int  # keys before its own
    sink: int = 0  # first keys of a sequence, at any distance


def window_of(layer: RadixAttention) -> KeyWindow | None:
    """Return the window of a layer, that of `limit` or its own; None for all keys."""
    own = layer.sliding_window_size
    return vars(layer).get(_LIMIT) or (KeyWindow(own) if own > -1 else None)


def limit(model: torch.nn.Module, size: int, sink: int) -> int:
    """Limit the layers of a draft's model that attend to more; return their number.

    Args:
        size: keys that a query attends to, its own included.
        sink: first keys of a sequence that it attends to as well.
    """
    layers = [layer for layer in _layers_of(model) if not -1 < layer.sliding_window_size < size]
    for layer in layers:
        setattr(layer, _LIMIT, KeyWindow(size - 1, sink))
    return len(layers)


def is_limited(model: torch.nn.Module) -> bool:
    """Return whether `limit` has limited a layer of a model."""
    return any(_LIMIT in vars(layer) for layer in _layers_of(model))


def _layers_of(model: torch.nn.Module) -> list[RadixAttention]:
    return [layer for layer in model.modules() if isinstance(layer, RadixAttention)]
