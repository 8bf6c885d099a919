"""DFlash heads (arXiv 2602.06036): a block of masks behind the last token, in one pass."""

from collections.abc import Collection
from typing import Any

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads.base import (
    BLOCK,
    Config,
    HeadKind,
    HeadSizes,
    LayerSizes,
    Refused,
    Speculators,
    block_options,
    head_norms,
    is_reduced,
    layer_tensors,
    numbers_of,
)

DFLASH = "DFlashDraftModel"
BLOCKS = (DFLASH, "MuseGlimmerAssistantModel")

BLOCK_LAYERS = "target_layer_ids"
"""The layers of the target that a block reads, in its `dflash_config`."""

BLOCK_SIZE = 16
"""Columns of a block where its configuration says nothing, the last token's among them."""

OWN_LM_HEAD = "has_own_lm_head"
"""Whether a block's checkpoint has an LM head, in place of the target's."""

SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Sizes of a DFlash2 block, in its `dflash_config`."""

SPECULATORS_LAYERS = "aux_hidden_state_layer_ids"

EXTRAS = {
    "projector_type": "a projector (Domino)",
    "selector_rank": "a selector of candidates",
    "conv_kernel_size": "convolutions over the block",
    "output_multiplier": "a multiplier of its output",
    "final_logit_softcapping": "a cap of its own on logits",
    "attention_sink_bias": "attention sinks",
}
"""What SGLang's classes of blocks have no part for, by the setting that says so."""

# Features of newer blocks; each adds a step after the pass; its cost is not modelled.
_NOT_PLANNED = ("projector_type", *SELECTOR)


def sizes(config: Config) -> HeadSizes:
    """Read those of a block without more behind its pass; raise ValueError for another."""
    return sizes_of_block(block_options(config), from_anchor=False)


def sizes_of_block(options: Config, *, from_anchor: bool) -> HeadSizes:
    """Return the sizes of a block, of its ``options`` without those of what stands behind it.

    Args:
        from_anchor: whether the last token's own row drafts where the configuration does not say.
    """
    if beyond := [key for key in _NOT_PLANNED if options.get(key)]:
        raise ValueError(
            f"The configuration has {', '.join(beyond)}: more than one pass and the target's LM "
            "head. Planned for are blocks without."
        )
    layers = options.get(BLOCK_LAYERS) or range(options.get("num_hidden_layers") or 0)
    most = options.get("block_size") or BLOCK_SIZE
    return HeadSizes(
        "dflash",
        num_states=len(layers),
        rows_key=None,
        max_steps=most - (not options.get("sample_from_anchor", from_anchor)),
        hint=" A DFlash block's sizes are those of its own layers, not of the target's.",
    )


def num_convolved(options: Config) -> int:
    """Return the parameters of a block's convolutions around attention and MLP, if it has any."""
    taps = options.get("conv_kernel_size")
    if not taps:
        return 0
    width, size, layers = numbers_of(options, "hidden_size", "conv_group_size", "num_hidden_layers")
    return 2 * layers * 2 * taps * width * (width // size + 1)


def tensors(config: Config) -> Shapes:
    """Return those of its layers, of `fc`, and of an LM head of its own."""
    own = LayerSizes.of(config)
    layers = block_options(config).get(BLOCK_LAYERS)
    aux = len(layers) if layers else config["num_hidden_layers"]
    found: Shapes = {"fc.weight": (own.hidden, aux * own.hidden)}
    found |= dict.fromkeys(("norm.weight", "hidden_norm.weight"), (own.hidden,))
    for layer in range(config["num_hidden_layers"]):
        part = f"layers.{layer}."
        found |= layer_tensors(part, own, own.hidden) | head_norms(part, own)
        if config.get("attention_bias"):
            projections = {"q_proj": own.q, "k_proj": own.kv, "v_proj": own.kv}
            biases = {**projections, "o_proj": own.hidden}
            found |= {f"{part}self_attn.{name}.bias": (size,) for name, size in biases.items()}
    if config.get(OWN_LM_HEAD) or is_reduced(config):
        rows = config.get("draft_vocab_size") or config["vocab_size"]
        found["lm_head.weight"] = (rows, own.hidden)
    return found


def convolutions(block: Config) -> Shapes:
    """Return a block's convolutions around attention and MLP, if it has any."""
    hidden = block["hidden_size"]
    found: Shapes = {}
    taps = block.get("conv_kernel_size") or 0
    groups = hidden // block["conv_group_size"] if taps else 0
    names = ("attention_conv", "mlp_conv") if taps else ()
    for layer in range(block["num_hidden_layers"]):
        for name in names:
            found[f"layers.{layer}.{name}.base_kernel"] = (2, taps, hidden)
            found[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return found


def saved(config: Config, names: Collection[str]) -> dict[str, Any]:
    """Return whether an LM head is saved."""
    return {OWN_LM_HEAD: True} if "lm_head.weight" in names else {}


def translate(config: Config, told: Config, *, sees_block: bool = False) -> dict[str, Any]:
    """Return the settings that have other names in `speculators`.

    Args:
        sees_block: whether rows of a window attend to those behind where the configuration does
            not say.
    """
    # Files of before the key existed draft from the masks alone, DSpark's too (speculators#760).
    found: dict[str, Any] = {"sample_from_anchor": bool(config.get("sample_from_anchor"))}
    block: dict[str, Any] = {}
    if (layers := config.get(SPECULATORS_LAYERS)) is not None:
        block[BLOCK_LAYERS] = [layer - 1 for layer in layers]
    if config.get("mask_token_id") is not None:
        block["mask_token_id"] = config["mask_token_id"]
    found[BLOCK] = block
    # A window of W begins W before the last token there; in SGLang's classes W - 1 before a row.
    sees_block = config.get("sliding_window_non_causal", sees_block)
    if sees_block and "sliding_attention" in told.get("layer_types", ()):
        found["is_causal"] = False
    return found


KEYS = ("block_size", "sample_from_anchor")
HEADS = (
    HeadKind(
        "dflash",
        BLOCKS,
        "sglang_smc.proposers.dflash:BlockHead",
        sizes,
        tensors,
        saved=saved,
        speculators=Speculators("dflash", DFLASH, KEYS, translate),
    ),
)
REFUSED = (Refused("a DFlash head of a class that is not supported", part="DFlash"),)
