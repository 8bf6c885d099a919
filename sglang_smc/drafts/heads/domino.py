"""Domino heads (SpecForge): DFlash blocks that a GRU over a chain's tokens corrects."""

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads import dflash
from sglang_smc.drafts.heads.base import (
    BLOCK,
    Config,
    HeadKind,
    HeadSizes,
    architecture,
    block_options,
    named,
    numbers_of,
)

DOMINO = "domino"
"""The `projector_type` by which a DFlash head is a Domino head."""

_OF_SPECFORGE = "DominoDraftModel"


def sizes(config: Config) -> HeadSizes:
    """Read those of a block beside which a GRU reads a chain's tokens, and an MLP its state."""
    options = block_options(config)
    names = ("hidden_size", "gru_hidden_dim", "emb_dim", "vocab_size")
    width, state, middle, vocab_size = numbers_of(options, *names)
    del options["projector_type"]
    step = 3 * state * (width + state) + middle * (width + state) + vocab_size * middle
    most = (options.get("block_size") or dflash.BLOCK_SIZE) - 1
    block = dflash.sizes_of_block(options, from_anchor=False)
    return block._replace(step_parameters=step, max_steps=most)


def tensors(config: Config) -> Shapes:
    """Return those of a block, of a GRU and of an MLP, without biases."""
    block = block_options(config)
    hidden = block["hidden_size"]
    rows = block["vocab_size"]
    state, middle = (block.get(name) or 0 for name in ("gru_hidden_dim", "emb_dim"))
    return dflash.tensors(config) | {
        "prefix_gru.weight_ih_l0": (3 * state, hidden),
        "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (middle, hidden + state),
        "embed_proj.2.weight": (rows, middle),
    }


def renamed(config: Config) -> Config:
    """Name SGLang's class, and the projector, in a configuration of SpecForge's."""
    if architecture(config) != _OF_SPECFORGE:
        return config
    section = {"projector_type": DOMINO, **(config.get(BLOCK) or {})}
    return named(config, dflash.DFLASH) | {BLOCK: section}


HEADS = (
    HeadKind(
        "dflash",
        dflash.BLOCKS,
        "sglang_smc.proposers.domino:DominoHead",
        sizes,
        tensors,
        projector=DOMINO,
        renamed=renamed,
        saved=dflash.saved,
    ),
)
REFUSED = ()
