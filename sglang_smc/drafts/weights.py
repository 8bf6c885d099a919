"""Compare the tensors of a head's checkpoint with those that SGLang's class of it computes with.

SGLang's classes skip a tensor that they have no place for, and leave a parameter as it was made
where there is no tensor for it: a head that lacks half of its weights loads, and drafts noise.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.formats import (
    ALL_BLOCKS,
    BLOCK_LAYERS,
    DFLASH2S,
    DOMINO,
    DSPARKS,
    EAGLE3,
    EAGLE3_LAYERS,
    LATTICE,
    LILICORR,
    OWN_LM_HEAD,
    QK_NORM,
    Config,
    architecture,
    block_options,
)
from sglang_smc.drafts.kinds import BLOCK_SIZE, numbers_of

Read = Callable[[str], Any]
"""Returns a tensor of the checkpoint by its name, or None."""

_MOST_NAMED = 5
# Of SGLang's classes: names in older checkpoints, by those that they have.
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_FUSED = {
    "self_attn.qkv_proj.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    "mlp.gate_up_proj.": ("mlp.gate_proj.", "mlp.up_proj."),
}
#: Tensors that a head does not compute with: the mask that goes with `d2t`, buffers, the target's
#: own weights, and what predicts how many drafts are accepted.
LEFT_OUT = ("t2d", "rotary_emb.inv_freq", "verifier_norm.", "verifier_lm_head.", "confidence_head.")


class LayerSizes(NamedTuple):
    """Sizes of a head's layers, by its configuration."""

    hidden: int
    mlp: int
    q: int  # of all query heads together
    kv: int
    head: int

    @classmethod
    def of(cls, config: Config) -> "LayerSizes":
        """Read them; raise ValueError without one."""
        is_llama4 = config.get("model_type") == "llama4_text"
        of_mlp = "intermediate_size_mlp" if is_llama4 else "intermediate_size"
        names = ("hidden_size", "num_attention_heads", of_mlp)
        hidden, heads, mlp = numbers_of(config, *names)
        head = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return cls(hidden, mlp, heads * head, kv_heads * head, head)


def problems(config: Config, shapes: Shapes, read: Read) -> Iterator[str]:
    """Yield what of a head's checkpoint would not be computed with, as phrases after its path.

    Nothing is yielded for classes whose tensors are not listed here.

    Args:
        config: with SGLang's keys; see `formats.normalized`.
        shapes: of the tensors in the checkpoint.
        read: reads `d2t`.
    """
    try:
        wanted = expected(config)
    except ValueError as error:
        yield f"cannot be checked: {str(error).rstrip('.')}"
        return
    if wanted is None:
        return
    given = _given(shapes)
    packed = bool(config.get("quantization_config"))
    found = {name: shape for name, shape in given.items() if not _is_left_out(name)}
    every = wanted | _optional(config)
    place: Callable[[str], str] = _module if packed else str
    places = {place(name) for name in every}
    filled = {place(name) for name in found}
    unread = [name for name in found if place(name) not in places]
    missing = [name for name in wanted if place(name) not in filled]
    if unread:
        yield f"has {several(unread, 'tensor')} that {architecture(config)} has no place for"
    if missing:
        yield f"lacks {several(missing, 'tensor')} that {architecture(config)} computes with"
    if not packed:
        yield from misshapen(found, every)
    yield from _vocabulary_problems(config, shapes, read)


def misshapen(found: Shapes, wanted: Shapes) -> Iterator[str]:
    """Yield the tensors that have another shape than wanted; () is any."""
    wrong = [
        f"{name} of {list(shape)} instead of {list(wanted[name])}"
        for name, shape in found.items()
        if wanted.get(name) and shape and shape != wanted[name]
    ]
    if wrong:
        yield f"has {several(wrong, 'tensor')}"


def expected(config: Config) -> Shapes | None:
    """Return name and shape of each tensor that a head must have; None if they are not listed.

    Raises ValueError for a configuration that lacks a size.
    """
    if architecture(config) != EAGLE3 and not is_block(config):
        return None
    numbers_of(config, "num_hidden_layers", "vocab_size")
    return _of_block(config) if is_block(config) else _of_eagle3(config)


def is_block(config: Config) -> bool:
    """Return whether a configuration names a class of block heads."""
    return architecture(config) in ALL_BLOCKS


def _given(shapes: Shapes) -> Shapes:
    """Return shapes by SGLang's names; a fused tensor's parts have none, ()."""
    found: Shapes = {}
    for name, shape in shapes.items():
        own = renamed(name)
        found |= dict.fromkeys(parts_of(own), ()) or {own: shape}
    return found


def parts_of(name: str) -> list[str]:
    """Return the names of a fused tensor's parts; none for another tensor."""
    return [name.replace(old, part) for old, new in _FUSED.items() if old in name for part in new]


def renamed(name: str) -> str:
    """Return SGLang's name of a tensor, without `model.`."""
    name = name.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _of_eagle3(config: Config) -> Shapes:
    sizes = LayerSizes.of(config)
    aux = _num_states(config)
    width = config.get("target_hidden_size") or sizes.hidden
    found: Shapes = {"fc.weight": (sizes.hidden, aux * width), "norm.weight": (sizes.hidden,)}
    for layer in range(config["num_hidden_layers"]):
        part = f"layers.{layer}."
        inputs = sizes.hidden * (2 if layer == 0 else 1)
        found |= _layer(part, sizes, inputs)
        found[f"{part}hidden_norm.weight"] = (sizes.hidden,)
        if layer:  # a later layer normalizes its input by that name
            del found[f"{part}input_layernorm.weight"]
        if config.get(QK_NORM):
            found |= _head_norms(part, sizes)
    eagle = config.get("eagle_config") or {}
    if eagle.get("norm_before_fc", config.get("norm_before_fc")):
        found["input_norm.weight"] = (aux * width,)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        found |= {f"fc_norm.{nth}.weight": (width,) for nth in range(aux)}
    rows = config.get("draft_vocab_size")
    if rows is not None and not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (rows, sizes.hidden)
    return found


def _of_block(config: Config) -> Shapes:
    sizes = LayerSizes.of(config)
    block = block_options(config)
    layers = block.get(BLOCK_LAYERS)
    aux = len(layers) if layers else config["num_hidden_layers"]
    found: Shapes = {"fc.weight": (sizes.hidden, aux * sizes.hidden)}
    found |= dict.fromkeys(("norm.weight", "hidden_norm.weight"), (sizes.hidden,))
    for layer in range(config["num_hidden_layers"]):
        part = f"layers.{layer}."
        found |= _layer(part, sizes, sizes.hidden) | _head_norms(part, sizes)
        if config.get("attention_bias"):
            projections = {"q_proj": sizes.q, "k_proj": sizes.kv, "v_proj": sizes.kv}
            biases = {**projections, "o_proj": sizes.hidden}
            found |= {f"{part}self_attn.{name}.bias": (size,) for name, size in biases.items()}
    if block.get("projector_type") == DOMINO:
        found |= _of_domino(block)
    if architecture(config) in DFLASH2S:
        found |= _of_selector(block) | _of_convolutions(block)
    if architecture(config) == LILICORR:
        found |= _of_lattice(block) | _of_convolutions(block)
    if architecture(config) in DSPARKS:
        rank, rows = numbers_of(block, "markov_rank", "vocab_size")
        found["markov_head.markov_w1.weight"] = (rows, rank)
        found["markov_head.markov_w2.weight"] = (config.get("draft_vocab_size") or rows, rank)
        found |= _of_markov(block, rank)
    if config.get(OWN_LM_HEAD) or is_reduced(config):
        rows = config.get("draft_vocab_size") or config["vocab_size"]
        found["lm_head.weight"] = (rows, sizes.hidden)
    return found


def _of_selector(block: Config) -> Shapes:
    """Return what a DFlash2 block selects candidates by."""
    hidden = block["hidden_size"]
    rank = block.get("selector_rank") or 0
    part = "candidate_selector."
    table = (block["vocab_size"], rank)
    found: Shapes = {f"{part}hidden_projection.weight": (rank, hidden)}
    return found | {f"{part}{side}_codebook": table for side in ("predecessor", "successor")}


def _of_convolutions(block: Config) -> Shapes:
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


def _of_lattice(block: Config) -> Shapes:
    """Return what a LiLiCorr head reads its lattice of candidates by."""
    names = ("hidden_size", "num_layers", "num_heads", "candidate_topk", "factor_dim")
    own, layers, heads, count, factors = numbers_of(block, *(LATTICE + name for name in names))
    hidden = block["hidden_size"]
    rows = block.get("block_size") or BLOCK_SIZE
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


def _of_domino(block: Config) -> Shapes:
    """Return what a Domino head has beside a DFlash block: a GRU and an MLP, without biases."""
    hidden = block["hidden_size"]
    rows = block["vocab_size"]
    state, middle = (block.get(name) or 0 for name in ("gru_hidden_dim", "emb_dim"))
    return {
        "prefix_gru.weight_ih_l0": (3 * state, hidden),
        "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (middle, hidden + state),
        "embed_proj.2.weight": (rows, middle),
    }


def _of_markov(config: Config, rank: int) -> Shapes:
    """Return what a Markov head of a DSpark block has beside its two matrices."""
    layers = {
        "gated": ("markov_head.gate_proj", rank, config["hidden_size"] + rank),
        "rnn": ("markov_head.joint_proj", 3 * rank, config["hidden_size"] + 2 * rank),
    }
    layer = layers.get(config.get("markov_head_type", "vanilla"))
    if layer is None:
        return {}
    name, rows, inputs = layer
    return {f"{name}.weight": (rows, inputs), f"{name}.bias": (rows,)}


def _layer(part: str, sizes: LayerSizes, inputs: int) -> Shapes:
    hidden = sizes.hidden
    return {
        f"{part}input_layernorm.weight": (hidden,),
        f"{part}post_attention_layernorm.weight": (hidden,),
        f"{part}self_attn.q_proj.weight": (sizes.q, inputs),
        f"{part}self_attn.k_proj.weight": (sizes.kv, inputs),
        f"{part}self_attn.v_proj.weight": (sizes.kv, inputs),
        f"{part}self_attn.o_proj.weight": (hidden, sizes.q),
        f"{part}mlp.gate_proj.weight": (sizes.mlp, hidden),
        f"{part}mlp.up_proj.weight": (sizes.mlp, hidden),
        f"{part}mlp.down_proj.weight": (hidden, sizes.mlp),
    }


def _head_norms(part: str, sizes: LayerSizes) -> Shapes:
    return {f"{part}self_attn.{name}.weight": (sizes.head,) for name in ("q_norm", "k_norm")}


def _num_states(config: Config) -> int:
    layers = (config.get("eagle_config") or {}).get(EAGLE3_LAYERS)
    return config.get("num_aux_hidden_states") or len(layers or ()) or 3


def is_reduced(config: Config) -> bool:
    """Return whether a head drafts some tokens of the target alone, which `d2t` names."""
    rows = config.get("draft_vocab_size")
    return rows is not None and rows != config["vocab_size"]


def _optional(config: Config) -> Shapes:
    """Return tensors that a head may have; without them the target's are taken, or all tokens."""
    table = (config["vocab_size"], config["hidden_size"])
    found: Shapes = {"embed_tokens.weight": table, "d2t": ()}
    if architecture(config) == EAGLE3 and config.get("draft_vocab_size") is None:
        found["lm_head.weight"] = table
    return found


def _vocabulary_problems(config: Config, shapes: Shapes, read: Read) -> Iterator[str]:
    """Yield what is wrong with `d2t`: ids of the target's tokens, less their ids in the draft."""
    vocab_size = config["vocab_size"]
    rows = config.get("draft_vocab_size") or vocab_size
    name = next((name for name in shapes if name.removeprefix("model.") == "d2t"), None)
    if name is None:
        if is_reduced(config):
            yield (
                f"has draft_vocab_size {rows} and no d2t, which says what {rows} of the target's "
                f"{vocab_size} tokens it drafts"
            )
        return
    shifts = read(name).long()  # [rows]
    if list(shifts.shape) != [rows]:
        yield f"has a d2t of {list(shifts.shape)}, and draft_vocab_size is {rows}"
        return
    ids = shifts + shifts.new_tensor(range(rows))
    if _ascends(ids, vocab_size):
        return
    if _ascends(shifts, vocab_size):
        yield (
            "has the target's ids themselves in d2t; allowed: their differences from the draft's "
            "own (d2t - torch.arange(len(d2t)))"
        )
        return
    order = "" if bool((ids.diff() > 0).all()) else ", and do not ascend"
    yield (
        f"has a d2t whose ids run from {int(ids.min())} to {int(ids.max())}{order}; allowed: "
        f"ascending ids of the target's {vocab_size} tokens, less 0, 1, 2, ..."
    )


def _ascends(ids: Any, vocab_size: int) -> bool:
    inside = bool((ids >= 0).all()) and bool((ids < vocab_size).all())
    return inside and bool((ids.diff() > 0).all())


def _is_left_out(name: str) -> bool:
    return any(name.startswith(part) or name.endswith(part) for part in LEFT_OUT)


def _module(name: str) -> str:
    """Return the module of a tensor, which has several where its weight is quantized."""
    return name.rpartition(".")[0] or name


def several(names: list[str], what: str) -> str:
    """Return names after what they are, the first of them."""
    shown = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{'a ' if len(names) == 1 else ''}{what}{'s' * (len(names) > 1)} {shown}{more}"
