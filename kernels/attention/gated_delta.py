"""Compute the gated delta rule for particles: advance states over kept columns, then run new ones.

One program for each particle, value head and block of value dimensions holds that part of the
state, in float32, from the first column to the last: rows of a state are independent.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(32)  # value dimensions of a program
_EPSILON = tl.constexpr(1e-6)  # of the norms of queries and keys

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # qkv, decay and beta


def gated_delta(
    states: torch.Tensor, source: torch.Tensor, past: Columns, num_past: torch.Tensor, new: Columns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance states over past columns, then run new columns from there, in one launch.

    Reference: `sglang_smc.models.gated_delta.gated_delta`, same arguments; results agree up to the
    order of sums.
    """
    for part in (states, source, num_past, *past, *new):
        if not part.is_contiguous():
            raise ValueError(f"tensors must be contiguous, got strides {part.stride()}")
    qkv, decay, _ = new
    size, num_columns, heads = decay.shape
    value_dim, key_dim = states.shape[2:]
    width = qkv.shape[2]
    rolled = states.new_empty(size, *states.shape[1:])
    output = qkv.new_empty(size, num_columns, heads, value_dim)
    of_keys = (width - heads * value_dim) // 2
    run = _Run(
        states=states,
        source=source,
        num_past=num_past,
        past=_Columns(*past),
        new=_Columns(*new),
        rolled=rolled,
        output=output,
        max_past=past[1].shape[1],
        num_columns=num_columns,
    )
    _gated_delta[(size, heads, triton.cdiv(value_dim, _BLOCK.value))](
        run,
        heads=heads,
        shared=heads * key_dim // of_keys,
        key_dim=key_dim,
        value_dim=value_dim,
        key_tile=triton.next_power_of_2(key_dim),
        num_warps=4,  # pyright: ignore[reportCallIssue] -- of every launch
    )
    return output, rolled


class _Columns(NamedTuple):
    """Consecutive tokens of each particle."""

    qkv: torch.Tensor  # [P, J, width]
    decay: torch.Tensor  # [P, J, heads] float32
    beta: torch.Tensor  # [P, J, heads] float32


class _Run(NamedTuple):
    """The tensors of a launch, and sizes of them."""

    states: torch.Tensor  # [particles of all, heads, value_dim, key_dim]
    source: torch.Tensor  # [P] int64
    num_past: torch.Tensor  # [P] int64
    past: _Columns  # J = max_past
    new: _Columns  # J = num_columns
    rolled: torch.Tensor  # [P, heads, value_dim, key_dim]
    output: torch.Tensor  # [P, num_columns, heads, value_dim]
    max_past: int
    num_columns: int


@triton.jit
def _gated_delta(
    run,
    heads: tl.constexpr,
    shared: tl.constexpr,  # value heads of a key head
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_tile: tl.constexpr,
):
    particle = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    keys = tl.arange(0, key_tile)
    values = tl.program_id(2) * _BLOCK + tl.arange(0, _BLOCK)
    in_keys = keys < key_dim
    in_values = values < value_dim
    in_state = in_values[:, None] & in_keys[None, :]
    cell = values[:, None] * key_dim + keys[None, :]
    of_head = value_dim * key_dim
    source = run.states + (tl.load(run.source + particle) * heads + head) * of_head + cell
    state = tl.load(source, in_state, 0.0).to(tl.float32)

    of_keys: tl.constexpr = heads // shared * key_dim
    width: tl.constexpr = 2 * of_keys + heads * value_dim
    at_query = head // shared * key_dim + keys
    at_value = 2 * of_keys + head * value_dim + values
    at_key = of_keys + at_query
    for j in range(tl.load(run.num_past + particle)):
        column = particle * run.max_past + j
        row = run.past.qkv + column * width
        gate = column * heads + head
        key = _unit(row + at_key, in_keys)
        value = tl.load(row + at_value, in_values, 0.0).to(tl.float32)
        state = _step(
            state, key, value, tl.load(run.past.decay + gate), tl.load(run.past.beta + gate)
        )
    rolled = run.rolled + (particle * heads + head) * of_head + cell
    tl.store(rolled, state.to(run.rolled.dtype.element_ty), in_state)

    for j in range(run.num_columns):
        column = particle * run.num_columns + j
        row = run.new.qkv + column * width
        gate = column * heads + head
        key = _unit(row + at_key, in_keys)
        query = _unit(row + at_query, in_keys) * (key_dim**-0.5)
        value = tl.load(row + at_value, in_values, 0.0).to(tl.float32)
        state = _step(
            state, key, value, tl.load(run.new.decay + gate), tl.load(run.new.beta + gate)
        )
        output = tl.sum(state * query[None, :], axis=1).to(run.output.dtype.element_ty)
        tl.store(run.output + gate * value_dim + values, output, in_values)


@triton.jit
def _unit(ptr, inside):
    """Load a vector and scale it to L2 norm 1, up to epsilon."""
    vector = tl.load(ptr, inside, 0.0).to(tl.float32)
    return vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + _EPSILON)


@triton.jit
def _step(state, key, value, decay, beta):
    """Return a state ``[value dimensions, key_tile]`` updated by one token."""
    state = state * tl.exp(decay)
    change = (value - tl.sum(state * key[None, :], axis=1)) * beta
    return state + change[:, None] * key[None, :]
