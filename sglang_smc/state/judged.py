"""What potentials have said of each particle's text, and of whose all.

A particle's weight holds phi of the last beginning of its text that was asked about. That value
goes where the text goes, so that the next one replaces it whatever has become of the particle
since. A text that has ended counts as complete once it was judged as a whole: only then is its
group's answer drawn. Carried only in batches where some request wants it.
"""

from typing import NamedTuple

import torch


class Judged(NamedTuple):
    """Of G * N particles; methods return new ones."""

    log_values: torch.Tensor  # [G, N] float64: log phi; NaN, as the host says it: what it was
    complete: torch.Tensor  # [G, N] bool: of the whole text, or of a request that wants no judge
    answers: torch.Tensor  # [G, N] int64: which answer the text gives, for a vote; -1: none

    def descend(self, ancestors: torch.Tensor) -> "Judged":
        """Make particle n a copy of ``ancestors[g, n]``."""
        return Judged(*(column.gather(1, ancestors) for column in self))


class JudgedTable:
    """What has been said, between rounds, one row a request.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        num_particles: N.
    """

    def __init__(self, num_rows: int, num_particles: int, device: str) -> None:
        shape = (num_rows, num_particles)
        self._columns = Judged(
            log_values=torch.zeros(shape, dtype=torch.float64, device=device),
            complete=torch.zeros(shape, dtype=torch.bool, device=device),
            answers=torch.zeros(shape, dtype=torch.int64, device=device),
        )

    def begin(self, rows: torch.Tensor) -> None:
        """Begin the requests in ``rows`` ``[G]``: nothing is said of their texts."""
        for column in self._columns:
            column[rows] = 0

    def gather(self, rows: torch.Tensor, num_particles: int) -> Judged:
        """What is said of the first particles of requests in ``rows`` ``[G]``."""
        return Judged(*(column[:, :num_particles][rows] for column in self._columns))

    def scatter(self, rows: torch.Tensor, judged: Judged) -> None:
        """Store what is said of the particles of the requests in ``rows`` ``[G]``."""
        num_particles = judged.complete.shape[1]
        for column, values in zip(self._columns, judged, strict=True):
            column[:, :num_particles][rows] = values
