"""Leave rotations of queries and keys to the attention over particles, which saves two launches.

SGLang's layers rotate (RoPE, arXiv 2104.09864), write keys and values, and attend, in a launch
each. In a pass over particles one Triton kernel does all of it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.qwen2 import Qwen2Attention
from sglang.srt.models.qwen3 import Qwen3Attention

from sglang_smc.models.attention import ParticleAttention

# They pass what they have rotated to attention as it is. Their subclasses may not.
_LAYERS = LlamaAttention, Qwen2Attention, Qwen3Attention


class LateRotary(torch.nn.Module):
    """A rotary embedding whose work ``attention`` does in its own passes."""

    def __init__(self, rotary: RotaryEmbedding, attention: ParticleAttention) -> None:
        super().__init__()
        self.rotary = rotary
        self._attention = attention

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys; those of the attention's own passes are not rotated yet.

        Args:
            positions: ``[R]`` int64.
            query, key: ``[R, heads * head_dim]``.
        """
        own = self._attention
        if get_attn_backend() is not own or not own.rotates_pass:
            return self.rotary(positions, query, key)
        own.rotation = positions, self.rotary.cos_sin_cache
        return query, key


def leave_rotations(model: torch.nn.Module, attention: ParticleAttention) -> None:
    """Have a model's layers leave rotations to its attention, where both can.

    Each layer gets a module of its own, since models share rotary embeddings.
    """
    if not attention.rotates:
        return
    for layer in _late(model):
        layer.rotary_emb = LateRotary(layer.rotary_emb, attention)


def may_rotate(runner: ModelRunner) -> bool:
    """Return whether layers of a model leave rotations to its attention, pools being built."""
    plain = runner.dtype.itemsize == 2 and runner.token_to_kv_pool.dtype == runner.dtype
    return plain and any(True for _ in _late(runner.model))


def _late(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the layers whose attention can rotate."""
    for layer in model.modules():
        own: Any = layer
        if type(layer) in _LAYERS and _is_plain(own.rotary_emb):
            yield own


def _is_plain(rotary: torch.nn.Module) -> bool:
    """Return whether an embedding rotates whole heads, NeoX style, by a row of its table each.

    Scaled kinds that differ in the table alone do so. SGLang's fallback rounds the table to 16
    bits, at another address, when it runs first.
    """
    own = RotaryEmbedding
    return (
        isinstance(rotary, own)
        and type(rotary).forward_native is own.forward_native
        and type(rotary).forward_cuda is own.forward_cuda
        and not rotary.use_fallback_kernel
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
    )
