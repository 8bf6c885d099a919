"""Read and validate a head's config.json in SGLang's keys, and its fit to the target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang_smc.tools.distill.layers import HeadShape

EAGLE3, DFLASH = "LlamaForCausalLMEagle3", "DFlashDraftModel"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
#: Configuration keys of variants that these heads do not implement.
UNSUPPORTED = {
    EAGLE3: ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "bias", "attention_bias"),
    DFLASH: (
        "conv_kernel_size",
        "selector_rank",
        "projector_type",
        "attention_sink_bias",
        "attention_value_scale",
        "output_multiplier",
        "final_logit_softcapping",
        "use_gemma_norm",
        "is_causal",
        "use_sliding_window",
        "attention_bias",
    ),
}


def target_config(folder: str | Path) -> Any:
    """Return the language model's part of a target's configuration.

    Raises:
        ValueError: ``folder`` has no configuration that transformers can read.
    """
    try:
        return AutoConfig.from_pretrained(str(folder)).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no model that transformers can read: {error}. Give the folder of a "
            "checkpoint with its config.json."
        ) from error


def kind_of(folder: str | Path) -> str:
    """Return ``eagle3``, ``dflash``, or ``model`` for any other checkpoint."""
    names = read_settings(folder).get("architectures") or [""]
    return {EAGLE3: "eagle3", DFLASH: "dflash"}.get(names[0], "model")


def read_settings(folder: str | Path) -> dict[str, Any]:
    """Return a checkpoint's config.json; raise ValueError if there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give the folder of a checkpoint.")
    return json.loads(path.read_text())


def shared_settings(config: Any) -> dict[str, Any]:
    """Return the settings that a head's configuration takes from its target's."""
    rope = config.rope_parameters
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def sizes(
    config: Any,
    num_layers: int,
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    intermediate_size: int | None,
) -> dict[str, Any]:
    """Return the head's sizes by configuration key; raise ValueError if they are inconsistent."""
    heads = num_heads or config.num_attention_heads
    found = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads or min(heads, config.num_key_value_heads),
        "head_dim": head_dim or config.head_dim or config.hidden_size // config.num_attention_heads,
        "intermediate_size": intermediate_size or config.intermediate_size,
    }
    for name, value in found.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed: 1 or more.")
    if heads % found["num_key_value_heads"]:
        raise ValueError(
            f"{heads} heads cannot share {found['num_key_value_heads']} heads of keys and values; "
            "give a number that divides them."
        )
    return found


def checked_layers(layer_ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers to capture hidden states of, ascending; None for a default choice."""
    if layer_ids is None:
        wanted = {0, (num_layers - 1) // 2, num_layers - 2}
        return tuple(sorted(wanted & set(range(num_layers - 1))))
    ids = tuple(layer_ids)
    allowed = f"allowed: 0 to {num_layers - 2} (the last layer's output cannot be had), ascending"
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= num_layers - 2:
        raise ValueError(f"layer ids are {list(ids)}; {allowed}.")
    return ids


def check_hot(hot_tokens: Sequence[int], vocab_size: int) -> None:
    ids = list(hot_tokens)
    if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(f"hot_tokens must be ascending ids, 0 to {vocab_size - 1}, one or more.")


def settings_of(folder: str | Path, architecture: str) -> dict[str, Any]:
    """Return the config.json of a head; raise ValueError if this program does not support it."""
    settings = read_settings(folder)
    found = settings.get("architectures")
    if found != [architecture]:
        raise ValueError(f"{folder} is {found}; this kind of draft is [{architecture!r}].")
    flat = {**settings, **(settings.get("eagle_config") or {})}
    flat |= settings.get("dflash_config") or {}
    given = [name for name in UNSUPPORTED[architecture] if flat.get(name) not in (None, False, 0)]
    if set(settings.get("layer_types") or ()) - {"full_attention"}:
        given.append("layer_types")
    if settings.get("hidden_act", "silu") != "silu":
        given.append("hidden_act")
    if architecture == EAGLE3 and settings["num_hidden_layers"] != 1:
        given.append("num_hidden_layers")
    if given:
        raise ValueError(
            f"{folder} sets {', '.join(given)} in config.json, which this program does not "
            "compute; train such a head with the program that made it."
        )
    return settings


def check_width(folder: str | Path, settings: Mapping[str, Any], target: Any) -> None:
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = settings[name], target.to_dict()[name]
        if ours != theirs:
            raise ValueError(
                f"{folder}: {name} is {ours}, and {theirs} in the target, whose states and "
                "embedding it reads. Give a head that was made for this target."
            )


def shape_of(settings: Mapping[str, Any], layer_ids: tuple[int, ...]) -> HeadShape:
    heads = settings["num_attention_heads"]
    return HeadShape(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        intermediate_size=settings["intermediate_size"],
        rms_norm_eps=settings["rms_norm_eps"],
        layer_ids=layer_ids,
    )


def rotary_of(settings: Mapping[str, Any], folder: str | Path) -> LlamaRotaryEmbedding:
    """Return the rotary embedding that transformers computes for this configuration."""
    config: PretrainedConfig = AutoConfig.for_model(**settings)
    try:
        return LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType] -- it reads what all have
    except KeyError as error:
        raise ValueError(f"{folder}: rotary embedding {error} is not known.") from error
