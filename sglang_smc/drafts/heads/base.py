"""Define how a kind of head is described, and what several kinds share.

A description reads the keys of a config.json alone, so that planning imports no SGLang.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from sglang_smc.drafts.checkpoint import Shapes

Config = Mapping[str, Any]
Kind = Literal["model", "eagle", "eagle3", "dflash", "mtp"]

BLOCK = "dflash_config"
MARKOV = "dspark_config"
"""Sections of a configuration that have a block head's settings."""


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


class Speculators(NamedTuple):
    """Say how `speculators` saves a kind of head: its type, and the keys that others lack."""

    type: str
    architecture: str  # SGLang's class
    keys: tuple[str, ...]  # that SGLang's class reads as they are
    translate: Callable[[Config, Config], dict[str, Any]]
    """Returns further settings, of the configuration and of what is translated by then."""
    nested: tuple[str, ...] = ()  # keys that SGLang has in `BLOCK`


class HeadKind(NamedTuple):
    """A kind of head."""

    kind: Kind
    classes: tuple[str, ...]  # SGLang's, of which a checkpoint names one
    drafter: str  # its class in `proposers`, by path
    sizes: Callable[[Config], HeadSizes] | None = None  # ValueError; None: not planned for
    tensors: Callable[[Config], Shapes] | None = None  # ValueError; None: they are not checked
    is_narrow: bool = False  # most tokens never get mass, whatever its vocabulary is
    projector: str | None = None  # a `projector_type` that tells it from others of its classes
    renamed: Callable[[Config], Config] | None = None
    """Names SGLang's class in a configuration of others; returns any other as it is."""
    saved: Callable[[Config, Collection[str]], dict[str, Any]] | None = None
    """Returns settings that follow from the names of the tensors in a checkpoint."""
    speculators: Speculators | None = None


class Refused(NamedTuple):
    """Drafts that are refused, and what they are."""

    what: str
    part: str | None = None  # of the name of their class; the longest that fits counts
    type: str | None = None  # of `speculators`


def architecture(config: Config) -> str:
    """Return the class that a configuration names; an empty text if it names none."""
    return (config.get("architectures") or [""])[0]


def named(config: Config, name: str) -> dict[str, Any]:
    """Return a configuration that names this class."""
    return {**config, "architectures": [name]}


def block_options(config: Config) -> dict[str, Any]:
    """Return a block head's settings with those of its sections among them."""
    return {**config, **(config.get(BLOCK) or {}), **(config.get(MARKOV) or {})}


def numbers_of(config: Config, *keys: str, hint: str = "") -> list[int]:
    """Return the whole numbers behind ``keys``; raise ValueError, with a hint, without some."""
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"The configuration says no whole number for {', '.join(missing)}.{hint}")
    return [config[key] for key in keys]


def is_reduced(config: Config) -> bool:
    """Return whether a head drafts some tokens of the target alone, which `d2t` names."""
    rows = config.get("draft_vocab_size")
    return rows is not None and rows != config["vocab_size"]


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


def layer_tensors(part: str, sizes: LayerSizes, inputs: int) -> Shapes:
    """Return the tensors of a layer, whose names begin with ``part``; attention has ``inputs``."""
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


def head_norms(part: str, sizes: LayerSizes) -> Shapes:
    """Return the norms of queries and keys of a layer, whose names begin with ``part``."""
    return {f"{part}self_attn.{name}.weight": (sizes.head,) for name in ("q_norm", "k_norm")}
