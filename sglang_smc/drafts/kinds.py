"""List the kinds of heads: the classes that a checkpoint names, and the drafter that runs them.

A kind's sizes are what a planner needs beside those of its layers; they are read from the keys of a
config.json alone, so that planning imports no SGLang. A drafter is a class of `proposers`, named by
its path, as `--speculative-smc-draft-class` names a user's.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from sglang_smc.drafts import formats
from sglang_smc.drafts.formats import Config

Kind = Literal["model", "eagle", "eagle3", "dflash", "mtp"]

INTERFACE = "sglang_smc.proposers.base:DraftProposer"
LANGUAGE_MODEL = "sglang_smc.proposers.base:LanguageModel"
"""The drafter of a checkpoint that is of no kind of head."""

EAGLE = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle")
LATENT_EAGLE3 = "Eagle3DeepseekV2ForCausalLM"
MTP = {
    "DeepseekV3ForCausalLM": "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteForCausalLMNextN",
    "MiMoForCausalLM": "MiMoMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
}
"""SGLang's classes of MTP layers, by the class of the target whose checkpoint has one."""

EAGLE3_STATES = 3
"""Layers of the target that an EAGLE-3 head reads where its configuration names none."""

BLOCK_SIZE = 16
"""Columns of a block where its configuration says nothing, the last token's among them."""

# Features of newer blocks; each adds a step after the pass; its cost is not modelled.
_NOT_PLANNED = ("projector_type", *formats.SELECTOR)


class HeadSizes(NamedTuple):
    """Sizes of a head beside those of its layers."""

    passes: Literal["eagle3", "mtp", "dflash"]  # of K: pairs, pairs through fc, or one block
    num_states: int  # layers of the target whose states it reads
    rows_key: str | None  # of the config.json: rows of an LM head of its own; None: the target's
    max_steps: int | None = None  # the largest K; None for any
    step_parameters: int = 0  # that each drafted token is multiplied by behind a block's pass
    table_parameters: int = 0  # of tables beside, of which a few rows are read
    conv_parameters: int = 0  # of a block's convolutions
    hint: str = ""  # ends the error about a missing size


class HeadType(NamedTuple):
    """A kind of head."""

    kind: Kind
    classes: tuple[str, ...]  # SGLang's, of which a checkpoint names one
    drafter: str
    sizes: Callable[[Config], HeadSizes] | None = None  # ValueError; None: not planned for
    is_narrow: bool = False  # most tokens never get mass, whatever its vocabulary is
    projector: str | None = None  # a `projector_type` that tells it from others of its classes


def _eagle_sizes(config: Config) -> HeadSizes:
    """Read a layer over an embedding and the last state, which has the costs of an MTP layer."""
    return HeadSizes("mtp", num_states=1, rows_key="vocab_size")


def _eagle3_sizes(config: Config) -> HeadSizes:
    width = config.get("hidden_size")
    target_size = config.get("target_hidden_size") or width
    if target_size != width:
        raise ValueError(
            f"The configuration's hidden_size is {width} and its target_hidden_size "
            f"{target_size}. Only heads as wide as their target are planned for."
        )
    ids = (config.get("eagle_config") or {}).get(formats.EAGLE3_LAYERS)
    hint = (
        " An EAGLE-3 head's LM head has draft_vocab_size rows; where it covers every token of the "
        "target, write vocab_size there."
    )
    states = config.get("num_aux_hidden_states") or (len(ids) if ids else EAGLE3_STATES)
    return HeadSizes("eagle3", num_states=states, rows_key="draft_vocab_size", hint=hint)


def numbers_of(config: Config, *keys: str, hint: str = "") -> list[int]:
    """Return the whole numbers behind ``keys``; raise ValueError, with a hint, without some."""
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"The configuration says no whole number for {', '.join(missing)}.{hint}")
    return [config[key] for key in keys]


def _block_sizes(config: Config) -> HeadSizes:
    return _sizes_of_block(formats.block_options(config), from_anchor=False)


def _dspark_sizes(config: Config) -> HeadSizes:
    """Read a block with a Markov head, whose layer joins a row's output, a token and a state."""
    options = formats.block_options(config)
    if options.get("projector_type") == "dspark":
        del options["projector_type"]
    block = _sizes_of_block(options, from_anchor=True)
    vocab_size, rank, width = numbers_of(options, "vocab_size", "markov_rank", "hidden_size")
    rows = options.get("draft_vocab_size") or vocab_size
    layers = {"gated": rank * (width + rank), "rnn": 3 * rank * (width + 2 * rank)}
    more = layers.get(options.get("markov_head_type") or "", 0)
    return block._replace(step_parameters=rows * rank + more, table_parameters=vocab_size * rank)


def _dflash2_sizes(config: Config) -> HeadSizes:
    """Read a block with convolutions around attention and MLP, and a selector of candidates."""
    options = formats.block_options(config)
    rank, vocab_size, width = numbers_of(options, "selector_rank", "vocab_size", "hidden_size")
    convolutions = _convolutions(options)
    for name in formats.SELECTOR:
        options.pop(name, None)
    return _sizes_of_block(options, from_anchor=False)._replace(
        step_parameters=rank * width,
        table_parameters=2 * vocab_size * rank,
        conv_parameters=convolutions,
    )


def _convolutions(options: Config) -> int:
    """Return the parameters of a block's convolutions around attention and MLP, if it has any."""
    taps = options.get("conv_kernel_size")
    if not taps:
        return 0
    width, size, layers = numbers_of(options, "hidden_size", "conv_group_size", "num_hidden_layers")
    return 2 * layers * 2 * taps * width * (width // size + 1)


def _lilicorr_sizes(config: Config) -> HeadSizes:
    """Read a block behind which a transformer reads the candidates of all rows, c of each."""
    options = formats.block_options(config)
    names = ("hidden_size", "num_layers", "candidate_topk", "factor_dim")
    own, layers, count, factors = numbers_of(options, *(formats.LATTICE + name for name in names))
    (width,) = numbers_of(options, "hidden_size")
    own = own or width
    middle = int(own * options[f"{formats.LATTICE}mlp_ratio"])
    layer = 4 * own * own + 2 * own * middle
    embedding = own * width if own != width else 0
    candidate = embedding + layers * layer + own * own + 3 * own * own + 2 * own * factors
    convolutions = _convolutions(options)
    for name in formats.SELECTOR:
        options.pop(name, None)
    return _sizes_of_block(options, from_anchor=False)._replace(
        step_parameters=count * candidate + own * width, conv_parameters=convolutions
    )


def _domino_sizes(config: Config) -> HeadSizes:
    """Read a block beside which a GRU reads a chain's tokens, and an MLP its state."""
    options = formats.block_options(config)
    names = ("hidden_size", "gru_hidden_dim", "emb_dim", "vocab_size")
    width, state, middle, vocab_size = numbers_of(options, *names)
    del options["projector_type"]
    step = 3 * state * (width + state) + middle * (width + state) + vocab_size * middle
    most = (options.get("block_size") or BLOCK_SIZE) - 1
    block = _sizes_of_block(options, from_anchor=False)
    return block._replace(step_parameters=step, max_steps=most)


def _sizes_of_block(options: Config, *, from_anchor: bool) -> HeadSizes:
    if beyond := [key for key in _NOT_PLANNED if options.get(key)]:
        raise ValueError(
            f"The configuration has {', '.join(beyond)}: more than one pass and the target's LM "
            "head. Planned for are blocks without."
        )
    layers = options.get("target_layer_ids") or range(options.get("num_hidden_layers") or 0)
    most = options.get("block_size") or BLOCK_SIZE
    return HeadSizes(
        "dflash",
        num_states=len(layers),
        rows_key=None,
        max_steps=most - (not options.get("sample_from_anchor", from_anchor)),
        hint=" A DFlash block's sizes are those of its own layers, not of the target's.",
    )


_EAGLE3 = "sglang_smc.proposers.eagle3:"
_MTP_HEAD = _EAGLE3 + "MTPHead"
_ALONE = MTP["MiMoForCausalLM"]  # it has checkpoints of its own
_WITHIN = tuple(dict.fromkeys(name for name in MTP.values() if name != _ALONE))

TYPES = (
    HeadType("eagle", EAGLE, _EAGLE3 + "EagleHead", _eagle_sizes),
    HeadType("eagle3", (formats.EAGLE3,), _EAGLE3 + "Eagle3Head", _eagle3_sizes),
    HeadType("eagle3", (LATENT_EAGLE3,), _EAGLE3 + "Eagle3Head"),
    HeadType("dflash", formats.BLOCKS, "sglang_smc.proposers.dflash:BlockHead", _block_sizes),
    HeadType(
        "dflash",
        formats.BLOCKS,
        "sglang_smc.proposers.domino:DominoHead",
        _domino_sizes,
        projector=formats.DOMINO,
    ),
    HeadType(
        "dflash",
        formats.DFLASH2S,
        "sglang_smc.proposers.dflash2:DFlash2Head",
        _dflash2_sizes,
        is_narrow=True,
    ),
    HeadType(
        "dflash",
        (formats.LILICORR,),
        "sglang_smc.proposers.lilicorr:LiLiCorrHead",
        _lilicorr_sizes,
        is_narrow=True,
    ),
    HeadType("dflash", formats.DSPARKS, "sglang_smc.proposers.dspark:DSparkHead", _dspark_sizes),
    HeadType("mtp", _WITHIN, _MTP_HEAD),
    HeadType("mtp", (_ALONE,), _MTP_HEAD, _eagle_sizes),
)

HEADS = {name: one for one in TYPES for name in one.classes if one.projector is None}
"""Types of heads, by SGLang's class."""


def type_of(config: Config) -> HeadType | None:
    """Return the type of head that a configuration is of, if any."""
    name = formats.architecture(config)
    projector = formats.block_options(config).get("projector_type")
    fits = (one for one in TYPES if name in one.classes and one.projector == projector)
    return next(fits, HEADS.get(name))


def kind_of(architecture: str) -> Kind:
    """Return the kind of a draft whose configuration names this class."""
    found = HEADS.get(architecture)
    return "model" if found is None else found.kind


def proposed_steps(config: Config) -> int | None:
    """Return the K that a draft's configuration sets, if it does.

    A `speculators` checkpoint says it; any other block drafts its columns in one pass.
    """
    if (told := formats.num_tokens(config)) is not None:
        return told
    found = type_of(config)
    if found is None or found.sizes is None:
        return None
    try:
        return found.sizes(config).max_steps
    except ValueError:  # told by the checks of the draft
        return None
