"""Load a head's checkpoint with all that it has, and refuse one that does not fill the head."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_smc.drafts.heads import BY_CLASS
from sglang_smc.models import head_parts
from sglang_smc.server.hooks import Hooks

PATCHES = Hooks()
_CLASSES = "SGLang's class has no place for it, and skips the tensors."
_COMPLETE = {"retire_when": "SGLang's class has these parts.", "why": _CLASSES}


@PATCHES.on(
    "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.__init__",
    "srt/models/llama_eagle3.py:98 (the residual is the state before hidden_norm)",
    "srt/models/llama.py:199 (queries and keys are rotated as they are)",
    "srt/models/llama_eagle3.py:297 (windows are those of a flag, for all layers)",
    **_COMPLETE,
)
def make_eagle3(original: Callable, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Give an EAGLE-3 head the norms and windows that its configuration says it has."""
    original(self, config, *args, **kwargs)
    head_parts.complete_eagle3(self, config)


@PATCHES.on(
    "sglang.srt.models.dflash.DFlashDraftModel.__init__",
    "srt/models/dflash.py:943 (tensors without a parameter are ignored)",
    **_COMPLETE,
)
def make_block(original: Callable, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Give a DFlash head the LM head that its checkpoint has."""
    original(self, config, *args, **kwargs)
    head_parts.complete_block(self, config)


@PATCHES.on(
    "sglang.srt.models.dspark.DSparkDraftMixin.__init__",
    "srt/models/dspark.py:392 (markov_w2 has the target's vocabulary)",
    **_COMPLETE,
)
def make_dspark(original: Callable, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Give a DSpark head the LM head that its checkpoint has, and its Markov head as many rows."""
    original(self, config, *args, **kwargs)
    head_parts.complete_block(self, config)


@PATCHES.on(
    "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess",
    "srt/model_loader/loader.py:1063 (model.load_weights, whose result is not looked at)",
    why="A parameter for which a checkpoint has no tensor keeps what it was made with: such a head "
    "drafts noise, and nothing says so.",
    retire_when="SGLang raises for parameters that no tensor was loaded into.",
)
def load_whole_heads(
    original: Callable,
    model: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    target_device: torch.device,
) -> None:
    """Raise ValueError for a head whose checkpoint does not set all of its parameters."""
    if type(model).__name__ not in BY_CLASS or "load_weights" in vars(model):  # or it runs already
        original(model, weights, target_device)
        return
    load = model.load_weights
    model.load_weights = lambda given: head_parts.load_whole(model, load, given)
    try:
        original(model, weights, target_device)
    finally:
        del model.load_weights
