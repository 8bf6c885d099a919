"""Models that SMC cannot run, told by their configuration before anything is loaded.

What a configuration does not tell is found when the models are built: `check_layers`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_smc.cpu.attention import check_layer, head_group

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

_ALLOWED = "allowed: a text decoder with full attention in every layer"


def problems(server_args: "ServerArgs") -> list[str]:
    """A sentence for everything about target and draft that SMC cannot run."""
    found = [
        f"--model-path {server_args.model_path} has {kind}; {_ALLOWED}. Choose another model or "
        "another --speculative-algorithm."
        for kind in _kinds(server_args.get_model_config())
    ]
    draft = server_args.speculative_draft_model_path
    if draft is None:
        return found
    config = ModelConfig.from_server_args(
        server_args,
        model_path=draft,
        model_revision=server_args.speculative_draft_model_revision or "main",
        is_draft_model=True,
    )
    kinds = [*_kinds(config), *_rewritten(server_args, config)]
    return found + [
        f"--speculative-draft-model-path {draft} has {kind}; {_ALLOWED}. Choose another draft."
        for kind in kinds
    ]


def _kinds(model: ModelConfig) -> Iterator[str]:
    """What it is about a model that neither the ledger nor the attention can serve."""
    latent = model.attention_arch == AttentionArch.MLA
    kinds = {
        "sliding-window attention with KV of its own": model.is_hybrid_swa,
        "latent attention (MLA)": latent,
        "attention sinks": model.has_attention_sinks,
        "keys and values of unlike width": model.has_asymmetric_kv and not latent,
        "a recurrent (Mamba-like) state": mambaish_config(model) is not None,
        "an encoder and a decoder": model.is_encoder_decoder,
        "inputs that are no text": model.is_multimodal or model.model_is_mrope,
        "no next-token head": not model.is_generation,
    }
    return (kind for kind, present in kinds.items() if present)


def _rewritten(server_args: "ServerArgs", as_draft: ModelConfig) -> Iterator[str]:
    """SGLang takes some models, given as a draft, for the extra layers of their own target."""
    config = get_config(
        as_draft.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=as_draft.revision,
        model_override_args=as_draft.model_override_args,
        model_config_parser=server_args.model_config_parser,
    )
    own, taken_for = (c.architectures or [] for c in (config, as_draft.hf_config))
    if own != taken_for:
        yield f"the architecture {own[0]}, which SGLang loads as {taken_for[0]} for a draft"


def check_layers(runner: "ModelRunner") -> None:
    """Raise ValueError for a model with a layer that our attention would get wrong."""
    group = head_group(runner)
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            check_layer(layer, group, {})
