"""Accumulate running totals in rows of a table, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


def tally(
    totals: torch.Tensor,
    rows: torch.Tensor,
    *,
    added: Sequence[torch.Tensor],
    lowest: torch.Tensor,
    latest: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Accumulate values into rows of ``totals``: sums, then a minimum, then latest values.

    Reference: `sglang_smc.ops.rows.tally`, same arguments.
    """
    values = *added, lowest, *latest
    after = totals.new_empty(len(rows), len(values))  # [G, C]
    _tally[(len(rows),)](
        totals,
        totals.stride(0),
        rows.contiguous(),
        values,
        tuple(value.stride(0) for value in values),
        after,
        num_added=len(added),
    )
    return after


@triton.jit
def _tally(totals, row_stride, rows, values, strides, after, num_added: tl.constexpr):
    group = tl.program_id(0)
    of_row = totals + tl.load(rows + group) * row_stride
    for column in tl.static_range(len(values)):
        value = tl.load(values[column] + group * strides[column]).to(tl.float64)
        if column < num_added:
            value += tl.load(of_row + column)
        if column == num_added:
            value = tl.minimum(value, tl.load(of_row + column))
        tl.store(of_row + column, value)
        tl.store(after + group * len(values) + column, value)
