"""Verify drafted chains as a tree: six launches, and rows of the vocabulary are read twice.

`grow` numbers its nodes, and `descend` goes down: three launches share out its layers and add up
what is left at each node. Then one program a group goes up and draws where it stops, and tiles
store the residual there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.shares import descend, residual_at
from sglang_smc.kernels.tensors import as_float
from sglang_smc.kernels.tree import EXACT, NUMBERS, Column, Columns, grow
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.verification import Verified

_LEAST_SHARE = tl.constexpr(verification.LEAST_SHARE)
_ROUNDING = tl.constexpr(verification.ROUNDING)


class _Uniforms(NamedTuple):
    """Hold a uniform of each group."""

    tensor: torch.Tensor  # [G] float64
    stride: float  # see `as_float`


def verify(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    p: TokenDistribution,
    q: Sequence[TokenDistribution],
    uniforms: torch.Tensor,
) -> Verified:
    """Accept a prefix of one of the chains, with the residual of the token that follows.

    Reference: `sglang_smc.smc.verification.verify`, same arguments. Residuals agree to rounding
    (1e-5), and so do decisions, unless a uniform is within that of a boundary between two. Where
    the next token is not drawn from it, a residual is undefined.
    """
    size, num_chains, num_steps = tokens.shape
    columns = Columns.of(p, q, num_chains)
    tree = grow(tokens, lengths, columns)
    layers = descend(tree, columns)

    def of_groups(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(size, *shape, dtype=dtype, device=tokens.device)

    found = Verified(
        num_columns=of_groups(torch.int64),
        winner=of_groups(torch.int64),
        rejects=of_groups(torch.bool),
        left=of_groups(torch.int64),
        residuals=of_groups(torch.float32, p.scores.shape[1]),
    )
    sizes = columns.sizes
    of_group = _Uniforms(uniforms, as_float(uniforms.stride(0)))
    _leave[(size,)](tree, layers, of_group, found, num_chains, num_steps, sizes, num_warps=1)
    grid = size, layers.residual.shape[3]
    _store_residual[grid](
        layers, columns.laws, found, num_chains, num_steps, sizes, num_warps=8, **EXACT
    )
    return found


@triton.jit
def _shares_and_residuals(layers, layer, place, here, num_nodes, num_steps, sizes):
    """Return w_v and r_v, the sum over x of R_v(x), of a group's nodes in a layer: [N] float64.

    In the last layer no node has children, and r_v is w_v.
    """
    of_layer = layer * num_nodes + place
    w_v = tl.load(layers.shares + of_layer, mask=here, other=0.0).to(tl.float64)
    r_v = w_v
    if layer < num_steps:
        part = tl.arange(0, sizes.padded_tiles)[None, :]
        parts = layers.residual + (of_layer * sizes.num_tiles)[:, None] + part
        inside = here[:, None] & (part < sizes.num_tiles)
        r_v = tl.sum(tl.load(parts, mask=inside, other=0.0).to(tl.float64), 1)
    return w_v, r_v


@triton.jit
def _stops(w_v, r_v, reach):
    """Return the probabilities to stop at each node of a layer, and to come to the one above.

    A turn of `smc.verification.exits`. The decision comes to layer j with probability ``reach``,
    and stops there with r_j / (r_j + f_j), where r_j is the sum of r_v, and f_j = 1 - sum w_v.
    """
    f_j = 1.0 - tl.sum(w_v, 0)
    f_j = tl.where(f_j < _ROUNDING, 0.0, f_j)
    total = tl.sum(r_v, 0) + f_j
    scale = tl.where(total > 0, reach / tl.where(total > 0, total, 1.0), 0.0)
    return r_v * scale, tl.where(total > 0, f_j * scale, reach)


@triton.jit
def _has_children(tree, node, place, here, column, num_steps):
    """Return whether some chain of a group goes on from a node."""
    lengths = tl.load(tree.lengths + place, mask=here, other=0)
    nodes = tl.load(tree.nodes + place * (num_steps + 1) + column, mask=here, other=-1)
    goes = (nodes == node) & (column < lengths)
    return tl.max(goes.to(tl.int32), 0) != 0


@triton.jit(do_not_specialize=NUMBERS)
def _leave(tree, layers, uniforms, found, num_chains, num_steps, sizes):
    """Draw where a group stops, from the deepest layer up: `smc.verification.leave`.

    The first node at which the probabilities to stop exceed the uniform; by rounding they may all
    stay below it, and then the last node at which there is one.
    """
    num_nodes = tl.num_programs(0) * num_chains
    group = tl.program_id(0)
    chain = tl.arange(0, sizes.padded_chains)
    here = chain < num_chains
    place = group * num_chains + chain
    uniform = tl.load(uniforms.tensor + group * tl.cast(uniforms.stride, tl.int32))
    reach = tl.full([], 1.0, tl.float64)
    passed = tl.full([], 0.0, tl.float64)  # sum of the probabilities so far
    column = tl.full([], 0, tl.int32)
    winner = tl.full([], 0, tl.int32)
    searches = column == 0
    for up in range(num_steps + 1):
        layer = num_steps - up
        w_v, r_v = _shares_and_residuals(layers, layer, place, here, num_nodes, num_steps, sizes)
        chance, reach = _stops(w_v, r_v, reach)
        chance += tl.where((layer == 0) & (chain == 0), reach, 0.0)  # zero, but for rounding
        through = passed + tl.cumsum(chance, 0)
        first = tl.min(tl.where(here & (through > uniform), chain, sizes.padded_chains), 0)
        last = tl.max(tl.where(chance > 0, chain, -1), 0)
        stop = tl.where(first < sizes.padded_chains, first, last)
        may_stop = searches & (stop >= 0)
        column = tl.where(may_stop, layer, column)
        winner = tl.where(may_stop, stop, winner)
        searches = searches & (first == sizes.padded_chains)
        passed += tl.sum(chance, 0)
    node = group * num_chains + winner
    share = tl.load(layers.shares + column * num_nodes + node)
    rejects = _has_children(tree, node, place, here, column, num_steps) & (share > _LEAST_SHARE)
    tl.store(found.num_columns + group, column.to(tl.int64))
    tl.store(found.winner + group, winner.to(tl.int64))
    tl.store(found.rejects + group, rejects)
    tl.store(found.left + group, group.to(tl.int64))


@triton.jit(do_not_specialize=NUMBERS)
def _store_residual(layers, laws, found, num_chains, num_steps, sizes):
    group = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(found.rejects + group) == 0:
        return
    num_nodes = tl.num_programs(0) * num_chains
    stop = tl.load(found.num_columns + group).to(tl.int32)
    at = Column(laws, stop, num_nodes, num_chains, num_steps, sizes.unit)
    node = group * num_chains + tl.load(found.winner + group).to(tl.int32)
    share = tl.load(layers.shares + stop * num_nodes + node)
    columns = part * sizes.tile + tl.arange(0, sizes.tile)
    residual = residual_at(layers, at, node, share, columns, sizes)
    row = found.residuals + group.to(tl.int64) * laws.p.vocab_size + columns
    tl.store(row, residual, mask=columns < laws.p.vocab_size)
