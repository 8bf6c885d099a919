"""Write a random target, and a draft that is its embedding, first layer and LM head.

Both are peaked, as trained models are: the logits are wide. The last token decides most of them,
and the narrower the target's layers are, the less they add to what the draft knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dummies import word_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

_EMBEDDING = 1.0  # standard deviations
_LOGITS = 0.3
_ROUTER = 0.2


def write_pair(config: dict[str, Any], spread: float, target: Path, draft: Path) -> None:
    """Write both checkpoints with a tokenizer.

    Args:
        config: of the target.
        spread: standard deviation of the weights of layers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _model_of(config)
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=_spread_of(name, spread))
    first = _model_of({**config, "num_hidden_layers": 1})
    first.load_state_dict(model.state_dict(), strict=False)
    for folder, one in ((target, model), (draft, first)):
        one.save_pretrained(folder)
        word_tokenizer(config["vocab_size"]).save_pretrained(folder)


def _model_of(config: dict[str, Any]) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(**config)).bfloat16()


def _spread_of(name: str, of_layers: float) -> float:
    if "embed_tokens" in name:
        return _EMBEDDING
    if "lm_head" in name:
        return _LOGITS
    return _ROUTER if name.endswith("mlp.gate.weight") else of_layers
