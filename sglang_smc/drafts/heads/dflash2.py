"""DFlash2 heads (speculators 0.9.0): DFlash blocks with convolutions and a selector."""

from typing import Any

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads import dflash
from sglang_smc.drafts.heads.base import (
    BLOCK,
    Config,
    HeadKind,
    HeadSizes,
    Refused,
    Speculators,
    block_options,
    numbers_of,
)
from sglang_smc.drafts.heads.dflash import SELECTOR

DFLASH2 = "DFlash2DraftModel"
DFLASH2S = (DFLASH2, "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")


def sizes(config: Config) -> HeadSizes:
    """Read those of a block with convolutions around attention and MLP, and a selector."""
    options = block_options(config)
    rank, vocab_size, width = numbers_of(options, "selector_rank", "vocab_size", "hidden_size")
    block = {name: value for name, value in options.items() if name not in SELECTOR}
    return dflash.sizes_of_block(block, from_anchor=False)._replace(
        step_parameters=rank * width,
        table_parameters=2 * vocab_size * rank,
        conv_parameters=dflash.num_convolved(options),
    )


def tensors(config: Config) -> Shapes:
    """Return those of a block, and of what selects candidates."""
    block = block_options(config)
    hidden = block["hidden_size"]
    rank = block.get("selector_rank") or 0
    part = "candidate_selector."
    table = (block["vocab_size"], rank)
    found = dflash.tensors(config) | dflash.convolutions(block)
    found[f"{part}hidden_projection.weight"] = (rank, hidden)
    return found | {f"{part}{side}_codebook": table for side in ("predecessor", "successor")}


def translate(config: Config, told: Config) -> dict[str, Any]:
    """Return the settings of a block that have other names in `speculators`, and the selector's."""
    found = dflash.translate(config, told, sees_block=True)
    found[BLOCK] |= {name: config[name] for name in SELECTOR if name in config}
    return found


HEADS = (
    HeadKind(
        "dflash",
        DFLASH2S,
        "sglang_smc.proposers.dflash2:DFlash2Head",
        sizes,
        tensors,
        is_narrow=True,
        saved=dflash.saved,
        speculators=Speculators("dflash2", DFLASH2, dflash.KEYS, translate, SELECTOR),
    ),
)
REFUSED = (Refused("a DFlash2 head of a class that is not supported", part="DFlash2"),)
