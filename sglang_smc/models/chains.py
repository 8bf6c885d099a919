"""Define the input of a pass over particles, and find the rows of it that have the same text.

A row is a token of a particle. Its KV slot names its text: the round gives one slot to all
particles with the same text up to there, so that rows of one slot have the same result and the
model runs each slot once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_smc.smc.ledger import KVLocations

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Chains(NamedTuple):
    """C consecutive tokens of each of N particles of each of G requests, as a model reads them."""

    tokens: torch.Tensor  # [G, N, C] int64
    starts: torch.Tensor  # [G, N] int64 position of the first token, at least `committed` - 1
    # [G, N, C] int64 KV slots to which the tokens are written; 0 for those that are never read, or
    # are written already.
    slots: torch.Tensor
    locations: KVLocations  # of the rest of the KV
    reqs: "Sequence[Req]" = ()  # whose LoRA adapters the model runs; (): none

    @classmethod
    def of_padding(
        cls, shape: tuple[int, int, int], max_tail: int, device: torch.device | str
    ) -> "Chains":
        """Return particles on SGLang's padding row, which read and write its slot 0."""
        chains = torch.zeros(shape, dtype=torch.int64, device=device)  # [G, N, C]
        particles = chains[:, :, 0].clone()
        groups = chains[:, 0, 0].clone()
        locations = KVLocations(groups, groups + 1, particles, max_tail)
        return cls(chains, particles + 1, chains.clone(), locations)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        locations = self.locations
        return (
            self.tokens,
            self.starts,
            self.slots,
            locations.rows,
            locations.committed,
            locations.particle_rows,
        )


class MergedRows(NamedTuple):
    """The M rows of a pass that are run, of G * N * C; those of a particle are a sequence."""

    kept: torch.Tensor  # [M] int64 which rows are run, ascending
    results: torch.Tensor  # [G * N * C] int64: the row of M that has each one's result
    particles: torch.Tensor  # [S] int64: the particle, of G * N, of each sequence
    lengths: torch.Tensor  # [S] int64: its number of rows
    sequences: torch.Tensor  # [G * N] int64: the sequence that ends in each one's last row

    def by_request(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows run of each of G requests, and which of these has each row's result.

        Both are int64: rows of N * C ``[G, Q]``, padded, and places among them ``[G, N * C]``.
        """
        num_rows = len(self.results) // size
        counts = (self.kept // num_rows).bincount(minlength=size).unsqueeze(1)  # [G, 1]
        first = counts.cumsum(0) - counts
        most = int(counts.max())
        place = torch.arange(most, device=first.device).minimum(counts - 1).clamp_min(0)
        rows = self.kept[(first + place).clamp_max(len(self.kept) - 1)] % num_rows
        return rows, (self.results.view(size, -1) - first).clamp(0, most - 1)


def merge_rows(slots: torch.Tensor, *, last: bool) -> MergedRows | None:
    """Return the rows to run, one for each slot; None where no two have the same slot.

    Shapes depend on values, so this waits for the device.

    Args:
        slots: ``[G, N, C]`` int64. Rows of slot 0, the padding slot, are not merged.
        last: whether only results of particles' last rows are used: others are left out if their
            slot is 0, which means that their KV exists.
    """
    if slots.shape[1] == 1 and not last:
        return None
    num_columns = slots.shape[2]
    flat = slots.flatten()
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
