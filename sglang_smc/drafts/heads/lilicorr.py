"""LiLiCorr heads: DFlash blocks behind which a transformer reads a lattice of candidates."""

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads import dflash
from sglang_smc.drafts.heads.base import (
    Config,
    HeadKind,
    HeadSizes,
    Refused,
    block_options,
    numbers_of,
)

LILICORR = "LiLiCorrDraftModel"

LATTICE = "lilicorr_"
"""What the settings of the lattice begin with, in a head's `dflash_config`."""


def sizes(config: Config) -> HeadSizes:
    """Read those of a block behind which a transformer reads all rows' candidates, c of each."""
    options = block_options(config)
    names = ("hidden_size", "num_layers", "candidate_topk", "factor_dim")
    own, layers, count, factors = numbers_of(options, *(LATTICE + name for name in names))
    (width,) = numbers_of(options, "hidden_size")
    own = own or width
    middle = int(own * options[f"{LATTICE}mlp_ratio"])
    layer = 4 * own * own + 2 * own * middle
    embedding = own * width if own != width else 0
    candidate = embedding + layers * layer + own * own + 3 * own * own + 2 * own * factors
    block = {name: value for name, value in options.items() if name not in dflash.SELECTOR}
    return dflash.sizes_of_block(block, from_anchor=False)._replace(
        step_parameters=count * candidate + own * width,
        conv_parameters=dflash.num_convolved(options),
    )


def tensors(config: Config) -> Shapes:
    """Return those of a block, and of what reads its lattice of candidates."""
    block = block_options(config)
    return dflash.tensors(config) | dflash.convolutions(block) | _lattice(block)


def _lattice(block: Config) -> Shapes:
    names = ("hidden_size", "num_layers", "num_heads", "candidate_topk", "factor_dim")
    own, layers, heads, count, factors = numbers_of(block, *(LATTICE + name for name in names))
    hidden = block["hidden_size"]
    rows = block.get("block_size") or dflash.BLOCK_SIZE
    width = own or hidden
    middle = int(width * (block.get(f"{LATTICE}mlp_ratio") or 0))
    linear = {
        "pass_hidden_proj": (width, hidden),
        "context_proj": (width, hidden),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "factor_input_proj": (width, 3 * width),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (factors, width)),
    }
    if width != hidden:
        linear["token_proj"] = (width, hidden)
    found: Shapes = {
        "slot_embedding": (1, 1, rows - 1, 1, width),
        "rank_embedding": (1, 1, 1, count, width),
        "relative_slot_bias": (heads, 2 * rows - 1),
        "same_slot_bias": (heads,),
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for layer in range(layers):
        part = f"layers.{layer}."
        linear |= {
            f"{part}attn.out_proj": (width, width),
            f"{part}mlp.up_proj": (middle, width),
            f"{part}mlp.down_proj": (width, middle),
        }
        found |= {
            f"{part}attn.in_proj_weight": (3 * width, width),
            f"{part}attn.in_proj_bias": (3 * width,),
            f"{part}attn_norm.weight": (width,),
            f"{part}mlp_norm.weight": (width,),
        }
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"lilicorr.{name}": shape for name, shape in found.items()}


HEADS = (
    HeadKind(
        "dflash",
        (LILICORR,),
        "sglang_smc.proposers.lilicorr:LiLiCorrHead",
        sizes,
        tensors,
        is_narrow=True,
        saved=dflash.saved,
    ),
)
REFUSED = (Refused("a LiLiCorr head of a class that is not supported", part="LiLiCorr"),)
