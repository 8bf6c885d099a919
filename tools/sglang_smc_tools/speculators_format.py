"""Write a head's configuration as `speculators` reads it: the way back from `drafts.reading`.

In the layout of speculators 0.9.0. Its classes take the target's own tables, embedding and LM head,
from the target's checkpoint, which the configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_smc.drafts import reading
from sglang_smc.drafts.heads import HEADS, head_of
from sglang_smc.drafts.heads.base import architecture, block_options
from sglang_smc.drafts.heads.dflash import BLOCK_LAYERS, OWN_LM_HEAD, SELECTOR
from sglang_smc.drafts.heads.eagle3 import (
    EAGLE3_LAYERS,
    EAGLE3_STATES,
    EAGLE3_SWITCHES,
    QK_NORM,
)

KINDS = {
    name: head.speculators.type
    for head in HEADS
    if head.speculators is not None
    for name in head.classes
}
"""The `speculators_model_type` of SGLang's classes."""

_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
# Of SGLang's configurations, what is no setting of the head's layers.
_OUTER = {
    *("architectures", "draft_vocab_size", "eagle_config", "dflash_config", "block_size", "dtype"),
    *("torch_dtype", "markov_rank", "markov_head_type", "num_target_layers"),
    *("sample_from_anchor", "target_hidden_size", "is_causal", "projector_type", QK_NORM),
    *("enable_confidence_head", "confidence_head_with_markov", "num_aux_hidden_states"),
    *(OWN_LM_HEAD, reading.SPECULATORS, "speculators_config", *EAGLE3_SWITCHES),
}
# Of a block's settings, what speculators has no part for, by what a value means nothing.
_NO_PART = {
    "projector_type": (None, "dspark"),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
}


def to_speculators(
    config: Mapping[str, Any], target: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Return a head's configuration in the format of `speculators`.

    Args:
        config: with SGLang's keys; see `reading.normalized`.
        target: the config.json of the target.
        name: of the target: a folder, or a name of Hugging Face.

    Raises ValueError for a head that `speculators` has no class or no part for.
    """
    kind = KINDS.get(architecture(config))
    if kind is None:
        raise ValueError(
            f"is of class {architecture(config) or 'none'}, and speculators has none for "
            f"it; allowed: {', '.join(KINDS)}"
        )
    options = block_options(config)
    lost = [key for key, none in _NO_PART.items() if options.get(key) not in none]
    if lost:
        raise ValueError(f"sets {', '.join(lost)}, which speculators has no part for")
    layer = {key: value for key, value in config.items() if key not in _OUTER}
    if kind == "eagle3":
        layer["model_type"] = "qwen3" if config.get(QK_NORM) else "llama"
        own = _of_eagle3(config, target)
    else:
        own = _of_block(kind, options)
    return {
        "architectures": [_CLASSES[kind]],
        reading.SPECULATORS: kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [_proposal(config)],
            "verifier": {
                "name_or_path": name,
                "architectures": list(target.get("architectures") or ()),
            },
        },
        reading.LAYER_CONFIG: {**layer, "vocab_size": config["vocab_size"]},
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size"),
        "tie_word_embeddings": False,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        **own,
    }


def renamed(name: str) -> str:
    """Return the name that `speculators` has for a tensor of SGLang's classes."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _of_eagle3(config: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("eagle_config") or {}
    layers = given.get(EAGLE3_LAYERS)
    if layers is None:  # SGLang's default
        count = {**target, **(target.get("text_config") or {})}.get("num_hidden_layers")
        if count is None:
            raise ValueError(
                "names no layers of the target that it reads, and the target's config.json no "
                "num_hidden_layers, by which they are chosen then"
            )
        layers = [1, count // 2 - 1, count - 4]
        assert len(layers) == EAGLE3_STATES
    switches = {key: given.get(key, config.get(key)) for key in EAGLE3_SWITCHES}
    found = {key: value for key, value in switches.items() if value is not None}
    return found | {EAGLE3_LAYERS: [layer + 1 for layer in layers]}


def _of_block(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    layers = options.get(BLOCK_LAYERS)
    if not layers:
        raise ValueError(
            "names no layers of the target that it reads: write target_layer_ids into its "
            "dflash_config, as it was trained"
        )
    from_anchor = options.get("sample_from_anchor", kind == "dspark")
    found = {
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "mask_token_id": options.get("mask_token_id"),
        "block_size": options.get("block_size"),
        "sample_from_anchor": bool(from_anchor),
        "sliding_window_non_causal": options.get("is_causal") is False,
    }
    if kind == "dflash2":
        found |= {key: options.get(key) for key in SELECTOR}
    if kind == "dspark":
        markov = options.get("markov_head_type") or "vanilla"
        found |= {"markov_rank": options["markov_rank"], "markov_head_type": markov}
        found["enable_confidence_head"] = False  # it predicts acceptance, and drafts nothing
    return found


def _proposal(config: Mapping[str, Any]) -> dict[str, Any]:
    head = head_of(config)
    assert head is not None and head.sizes is not None, "its class is one of `KINDS`"
    known = reading.num_tokens(config)
    steps = known or head.sizes(config).max_steps or 3
    return {"proposal_type": "greedy", "speculative_tokens": steps, "verifier_accept_k": 1}
