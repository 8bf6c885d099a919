"""Find the rows of a pass over particles that have the same text, and run each once.

A row is a token of a particle. Its KV slot names its text: the round gives one slot to all
particles with the same text up to there, so that rows of one slot have the same result.
"""

from typing import NamedTuple

import torch


class MergedRows(NamedTuple):
    """The M rows of a pass that are run, of G * N * C; those of a particle are a sequence."""

    kept: torch.Tensor  # [M] int64 which rows are run, ascending
    results: torch.Tensor  # [G * N * C] int64: the row of M that has each one's result
    particles: torch.Tensor  # [S] int64: the particle, of G * N, of each sequence
    lengths: torch.Tensor  # [S] int64: its number of rows
    sequences: torch.Tensor  # [G * N] int64: the sequence that ends in each one's last row


def merge_rows(slots: torch.Tensor, *, last: bool) -> MergedRows | None:
    """Return the rows to run, one for each slot; None where no two have the same slot.

    Shapes depend on values, so this waits for the device.

    Args:
        slots: ``[G, N, C]`` int64. Rows of slot 0, the padding slot, are not merged.
        last: whether only results of particles' last rows are used: others are left out if their
            slot is 0, which means that their KV exists.
    """
    num_columns, flat = slots.shape[2], slots.flatten()
    row = torch.arange(len(flat), device=slots.device)
    alone = flat == 0
    unused = alone & ((row + 1) % num_columns > 0) if last else torch.zeros_like(alone)
    keys, group = torch.where(alone, -1 - row, flat).unique(return_inverse=True)
    first = row.new_full((len(keys),), len(flat)).scatter_reduce_(0, group, row, "amin")
    runs = (first[group] == row) & ~unused
    kept = runs.nonzero().squeeze(1)
    if len(kept) == len(flat):
        return None
    results = (runs.cumsum(0) - 1)[first[group]].clamp_min(0)
    counts = runs.view(-1, num_columns).sum(1)  # [G * N]
    particles = counts.nonzero().squeeze(1)
    sequence = (counts > 0).cumsum(0) - 1  # [G * N]: of particles that have rows
    ends = first[group].view(-1, num_columns)[:, -1] // num_columns
    return MergedRows(kept, results, particles, counts[particles], sequence[ends])
