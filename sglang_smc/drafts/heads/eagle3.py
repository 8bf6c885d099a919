"""EAGLE-3 heads (arXiv 2503.01840): a layer over an embedding and states of several layers."""

from collections.abc import Collection
from typing import Any

from sglang_smc.drafts.checkpoint import Shapes
from sglang_smc.drafts.heads.base import (
    Config,
    HeadKind,
    HeadSizes,
    LayerSizes,
    Refused,
    Speculators,
    architecture,
    head_norms,
    layer_tensors,
    named,
)

EAGLE3 = "LlamaForCausalLMEagle3"
LATENT_EAGLE3 = "Eagle3DeepseekV2ForCausalLM"
_OF_VLLM = tuple(f"Eagle3{of}ForCausalLM" for of in ("Llama", "Qwen2_5vl", "Qwen3vl"))
"""The same class by the names that AngelSlim and vLLM have for it."""

EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The layers of the target that a head reads, in its `eagle_config`."""

EAGLE3_STATES = 3
"""Layers of the target that a head reads where its configuration names none."""

QK_NORM = "use_qk_norm"
"""Whether a head normalizes queries and keys, as a layer of Qwen3 does."""

EAGLE3_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings that add or move a norm."""

EXTRAS = {
    "attention_bias": "biases of attention",
    "mlp_bias": "biases of the MLP",
    "bias": "biases",
    "parallel_drafting": "masks, for several tokens a pass",
    "parallel_draft_step": "further heads, for several tokens a pass",
    "next_layer_regular": "ordinary later layers",
    "norm_before_fc": "a norm of all states before fc",
    "norm_before_residual": "a norm before the residual",
}
"""What SGLang's class has no part for, by the setting that says so."""


def sizes(config: Config) -> HeadSizes:
    """Read those of a head as wide as its target; raise ValueError for another."""
    width = config.get("hidden_size")
    target_size = config.get("target_hidden_size") or width
    if target_size != width:
        raise ValueError(
            f"The configuration's hidden_size is {width} and its target_hidden_size "
            f"{target_size}. Only heads as wide as their target are planned for."
        )
    hint = (
        " An EAGLE-3 head's LM head has draft_vocab_size rows; where it covers every token of the "
        "target, write vocab_size there."
    )
    states = _num_states(config)
    return HeadSizes("eagle3", num_states=states, rows_key="draft_vocab_size", hint=hint)


def _num_states(config: Config) -> int:
    layers = (config.get("eagle_config") or {}).get(EAGLE3_LAYERS)
    return config.get("num_aux_hidden_states") or len(layers or ()) or EAGLE3_STATES


def tensors(config: Config) -> Shapes:
    """Return those of its layers, of `fc`, of its norms, and of an LM head of its own."""
    own = LayerSizes.of(config)
    aux = _num_states(config)
    width = config.get("target_hidden_size") or own.hidden
    found: Shapes = {"fc.weight": (own.hidden, aux * width), "norm.weight": (own.hidden,)}
    for layer in range(config["num_hidden_layers"]):
        part = f"layers.{layer}."
        inputs = own.hidden * (2 if layer == 0 else 1)
        found |= layer_tensors(part, own, inputs)
        found[f"{part}hidden_norm.weight"] = (own.hidden,)
        if layer:  # a later layer normalizes its input by that name
            del found[f"{part}input_layernorm.weight"]
        if config.get(QK_NORM):
            found |= head_norms(part, own)
    eagle = config.get("eagle_config") or {}
    if eagle.get("norm_before_fc", config.get("norm_before_fc")):
        found["input_norm.weight"] = (aux * width,)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        found |= {f"fc_norm.{nth}.weight": (width,) for nth in range(aux)}
    rows = config.get("draft_vocab_size")
    if rows is not None and not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (rows, own.hidden)
    return found


def renamed(config: Config) -> Config:
    """Name SGLang's class: a `LlamaForCausalLM` with a draft vocabulary is no language model."""
    name = architecture(config)
    of_authors = name == "LlamaForCausalLM" and config.get("draft_vocab_size")
    return named(config, EAGLE3) if of_authors or name in _OF_VLLM else config


def saved(config: Config, names: Collection[str]) -> dict[str, Any]:
    """Return settings that follow from what is saved.

    `tie_word_embeddings` is often copied from the target's configuration. An LM head that is saved
    is the head's own. Where none is, and the vocabulary is whole, it is the target's, which
    SGLang's class takes if `draft_vocab_size` is None.
    """
    found: dict[str, Any] = {}
    if any(name.endswith("self_attn.q_norm.weight") for name in names):
        found[QK_NORM] = True
    has_head = any(name.startswith("lm_head.") for name in names)
    is_tied = config.get("tie_word_embeddings") and "embed_tokens.weight" in names
    if has_head:
        found["tie_word_embeddings"] = False
    elif not is_tied and config.get("draft_vocab_size") == config.get("vocab_size"):
        found |= {"tie_word_embeddings": False, "draft_vocab_size": None}
    return found


def translate(config: Config, told: Config) -> dict[str, Any]:
    """Return the settings that have other names in `speculators`.

    Without layers of the target, both take the same three.
    """
    found: dict[str, Any] = {QK_NORM: True} if told["model_type"] == "qwen3" else {}
    if (layers := config.get(EAGLE3_LAYERS)) is not None:
        found["eagle_config"] = {EAGLE3_LAYERS: [layer - 1 for layer in layers]}
    return found


_DRAFTER = "sglang_smc.proposers.eagle3:Eagle3Head"
HEADS = (
    HeadKind(
        "eagle3",
        (EAGLE3,),
        _DRAFTER,
        sizes,
        tensors,
        renamed=renamed,
        saved=saved,
        speculators=Speculators("eagle3", EAGLE3, EAGLE3_SWITCHES, translate),
    ),
    HeadKind("eagle3", (LATENT_EAGLE3,), _DRAFTER),
)
_P_EAGLE = "a P-EAGLE head, which drafts several tokens a pass from masks"
REFUSED = (
    Refused(_P_EAGLE, part="PEagle", type="peagle"),
    Refused("an EAGLE-3 head of a class that is not supported", part="Eagle3"),
)
