"""Run the operations of a round on a CPU: equal rows once, and what is needed alone.

A row costs what it computes there, and to look at values is no wait. So particles of one text share
a KV slot, by which models run one row for all of them, and distributions are read once. Results
equal those of torch's operations, which are the reference.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang_smc.smc import distribution, randomness, verification
from sglang_smc.smc.distribution import TokenDistribution, of_each_draw
from sglang_smc.smc.ledger import Slots
from sglang_smc.smc.ops import Ops


class SharedTexts:
    """The slots that particles of equal texts share in a round; see `steps.Sharing`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._same = torch.empty(0)  # [G, N, N] bool: who shares, an equivalence

    def begin(self, texts: torch.Tensor, lengths: torch.Tensor, ended: torch.Tensor) -> None:
        self._same = same_text(texts, lengths, ~ended)
        self._share(1)

    def follow(self, step: int, tokens: torch.Tensor) -> None:
        if tokens.shape[1] > 1:
            self._same = self._same & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
        self._share(step + 2)

    def _share(self, column: int) -> None:
        """Give those that share one slot in a column, the first one's, in place.

        A slot that no particle points to any more is free at the next commit.
        """
        own = self._slots.slots[column]  # [G, N]
        if own.shape[1] == 1:
            return
        own.copy_(own.gather(1, self._same.long().argmax(2)))
        ledger = self._slots.ledger
        places = ledger.in_ring(self._slots.positions[column])
        ledger.tails[self._slots.locations.particle_rows, places] = own.int()

    def rows(self, columns: slice) -> torch.Tensor | None:
        own = self._slots.slots[columns].permute(1, 2, 0)  # [G, N, C]
        if own.shape[1] == 1:
            return None
        flat = own.flatten(1)  # [G, M]
        itself = torch.arange(flat.numel()).view_as(flat)
        first = (flat.unsqueeze(2) == flat.unsqueeze(1)).long().argmax(2) + itself[:, :1]
        return torch.where(flat == 0, itself, first).flatten()  # slot 0 is of no text


class SharedRows(TokenDistribution):
    """Distributions whose rows are each read once, whoever draws from them."""

    def _parts(self) -> Iterator[tuple[torch.Tensor, TokenDistribution, torch.Tensor]]:
        if self.rows is None:
            yield from super()._parts()
            return
        # Draws of one row may have different temperatures.
        num_groups = len(self.temperature)
        group = of_each_draw(torch.arange(num_groups), self.num_draws)
        distinct, row = (self.rows * num_groups + group).unique(return_inverse=True)
        draw = torch.arange(self.num_draws)
        distinct = torch.empty_like(distinct).scatter_(0, row, draw)  # a draw of each
        draw = row.argsort()
        ends = [0, *row.bincount().cumsum(0).tolist()]  # of each row's draws
        size = max(1, distribution.MOST_ENTRIES // self.scores.shape[1])
        for first in range(0, len(distinct), size):
            some = draw[ends[first] : ends[min(first + size, len(distinct))]]
            yield some, self.at(distinct[first : first + size]), row[some] - first


def mix(state: torch.Tensor) -> torch.Tensor:
    """Apply `randomness.mix` in NumPy, whose calls take a third of the time."""
    words: Any = np.atleast_1d(state.numpy())  # its scalars do not wrap
    return torch.from_numpy(randomness.mix(words))


def true_places(flags: torch.Tensor) -> torch.Tensor:
    """Return the places of true ``flags``, as they stand in memory."""
    return flags.flatten().nonzero().squeeze(1)


same_text = partial(randomness.same_text, mix=mix)

CPU = Ops(
    uniforms=partial(randomness.particle_uniforms, mix=mix),
    round_seeds=partial(randomness.round_seeds, mix=mix),
    same_text=same_text,
    verify=partial(verification.verify, places=true_places),
    distribution=SharedRows,
    sharing=SharedTexts,
)
