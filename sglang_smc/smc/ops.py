"""Define the table of the small operations of a round: kernels, or torch functions.

Both give the same tokens for the same seed; the torch functions are the reference. Kernels are
for devices where a launch takes longer than its work: there a round's hundreds of small torch
calls would take as long as a model's forward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from sglang_smc.smc import edits, fidelity, randomness, verification, weighing
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import Ledger
from sglang_smc.smc.population import Population
from sglang_smc.smc.verification import Kept, Verified

Kind = Literal["torch", "triton"]


def tally(
    totals: torch.Tensor,
    rows: torch.Tensor,
    *,
    added: Sequence[torch.Tensor],
    lowest: torch.Tensor,
    latest: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Update rows of ``totals``: columns of sums, then one of minima, then replaced values.

    Args:
        totals: ``[R, C]`` float64, written in place.
        rows: ``[G]`` int64.
        added: for the first columns, each ``[G]`` of any type.
        lowest: ``[G]`` float64, for the column after them.
        latest: for the other columns, each ``[G]`` of any type.

    Returns:
        The updated rows ``[G, C]``.
    """
    before = totals[rows]
    new = torch.stack([*added, lowest, *latest], dim=1)  # [G, C]; float64, as ``lowest``
    at = len(added)
    sums = before[:, :at] + new[:, :at]
    least = torch.minimum(before[:, at : at + 1], new[:, at : at + 1])
    after = torch.cat([sums, least, new[:, at + 1 :]], dim=1)
    totals[rows] = after
    return after


MOST_SKINNY_ROWS = 64


class Fused(NamedTuple):
    """Name what stands around the product of `skinny` in a layer, all done in its launch."""

    norm: torch.Tensor | None = None  # [I] weights of an RMS norm of the rows
    eps: float = 0.0  # added to the mean of squares
    beside: torch.Tensor | None = None  # [M, I] further inputs, not with `gated`
    beside_norm: torch.Tensor | None = None  # [I] weights of their own norm
    scale: torch.Tensor | None = None  # [O] or [2 O] float32 factors of the matrix's rows
    bias: torch.Tensor | None = None  # [O], not with `gated`
    residual: torch.Tensor | None = None  # [M, O] added last
    gated: bool = False  # whether the result is SiLU of the first products, times the others
    dtype: torch.dtype | None = None  # of the result; None: as the rows
    fetches_more: bool = False  # whether memory idles before, so that more is fetched ahead


def skinny(x: torch.Tensor, weight: torch.Tensor, fused: Fused) -> torch.Tensor:
    """Multiply few rows by the transpose of a matrix, with what stands around it in a layer.

    Args:
        x: ``[M, I]``, M up to `MOST_SKINNY_ROWS`.
        weight: ``[O, I]``; ``[2 O, I]`` of a gate and then of what it multiplies; ``[O, 2 I]`` with
            further inputs.

    Returns:
        ``[M, O]``, computed in float32.
    """
    inputs = [(x, fused.norm), (fused.beside, fused.beside_norm)]
    normed = [
        rows.float()
        if norm is None
        else functional.rms_norm(rows.float(), norm.shape, norm.float(), fused.eps)
        for rows, norm in inputs
        if rows is not None
    ]
    scale = 1 if fused.scale is None else fused.scale.unsqueeze(1)
    found = functional.linear(torch.cat(normed, dim=1), weight.float() * scale)  # [M, O or 2 O]
    if fused.bias is not None:
        found = found + fused.bias.float()
    if fused.gated:
        gate, up = found.chunk(2, dim=1)
        found = functional.silu(gate) * up
    if fused.residual is not None:
        found = found + fused.residual.float()
    return found.to(fused.dtype or x.dtype)


class Ops(NamedTuple):
    """One implementation of each operation; by default that in torch, its reference."""

    kind: Kind = "torch"
    uniforms: Callable[..., torch.Tensor] = randomness.particle_uniforms
    round_seeds: Callable[..., torch.Tensor] = randomness.round_seeds
    same_text: Callable[..., torch.Tensor] = randomness.same_text
    stratify: Callable[..., tuple[torch.Tensor, torch.Tensor]] = randomness.stratify
    edit_logits: Callable[..., None] = edits.edit_logits
    count_tokens: Callable[..., None] = edits.count_tokens
    reweight_and_resample: Callable[..., weighing.Decision] = weighing.reweight_and_resample
    resample_by_weights: Callable[..., weighing.Resampled] = weighing.resample_by_weights
    tally: Callable[..., torch.Tensor] = tally
    verify: Callable[..., Verified] = verification.verify
    keep: Callable[..., Kept] = verification.keep
    keep_column: Callable[..., torch.Tensor] = fidelity.keep_column
    watch: Callable[..., torch.Tensor] = fidelity.watch
    skinny: Callable[..., torch.Tensor] = skinny
    ledger: type[Ledger] = Ledger
    population: type[Population] = Population
    distribution: type[TokenDistribution] = TokenDistribution
    #: `steps.Sharing` of a round's slots; None where a row more costs less than to look for equals.
    sharing: Callable[..., Any] | None = None
