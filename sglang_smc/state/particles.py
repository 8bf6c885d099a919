"""Hold the particles of all requests in device tables.

One row of each table belongs to one request, under its index in SGLang's `req_to_token_pool`.
"""

import torch

from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import NO_TAIL, Population, Scores
from sglang_smc.state.logprobs import LogprobTable


class ParticleTable:
    """Populations between rounds, one row per request.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        num_particles: N.
        max_tail: the longest tail, in tokens.
        ops: whose populations they are.
    """

    def __init__(
        self, num_rows: int, num_particles: int, max_tail: int, device: str, ops: Ops
    ) -> None:
        shape = (num_rows, num_particles)

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.num_particles = num_particles
        self.logprobs = LogprobTable(num_rows, num_particles, max_tail, device)
        self._columns = ops.population(
            texts=zeros(*shape, max_tail + NO_TAIL),
            lengths=zeros(*shape),
            ended=zeros(*shape, dtype=torch.bool),
            log_weights=zeros(*shape, dtype=torch.float64),
            num_emitted=zeros(num_rows),
            log_evidence=zeros(num_rows, dtype=torch.float64),
            present=zeros(*shape, dtype=torch.bool),
            roots=zeros(*shape),
            unread=zeros(num_rows, dtype=torch.bool),
            fidelity=zeros(*shape, len(NAMES), dtype=torch.float64),
            scores=Scores(
                log_values=zeros(*shape, dtype=torch.float64),
                complete=zeros(*shape, dtype=torch.bool),
            ),
        )

    def gather(
        self, rows: torch.Tensor, num_particles: int, max_tail: int, *, scored: bool = False
    ) -> tuple[Population, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `Population.gather` does of the requests in ``rows`` ``[G]``.

        Args:
            num_particles: the most that any of them has.
            max_tail: the longest tail that any of them can reach in the round.
            scored: whether they carry potential values.
        """
        return self._carrying(scored).gather(rows, num_particles, max_tail + NO_TAIL)

    def scatter(
        self, rows: torch.Tensor, population: Population, counts: torch.Tensor
    ) -> torch.Tensor:
        """Store the populations of ``rows`` ``[G]``, with what they carry: `Population.store`."""
        if population.logprobs is not None:
            self.logprobs.scatter(rows, population.logprobs.emit(counts))
        return population.store(self._carrying(population.scores is not None), rows, counts)

    def gather_single(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what plain decoding reads of single particles without tails.

        Returns:
            The last two tokens ``[G, 2]``, which have ended, and the output lengths, ``[G]``.
        """
        columns = self._columns
        return columns.texts[rows, 0, :2], columns.ended[rows, 0], columns.num_emitted[rows]

    def scatter_single(
        self, rows: torch.Tensor, pair: torch.Tensor, ended: torch.Tensor, num_emitted: torch.Tensor
    ) -> None:
        """Store what `gather_single` returns, after a round that a draft may have left unread."""
        columns = self._columns
        columns.texts[rows, 0, :2] = pair
        columns.ended[rows, 0] = ended
        columns.num_emitted[rows] = num_emitted
        columns.unread.index_fill_(0, rows, True)

    def _carrying(self, scored: bool) -> Population:
        """Return the table, with or without potential values."""
        return self._columns if scored else self._columns._replace(scores=None)

    def begin(
        self,
        rows: torch.Tensor,
        *,
        first_tokens: torch.Tensor,
        num_emitted: torch.Tensor,
        log_evidence: torch.Tensor,
        num_particles: torch.Tensor,
        ended: torch.Tensor | None = None,
        fidelity: torch.Tensor | None = None,
    ) -> None:
        """Start particles after the token that prefill sampled; arguments ``[G]``.

        Where particles have first tokens of their own, ``first_tokens`` and ``ended`` are
        ``[G, N]``, for the table's N. ``fidelity`` is ``[G, 4]``, of a sequence that is resumed.
        """
        columns = self._columns
        place = torch.arange(self.num_particles, device=rows.device)
        present = place < num_particles.unsqueeze(1)
        columns.present[rows] = present
        columns.roots[rows] = place
        columns.lengths.index_fill_(0, rows, 0)
        columns.ended[rows] = ~present if ended is None else ~present | ended
        columns.log_weights[rows] = torch.where(present, 0.0, -torch.inf).double()
        columns.texts[rows, :, 1] = first_tokens.view(len(rows), -1).expand_as(present)
        columns.num_emitted[rows] = num_emitted
        columns.log_evidence[rows] = log_evidence
        columns.unread.index_fill_(0, rows, False)
        columns.fidelity[rows] = 0.0 if fidelity is None else fidelity.unsqueeze(1)
        for column in columns.scores or ():  # no sequence has a value yet
            column.index_fill_(0, rows, 0)
