"""Update running totals in rows of a table."""

from collections.abc import Sequence

import torch


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
        lowest: ``[G]`` float64, for the column behind them.
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
