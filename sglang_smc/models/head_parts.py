"""Complete SGLang's classes of heads by what published checkpoints have, and check what is loaded.

A layer of Qwen3's normalizes queries and keys by head (in EAGLE-3 heads the default of
`speculators`). A head with `norm_before_residual` adds its output to the normalized state instead
of to the state itself. Its layers may attend to windows. A block head may have an LM head of its
own, of some tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.llama_eagle3 import LlamaDecoderLayer
from sglang.srt.models.utils import apply_qk_norm

from sglang_smc.drafts.heads.base import is_reduced
from sglang_smc.drafts.heads.dflash import OWN_LM_HEAD
from sglang_smc.drafts.heads.eagle3 import QK_NORM

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]


class NormedAttention(LlamaAttention):
    """Attention of an EAGLE-3 head whose queries and keys are normalized, as in Qwen3."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def forward_prepare_native(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values ``[T, heads * head_dim]`` of rows ``[T, inputs]``."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "head_dim": self.head_dim}
        q, k = apply_qk_norm(q=q, k=k, **norms)
        q, k = self.rotary_emb(positions, q, k)
        return q, k, v


class ResidualOfNorm(LlamaDecoderLayer):
    """The first layer of an EAGLE-3 head whose residual is the normalized state."""

    def forward(
        self,
        positions: torch.Tensor,
        embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer; arguments and result as of SGLang's."""
        normed = self.hidden_norm(hidden_states)
        pairs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        attended = self.self_attn(
            positions=positions, hidden_states=pairs, forward_batch=forward_batch
        )
        rows, residual = self.post_attention_layernorm(attended, normed)
        assert residual is not None, "the norm adds to what it is given"
        return self.mlp(rows), residual


def complete_eagle3(head: Any, config: Any) -> None:
    """Give an EAGLE-3 head the norms and windows of its configuration, before it is loaded."""
    told = config.to_dict()
    layers = head.model.layers
    for layer in layers[1:]:  # made, and not computed with: no checkpoint has it
        layer.input_layernorm = torch.nn.Identity()
    if told.get("norm_before_residual"):
        layers[0].__class__ = ResidualOfNorm
    for layer, kind in zip(layers, told.get("layer_types") or (), strict=False):
        if kind == "sliding_attention":  # a window counts a query's own key; SGLang those before it
            layer.self_attn.attn.sliding_window_size = told["sliding_window"] - 1
    if not told.get(QK_NORM):
        return
    for layer in layers:
        attention = layer.self_attn
        attention.__class__ = NormedAttention
        for name in ("q_norm", "k_norm"):
            setattr(attention, name, RMSNorm(attention.head_dim, eps=config.rms_norm_eps))


def complete_block(head: Any, config: Any) -> None:
    """Give a block head the LM head of its checkpoint, before weights are loaded.

    What a Markov head adds to logits has as many rows.
    """
    told = config.to_dict()
    rows = told["draft_vocab_size"] if is_reduced(told) else config.vocab_size
    if told.get(OWN_LM_HEAD):
        head.own_lm_head = ParallelLMHead(rows, config.hidden_size)
    if is_reduced(told) and "markov_head" in head._modules:
        head.markov_head.markov_w2 = torch.nn.Linear(head.markov_head.markov_rank, rows, bias=False)


def for_class(head: Any, weights: Weights) -> Weights:
    """Yield weights under names that a head's class does not skip, as DSpark's does `lm_head`."""
    has_own = "own_lm_head" in head._modules
    for name, weight in weights:
        is_own = has_own and name.removeprefix("model.") == "lm_head.weight"
        yield "own_lm_head.weight" if is_own else name, weight


# Parameters that checkpoints lack, and `proposers.assembly` sets: tables that are the target's,
# and a bias that SGLang's class makes up.
_SET_LATER = ("embed_tokens.weight", "head.weight", "model.fc.bias")


def load_whole(head: Any, load: Callable[[Any], Any], weights: Weights) -> None:
    """Load a head's weights; raise ValueError, naming them, for parameters that stay unset.

    Those that `proposers.assembly` sets are NaN until then.

    Args:
        load: the class's own method.
        weights: pairs of name and tensor, which it reads.
    """
    for _, weight in _plain(head):
        weight.data.fill_(torch.nan)
    load(for_class(head, weights))
    require_set(head, but=_SET_LATER)


def require_set(head: Any, but: tuple[str, ...] = ()) -> None:
    """Raise ValueError, naming them, if parameters of a head are unset.

    Args:
        but: ends of names that are not looked at.
    """
    unset = [
        name
        for name, weight in _plain(head)
        if not name.endswith(but) and bool(weight.data.isnan().any())
    ]
    if unset:
        shown = ", ".join(unset[:5]) + (f" and {len(unset) - 5} more" if len(unset) > 5 else "")
        raise ValueError(
            f"--speculative-draft-model-path has no weights for {shown} of {type(head).__name__}, "
            "or NaN among them; allowed: a checkpoint with all of a head's weights. Download it "
            "anew, or choose another draft."
        )


def is_set(weight: torch.Tensor) -> bool:
    """Return whether a parameter was loaded from a checkpoint; see `load_whole`."""
    return not bool(weight.isnan().any())


def _plain(head: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return weights, biases, kernels and tables that are not quantized."""
    return [
        (name, weight)
        for name, weight in head.named_parameters()
        if name.endswith((".weight", ".bias", "_kernel", "_codebook"))
        and weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
    ]
