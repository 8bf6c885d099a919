"""DSpark heads (DeepSpec, arXiv 2607.05147): DFlash blocks with a Markov head."""

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads import dflash
from sglang_smc.drafts.heads.base import (
    Config,
    HeadKind,
    HeadSizes,
    Refused,
    Speculators,
    block_options,
    numbers_of,
)

DSPARK = "Qwen3DSparkModel"
DSPARKS = ("DSparkDraftModel", DSPARK, "LingDSparkModel", "Lfm2DSparkDraftModel")
"""But for one they are aliases."""

_KEYS = (
    *("block_size", "sample_from_anchor", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)


def sizes(config: Config) -> HeadSizes:
    """Read those of a block with a Markov head, whose layer joins a row, a token and a state."""
    options = block_options(config)
    if options.get("projector_type") == "dspark":
        del options["projector_type"]
    block = dflash.sizes_of_block(options, from_anchor=True)
    vocab_size, rank, width = numbers_of(options, "vocab_size", "markov_rank", "hidden_size")
    rows = options.get("draft_vocab_size") or vocab_size
    layers = {"gated": rank * (width + rank), "rnn": 3 * rank * (width + 2 * rank)}
    more = layers.get(options.get("markov_head_type") or "", 0)
    return block._replace(step_parameters=rows * rank + more, table_parameters=vocab_size * rank)


def tensors(config: Config) -> Shapes:
    """Return those of a block, and of its Markov head."""
    block = block_options(config)
    rank, rows = numbers_of(block, "markov_rank", "vocab_size")
    found = dflash.tensors(config)
    found["markov_head.markov_w1.weight"] = (rows, rank)
    found["markov_head.markov_w2.weight"] = (config.get("draft_vocab_size") or rows, rank)
    layers = {
        "gated": ("markov_head.gate_proj", rank, block["hidden_size"] + rank),
        "rnn": ("markov_head.joint_proj", 3 * rank, block["hidden_size"] + 2 * rank),
    }
    layer = layers.get(block.get("markov_head_type", "vanilla"))
    if layer is None:
        return found
    name, outputs, inputs = layer
    return found | {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


HEADS = (
    HeadKind(
        "dflash",
        DSPARKS,
        "sglang_smc.proposers.dspark:DSparkHead",
        sizes,
        tensors,
        saved=dflash.saved,
        speculators=Speculators("dspark", DSPARK, _KEYS, dflash.translate),
    ),
)
REFUSED = (Refused("a DSpark head of a class that is not supported", part="DSpark"),)
