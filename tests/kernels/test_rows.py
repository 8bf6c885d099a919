"""Running totals in rows of a table, kernel against reference."""

import torch

from sglang_smc.kernels import rows as kernel
from sglang_smc.ops import rows as reference


def test_tally_adds_keeps_the_least_and_takes_over(device: str) -> None:
    """Of any type and any stride, into rows in any order, which others leave alone."""
    generator = torch.Generator().manual_seed(0)
    totals = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    rows, wide = torch.tensor([3, 1, 4]), torch.tensor([[7, 8], [9, 10], [11, 12]])
    one, flags = torch.ones(1, dtype=torch.float64), torch.tensor([True, False, True])
    lowest = torch.tensor([-9.0, 0.0, 9.0], dtype=torch.float64)
    added, latest = (one.expand(3), flags, wide[:, 1]), (wide[:, 0], lowest * 2)
    expected = totals.clone()
    expected[rows, 0] += 1
    expected[rows, 1] += torch.tensor([1.0, 0.0, 1.0])
    expected[rows, 2] += torch.tensor([8.0, 10.0, 12.0])
    expected[rows, 3] = torch.minimum(totals[rows, 3], lowest)
    expected[rows, 4] = torch.tensor([7.0, 9.0, 11.0], dtype=torch.float64)
    expected[rows, 5] = lowest * 2
    for tally in (kernel.tally, reference.tally):
        table = totals.to(device, copy=True)
        moved = [[value.to(device) for value in values] for values in (added, latest)]
        after = tally(
            table, rows.to(device), added=moved[0], lowest=lowest.to(device), latest=moved[1]
        )
        assert torch.equal(table.cpu(), expected)
        assert torch.equal(after.cpu(), expected[rows])
