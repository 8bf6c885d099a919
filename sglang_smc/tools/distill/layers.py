"""Define the building blocks of both heads, with the parameter names of checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.functional import silu


class HeadShape(msgspec.Struct, frozen=True):
    """Sizes of a head, and the target's layers that it reads hidden states of."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    layer_ids: tuple[int, ...]


class Turns(NamedTuple):
    """Rotary embedding of some positions: ``[B, T, head_dim]`` each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def of(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys ``[B, H, T, head_dim]``."""
        first, second = heads.chunk(2, -1)
        other = torch.cat([-second, first], -1)
        return heads * self.cos.unsqueeze(1) + other * self.sin.unsqueeze(1)


class KeysValues(NamedTuple):
    """Keys and values of attention: ``[B, kv heads, ..., head_dim]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


class Mlp(nn.Module):
    """Llama's gated MLP, with silu."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Projections(nn.Module):
    """Four projection matrices of an attention, with query and key norms if the head has them."""

    def __init__(self, shape: HeadShape, read_size: int, norms: bool) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(read_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(read_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(read_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps) if norms else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps) if norms else nn.Identity()

    def queries(self, read: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Return the queries ``[B, heads, T, head_dim]`` of ``read`` ``[B, T, read size]``."""
        return turns.of(self.q_norm(self._by_head(self.q_proj(read))))

    def keys_values(self, read: torch.Tensor, turns: Turns) -> KeysValues:
        """Return the KV, ``[B, kv heads, T, head_dim]`` each, of ``read`` ``[B, T, read size]``."""
        keys = self.k_norm(self._by_head(self.k_proj(read)))
        return KeysValues(turns.of(keys), self._by_head(self.v_proj(read)))

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def attend(
    queries: torch.Tensor, context: KeysValues, seen: torch.Tensor, own: KeysValues
) -> torch.Tensor:
    """Compute attention of A short blocks to a masked context and to themselves.

    Args:
        queries: ``[B, H, A, S, head_dim]``, S columns in each block.
        context: ``[B, kv heads, L, head_dim]``.
        seen: ``[B, A, L]`` bool: the context's columns that a block attends to.
        own: ``[B, kv heads, A, T, head_dim]``, all of which the block's queries attend to.

    Returns:
        ``[B, A * S, H * head_dim]``.
    """
    size, heads, blocks, width, head_dim = queries.shape
    kv_heads = context.keys.shape[1]
    # Query heads that share a key head are adjacent.
    grouped = queries.reshape(size, kv_heads, heads // kv_heads, blocks, width, head_dim)
    grouped = grouped * head_dim**-0.5
    far = torch.einsum("bkgasd,bkld->bkgasl", grouped, context.keys)
    far = far.masked_fill(~seen[:, None, None, :, None], float("-inf"))
    near = torch.einsum("bkgasd,bkatd->bkgast", grouped, own.keys)
    weights = torch.cat([far, near], -1).float().softmax(-1).to(context.values.dtype)
    length = context.keys.shape[2]
    found = torch.einsum("bkgasl,bkld->bkgasd", weights[..., :length], context.values)
    found = found + torch.einsum("bkgast,bkatd->bkgasd", weights[..., length:], own.values)
    found = found.reshape(size, heads, blocks * width, head_dim)
    return found.transpose(1, 2).flatten(2)


def at_columns(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[B, A, D]`` of ``rows`` ``[B, L, D]`` at ``columns`` ``[B, A]`` int64."""
    return rows.gather(1, columns.unsqueeze(2).expand(-1, -1, rows.shape[2]))
