"""Compute the gated delta rule, and the convolution before it, of linear-attention layers in torch.

A linear-attention layer of Qwen3.5 or Qwen3-Next has a state matrix S for each value head. A token
with key k, value v, query q, decay g <= 0 and step beta updates it and reads it:

    S <- exp(g) S
    S <- S + beta (v - S k) k^T
    output = S q

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464. Keys and queries are
normalized, queries also scaled, and all three have gone through a short causal convolution.
"""

from typing import NamedTuple

import torch
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from torch.nn.functional import silu, softplus

EPSILON = 1e-6  # of the L2 norm, as in the published models


class RecurrenceInputs(NamedTuple):
    """Consecutive tokens of each of P sequences, as inputs of the recurrence."""

    qkv: torch.Tensor  # [P, J, 2 * k_heads * K + v_heads * V] after the convolution
    decay: torch.Tensor  # [P, J, v_heads] float32 g, at most 0
    beta: torch.Tensor  # [P, J, v_heads] float32


def causal_conv(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply a depthwise causal convolution ``[D, W]``, and SiLU; return ``[P, J, D]``.

    Inputs ``[P, W - 1 + J, D]`` are J tokens preceded by the W - 1 before them.
    """
    width = weight.shape[1]
    taps = weight.float().unbind(1)
    num_columns = inputs.shape[1] - width + 1
    total = inputs[:, :num_columns].float() * taps[0]  # [P, J, D]
    for w in range(1, width):
        total = torch.addcmul(total, inputs[:, w : w + num_columns].float(), taps[w])
    return silu(total).to(inputs.dtype)


def columns_of(
    inputs: torch.Tensor, layer: RadixLinearAttention, a: torch.Tensor, b: torch.Tensor
) -> RecurrenceInputs:
    """Return the recurrence's inputs from those of a layer of SGLang.

    Args:
        inputs: ``[P, W - 1 + J, D]``, as for `causal_conv`.
        a, b: ``[P, J, v_heads]`` of the gates.
    """
    weight = layer.conv_weights  # [D, W]
    assert isinstance(weight, torch.Tensor), "queries, keys and values have one convolution"
    assert layer.A_log is not None and layer.dt_bias is not None, "of a gated delta rule"
    decay = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())
    return RecurrenceInputs(causal_conv(inputs, weight), decay, b.float().sigmoid())


def gated_delta(
    states: torch.Tensor,
    source: torch.Tensor,
    past: RecurrenceInputs,
    num_past: torch.Tensor,
    new: RecurrenceInputs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance states over the first of their past columns, then run new columns from there.

    Args:
        states: ``[particles, v_heads, V, K]``.
        source: ``[P]`` int64, the particle from which each of the P sequences takes its state.
        past: columns after the states.
        num_past: ``[P]`` int64, the number of past columns over which each state is advanced.
        new: C columns, which leave no trace in the advanced states.

    Returns:
        Outputs ``[P, C, v_heads, V]`` of the new columns in the dtype of their ``qkv``, and the
        advanced states ``[P, v_heads, V, K]`` in the dtype of ``states``.
    """
    before = torch.arange(past.decay.shape[1], device=states.device) < num_past.unsqueeze(1)
    # Without decay and step a column changes nothing; an earlier request may have left NaN there.
    masked = RecurrenceInputs._make(part.masked_fill(~before.unsqueeze(2), 0) for part in past)
    rolled, _ = scan(states[source].float(), masked)
    _, output = scan(rolled, new)
    return output, rolled.to(states.dtype)


def scan(states: torch.Tensor, columns: RecurrenceInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over all columns, from states ``[P, v_heads, V, K]`` float32.

    Returns:
        The last states, and the outputs ``[P, J, v_heads, V]`` in the dtype of ``qkv``.
    """
    query, key, value = split_heads(columns.qkv, states.shape)
    keep = columns.decay.exp()
    outputs = [value[:, :0]]
    for j in range(value.shape[1]):
        states = states * keep[:, j, :, None, None]
        seen = torch.einsum("phvk,phk->phv", states, key[:, j])
        change = (value[:, j] - seen) * columns.beta[:, j].unsqueeze(2)
        states = states + change.unsqueeze(3) * key[:, j].unsqueeze(2)
        outputs.append(torch.einsum("phvk,phk->phv", states, query[:, j]).unsqueeze(1))
    return states, torch.cat(outputs, dim=1).to(columns.qkv.dtype)


def split_heads(
    qkv: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normalized queries and keys ``[P, J, v_heads, K]``, and values ``[..., V]``.

    All are float32. Value heads that share a key head are adjacent.

    Args:
        qkv: ``[P, J, 2 * k_heads * K + v_heads * V]``.
        shape: of the states, ``[P, v_heads, V, K]``.
    """
    _, v_heads, value_dim, key_dim = shape
    of_keys = (qkv.shape[2] - v_heads * value_dim) // 2
    query, key, value = qkv.float().split([of_keys, of_keys, v_heads * value_dim], dim=2)
    query, key = (normalised(part.unflatten(2, (-1, key_dim))) for part in (query, key))
    shared = v_heads // key.shape[2]
    return (
        query.repeat_interleave(shared, dim=2) * key_dim**-0.5,
        key.repeat_interleave(shared, dim=2),
        value.unflatten(2, (v_heads, value_dim)),
    )


def normalised(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors ``[..., K]`` scaled to L2 norm 1, up to `EPSILON`."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)
