"""Read and write heads as folders with SGLang's configuration keys and weight names.

EAGLE-3 heads use those of `LlamaForCausalLMEagle3`, DFlash heads those of `DFlashDraftModel`, MTP
layers those of `MiMoMTP`, DSpark heads those of `Qwen3DSparkModel`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn
from transformers import AutoConfig

from sglang_smc.drafts.heads import BY_CLASS
from sglang_smc.drafts.heads.dflash import DFLASH
from sglang_smc.drafts.heads.dspark import DSPARK
from sglang_smc.drafts.heads.eagle3 import EAGLE3, QK_NORM
from sglang_smc.drafts.heads.eagle3 import EAGLE3_LAYERS as LAYER_IDS
from sglang_smc.drafts.heads.mtp import MTP as MTP_CLASSES
from sglang_smc.drafts.reading import SPECULATORS, UNKNOWN
from sglang_smc_tools.distill.heads import MTP, DFlash, DSpark, Eagle3, Head, flattened
from sglang_smc_tools.plan.shapes import architecture, contents

MIMO = MTP_CLASSES["MiMoForCausalLM"]
#: Kinds of heads that can be trained, by SGLang's class.
KINDS = {EAGLE3: "eagle3", MIMO: "mtp", DFLASH: "dflash", DSPARK: "dspark"}
#: Names of the layer in checkpoints and here, by the kind of a head.
LAYER_NAMES = {"eagle3": ("layers.0.", "midlayer."), "mtp": ("mtp_layers.0.", "layer.")}
WEIGHTS = "model.safetensors"
#: Configuration keys of variants that these heads do not implement.
_OF_BLOCKS = (
    *("conv_kernel_size", "selector_rank", "attention_sink_bias", "attention_value_scale"),
    *("output_multiplier", "final_logit_softcapping", "use_gemma_norm", "is_causal"),
    *("use_sliding_window", "attention_bias", UNKNOWN),
)
_NOTES = (SPECULATORS, "speculators_config")  # of another format, in which nothing is written
UNSUPPORTED = {
    EAGLE3: (
        *("norm_before_fc", "norm_before_residual", "fc_norm", "use_aux_norm", "norm_output"),
        *("bias", "attention_bias", QK_NORM, UNKNOWN),
    ),
    DFLASH: ("projector_type", *_OF_BLOCKS),
    DSPARK: _OF_BLOCKS,
    MIMO: ("use_sliding_window",),
}


def new_head(
    kind: str,
    target: str | Path,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    scale: float = 1.0,
    **sizes: Any,
) -> Path:
    """Write an untrained head for a Llama-like target into ``folder``; return the folder.

    Args:
        kind: ``eagle3``, ``mtp``, ``dflash`` or ``dspark``.
        target: the target's folder.
        scale: of the weights: 1 keeps activations' size; more gives peaked distributions.
        sizes: those of `_new_settings` and of the kind's function below.

    Raises ValueError if the target has no configuration, or sizes are inconsistent.
    """
    makers = {"eagle3": _new_eagle3, "mtp": _new_mtp, "dflash": _new_dflash, "dspark": _new_dspark}
    head = makers[kind](target_config(target), **sizes)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        if weight.ndim == 2 or name.endswith("bias"):  # the rest are scales of norms
            nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5, generator=generator)
    save_head(head, folder, dtype)
    return Path(folder)


def _new_eagle3(config: Any, *, hot_tokens: Sequence[int] | None = None, **sizes: Any) -> Eagle3:
    """Return an EAGLE-3 head.

    Args:
        hot_tokens: the target's ids of the tokens that the head can draft, ascending; None for all.
    """
    hot = None if hot_tokens is None else torch.tensor(list(hot_tokens))
    layer_ids, settings = _new_settings(config, **sizes)
    settings |= {
        "architectures": [EAGLE3],
        "model_type": "llama",
        "draft_vocab_size": config.vocab_size if hot is None else len(hot),
        "eagle_config": {LAYER_IDS: list(layer_ids)},
    }
    return Eagle3(settings, layer_ids, hot)


def _new_mtp(config: Any, **sizes: Any) -> MTP:
    """Return an MTP layer, which reads the target's last hidden state."""
    _, settings = _new_settings(config, **sizes)
    settings |= {
        "architectures": [MIMO],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "attention_bias": True,  # of queries, keys and values, in every layer of Qwen2
    }
    return MTP(settings, _last_layer(config))


def _last_layer(config: Any) -> tuple[int]:
    return (config.num_hidden_layers - 1,)


def _new_dflash(
    config: Any,
    *,
    num_layers: int = 1,
    block_size: int = 9,
    mask_token_id: int | None = None,
    **sizes: Any,
) -> DFlash:
    """Return a DFlash head.

    Args:
        num_layers: of the head.
        block_size: the last kept token and the drafted tokens behind it, 2 or more.
        mask_token_id: the input where a token is drafted; no text contains it; None for the
            target's padding token.
    """
    if block_size < 2:
        raise ValueError(f"block_size is {block_size}; allowed: 2 or more, one of them kept.")
    mask = config.pad_token_id if mask_token_id is None else mask_token_id
    if mask is None or not 0 <= mask < config.vocab_size:
        raise ValueError(
            f"mask_token_id is {mask}; allowed: 0 to {config.vocab_size - 1}. Give the id of a "
            "token that no text has; the target's configuration names no padding token."
        )
    layer_ids, settings = _new_settings(config, num_layers, **sizes)
    settings |= {
        "architectures": [DFLASH],
        "model_type": "qwen3",
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * num_layers,
        "block_size": block_size,
        "num_target_layers": config.num_hidden_layers,
        "dflash_config": {"target_layer_ids": list(layer_ids), "mask_token_id": mask},
    }
    return DFlash(settings, layer_ids)


def _new_dspark(config: Any, *, block_size: int = 8, markov_rank: int = 64, **sizes: Any) -> DSpark:
    """Return a DSpark head.

    Args:
        block_size: tokens that it drafts, 2 or more.
        markov_rank: of the matrix from the token before to what is added to the logits.
        sizes: those of `_new_dflash`.
    """
    block = _new_dflash(config, block_size=block_size, **sizes)
    own = {"architectures": [DSPARK], "markov_head_type": "vanilla", "markov_rank": markov_rank}
    return DSpark({**block.settings, **own}, block.layer_ids)


def load_head(folder: str | Path, target: str | Path) -> Eagle3 | MTP | DFlash:
    """Return a head in float32; raise ValueError unless it is one and fits this target."""
    settings, config = _settings_of(folder, target)
    flat = flattened(settings)
    tensors = _tensors(folder)
    if settings["architectures"][0] == EAGLE3:
        default = [1, config.num_hidden_layers // 2 - 1, config.num_hidden_layers - 4]
        layer_ids = _layer_ids(flat.get(LAYER_IDS) or default, config.num_hidden_layers)
        shifts = tensors.get("d2t")  # [draft vocabulary]: the target's id less the head's own
        hot = None if shifts is None else shifts.long() + torch.arange(len(shifts))
        head = Eagle3(settings, layer_ids, hot)
    elif settings["architectures"][0] == MIMO:
        head = MTP(settings, _last_layer(config))
    else:
        needed = ["target_layer_ids", "mask_token_id", "block_size"]
        needed += ["markov_rank"] * (settings["architectures"][0] == DSPARK)
        for name in needed:
            if flat.get(name) is None:
                raise ValueError(
                    f"{folder}: config.json has no {name}, which training has to know."
                )
        block = DSpark if settings["architectures"][0] == DSPARK else DFlash
        head = block(settings, _layer_ids(flat["target_layer_ids"], config.num_hidden_layers))
    try:
        missing = head.load_state_dict(tensors, strict=False).missing_keys
    except RuntimeError as error:  # of shapes
        raise ValueError(f"{folder}: {error}") from error
    if missing:
        raise ValueError(f"{folder}: no weights of {', '.join(missing)}.")
    return head


def save_head(head: Head, folder: str | Path, dtype: torch.dtype) -> None:
    """Write ``head`` and its configuration; the head itself keeps its dtype."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: w.detach().to("cpu", dtype).contiguous() for name, w in head.named_parameters()
    }
    if isinstance(head, MTP):
        stored, own = LAYER_NAMES["mtp"]
        tensors = {f"model.{stored}{n.removeprefix(own)}": w for n, w in tensors.items()}
    if isinstance(head, Eagle3) and head.is_hot:
        hot = head.hot.cpu()
        drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        drafted[hot] = True
        tensors |= {"d2t": hot - torch.arange(len(hot)), "t2d": drafted}
    # `save_file` creates a file that only its owner can read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    settings = {**head.settings, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, under the names that heads have here."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors; convert its weights to that format.")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    plain = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    names = LAYER_NAMES.get(kind_of(folder))
    return {name.replace(*names): tensor for name, tensor in plain.items()} if names else plain


# --- Configurations


def loaded(kind: Any, folder: str | Path, what: str, **how: Any) -> Any:
    """Return ``kind.from_pretrained``; raise ValueError if transformers cannot load it."""
    try:
        return kind.from_pretrained(str(folder), **how)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no {what} that transformers can load: {error}. Give the folder of a "
            "checkpoint with its config.json and tokenizer."
        ) from error


def target_config(folder: str | Path) -> Any:
    """Return the language model's part of a target's configuration."""
    return loaded(AutoConfig, folder, "model").get_text_config()


def kind_of(folder: str | Path) -> str:
    """Return one of `KINDS`, or ``model`` for a language model.

    Raises ValueError for a head that cannot be trained.
    """
    name = architecture(contents(folder))
    if name in BY_CLASS and name not in KINDS:
        raise ValueError(
            f"{folder} is a head of class {name}, which is not trained here; allowed: a language "
            f"model, or {', '.join(KINDS)}. Begin another head with --new."
        )
    return KINDS.get(name, "model")


def _new_settings(
    config: Any,
    num_layers: int = 1,
    *,
    layer_ids: Sequence[int] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the layers that a new head reads, and its settings, all kinds' alike.

    Args:
        layer_ids: of the target, ascending, 0 to its number of layers - 2; None for an early, the
            middle and a late one. Of the other sizes None is the target's.
    """
    heads = num_heads or config.num_attention_heads
    rope = config.rope_parameters
    sizes = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads or min(heads, config.num_key_value_heads),
        "head_dim": head_dim or config.head_dim or config.hidden_size // config.num_attention_heads,
        "intermediate_size": intermediate_size or config.intermediate_size,
    }
    if heads % sizes["num_key_value_heads"]:
        raise ValueError(
            f"{heads} heads cannot share {sizes['num_key_value_heads']} heads of keys and values; "
            "give a number that divides them."
        )
    of_target = ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings")
    of_target += ("bos_token_id", "eos_token_id", "pad_token_id")
    return _layer_ids(layer_ids, config.num_hidden_layers), {
        **{name: getattr(config, name) for name in of_target},
        "hidden_act": "silu",
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "attention_bias": False,
        "tie_word_embeddings": False,
        **sizes,
    }


def _layer_ids(layer_ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers to capture hidden states of, ascending; None for a default choice."""
    if layer_ids is None:
        wanted = {0, (num_layers - 1) // 2, num_layers - 2}
        return tuple(sorted(wanted & set(range(num_layers - 1))))
    ids = tuple(layer_ids)
    allowed = f"allowed: 0 to {num_layers - 2} (the last layer's output cannot be had), ascending"
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= num_layers - 2:
        raise ValueError(f"layer ids are {list(ids)}; {allowed}.")
    return ids


def _settings_of(folder: str | Path, target: str | Path) -> tuple[dict[str, Any], Any]:
    """Return the config.json of a head and its target's; raise ValueError if they do not fit."""
    settings = {name: value for name, value in contents(folder).items() if name not in _NOTES}
    kind = architecture(settings)
    flat = flattened(settings)
    given = [name for name in UNSUPPORTED[kind] if flat.get(name) not in (None, False, 0)]
    if set(settings.get("layer_types") or ()) - {"full_attention"}:
        given.append("layer_types")
    if settings.get("hidden_act", "silu") != "silu":
        given.append("hidden_act")
    own: dict[str, Any] = {}
    if kind == DSPARK:
        own = {"projector_type": "dspark", "markov_head_type": "vanilla"}
    if kind in (DFLASH, DSPARK):
        own["draft_vocab_size"] = settings["vocab_size"]
    given += [name for name, value in own.items() if flat.get(name) not in (None, value)]
    if kind not in (DFLASH, DSPARK) and settings["num_hidden_layers"] != 1:
        given.append("num_hidden_layers")
    if settings.get("num_nextn_predict_layers", 1) != 1:
        given.append("num_nextn_predict_layers")
    if given:
        raise ValueError(
            f"{folder} sets {', '.join(given)} in config.json, which this program does not "
            "compute; train such a head with the program that made it."
        )
    config = target_config(target)
    for name in ("vocab_size", "hidden_size"):
        ours = settings[name]
        theirs = getattr(config, name)
        if ours != theirs:
            raise ValueError(
                f"{folder}: {name} is {ours}, and {theirs} in the target, whose states and "
                "embedding it reads. Give a head that was made for this target."
            )
    return settings, config
