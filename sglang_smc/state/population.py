"""The particles of all requests, as device tables that know slots and tokens but no models.

One row of each table belongs to one request, under its index in SGLang's
`req_to_token_pool`. A particle is the request's emitted text plus a *tail* of
tokens that are not emitted yet, because the particles still disagree about them.

Shapes: G groups in a batch, N particles a group, T places of a tail. A group with fewer
particles than others in its batch leaves places empty: these are not `present`, have ended, and
weigh nothing.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.rounds import Resampled
from sglang_smc.state.judged import Judged
from sglang_smc.state.tail_logprobs import TailLogprobs

# Columns of `Population.texts` beside the tail: two tokens before it, and one place that takes what
# is not kept.
_NO_TAIL = 3


class Population(NamedTuple):
    """The particles of the G groups in a batch. Every method returns a new one."""

    texts: (
        torch.Tensor
    )  # [G, N, 2 + T] int64: `second_last`, `last_emitted`, and the tail, `tokens`
    lengths: torch.Tensor  # [G, N] int64: tail lengths
    ended: torch.Tensor  # [G, N] bool: absorbed; weight frozen, tail complete
    log_weights: torch.Tensor  # [G, N] float64
    num_emitted: torch.Tensor  # [G] int64: output tokens emitted so far
    log_evidence: torch.Tensor  # [G] float64: log Z-hat banked at resampling steps
    present: torch.Tensor  # [G, N] bool: the particles that the group has
    roots: torch.Tensor  # [G, N] int64: the first ancestor of each, among those of the start
    unread: torch.Tensor  # [G] bool: the draft has yet to read the last token but one
    fidelity: torch.Tensor  # [G, N, 4] float64: what each text was watched to be, by `smc.fidelity`
    logprobs: TailLogprobs | None = None  # of the tails' tokens, where some request wants them
    judged: Judged | None = None  # what potentials have said, where some request has any

    @property
    def tokens(self) -> torch.Tensor:
        """The tails, ``[G, N, T]``; entries past a tail's length are stale."""
        return self.texts[:, :, 2:]

    @property
    def last_emitted(self) -> torch.Tensor:
        """The last emitted token, or what each particle has in its place, ``[G, N]``."""
        return self.texts[:, :, 1]

    @property
    def second_last(self) -> torch.Tensor:
        """The token before the last_emitted, ``[G, N]``; unknown right after prefill."""
        return self.texts[:, :, 0]

    @property
    def last_two(self) -> torch.Tensor:
        """The token that each particle continues from, behind the one before it: ``[G, N, 2]``."""
        pairs = self.texts.unfold(2, 2, 1)  # [G, N, 1 + T, 2], a view
        at = self.lengths.view(*self.lengths.shape, 1, 1).expand(-1, -1, 1, 2)
        return pairs.gather(2, at).squeeze(2)

    @property
    def last_tokens(self) -> torch.Tensor:
        """The token that each particle continues from, ``[G, N]``."""
        return self.texts.gather(2, self.lengths.unsqueeze(2) + 1).squeeze(2)

    @property
    def output_lengths(self) -> torch.Tensor:
        """Output tokens of each particle, emitted ones included, ``[G, N]``."""
        return self.num_emitted.unsqueeze(1) + self.lengths

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> "Population":
        """Extend each tail by the first ``counts[g, n]`` of ``tokens`` ``[G, N, J]``.

        Flags count as 0 and 1.
        """
        # What is not kept is stale, and where a tail has no room for it stands in the last place,
        # which is never part of a tail.
        column = torch.arange(2, 2 + tokens.shape[2], device=tokens.device)
        place = (self.lengths.unsqueeze(2) + column).clamp_max(self.texts.shape[2] - 1)
        return self._replace(
            texts=self.texts.scatter(2, place, tokens), lengths=self.lengths + counts
        )

    def descend(self, ancestors: torch.Tensor) -> "Population":
        """Make particle n a copy of ``ancestors[g, n]``; the weights are the caller's to set."""
        return self._replace(
            texts=self.texts.gather(1, ancestors.unsqueeze(2).expand_as(self.texts)),
            lengths=self.lengths.gather(1, ancestors),
            ended=self.ended.gather(1, ancestors),
            roots=self.roots.gather(1, ancestors),
            fidelity=self.fidelity.gather(1, ancestors.unsqueeze(2).expand_as(self.fidelity)),
            logprobs=None if self.logprobs is None else self.logprobs.descend(ancestors),
            judged=None if self.judged is None else self.judged.descend(ancestors),
        )

    def hand_down(self, step: Resampled) -> "Population":
        """Descend as a resampling step says, with the weights that it leaves."""
        return self.descend(step.ancestors)._replace(
            log_weights=step.log_weights,
            log_evidence=self.log_evidence + step.log_evidence,
        )

    def is_finished(self) -> torch.Tensor:
        """Which groups' answers may be drawn, ``[G]`` bool: texts have ended, and are judged."""
        ended = self.ended.all(1)
        if self.judged is None:
            return ended
        return ended & (self.judged.complete | ~self.present).all(1)

    def held_back(self, counts: torch.Tensor) -> torch.Tensor:
        """Of common tokens ``counts`` ``[G]`` those to emit: no text ends before all are judged."""
        shortest = self.lengths.masked_fill(~self.present, self.texts.shape[2]).amin(1)
        waits = self.ended.all(1) & ~self.is_finished()
        return torch.where(waits, torch.minimum(counts, shortest - 1).clamp_min(0), counts)

    def resize(self, ancestors: torch.Tensor, present: torch.Tensor) -> "Population":
        """Descend to the particles that are ``present`` ``[G, N]`` from now on."""
        descended = self.descend(ancestors)
        return descended._replace(
            lengths=descended.lengths.masked_fill(~present, 0),
            ended=descended.ended | ~present,
            present=present,
        )

    def stop(self, where: torch.Tensor) -> "Population":
        """Let groups ``[G]`` end without their tails: nothing more is emitted of them."""
        all_of = where.unsqueeze(1)
        return self._replace(
            lengths=torch.where(all_of, 0, self.lengths),
            ended=self.ended | all_of,
            log_weights=torch.where(all_of & self.present, 0.0, self.log_weights),
        )

    def is_settled(self) -> torch.Tensor:
        """Whether a group's particles agree on the last emitted token, ``[G]`` bool.

        Where they do not, nothing behind it is emitted.
        """
        return ((self.last_emitted == self.last_emitted[:, :1]) | ~self.present).all(1)

    def first_token(self) -> torch.Tensor:
        """The last emitted token of all particles of a group, ``[G]``; -1 where they differ."""
        return torch.where(self.is_settled(), self.last_emitted[:, 0], -1)

    def emit(self, counts: torch.Tensor) -> "Population":
        """Drop the first ``counts[g]`` tokens, common to all tails, from each of them."""
        place = torch.arange(self.texts.shape[2], device=self.texts.device)
        source = (place + counts.view(-1, 1, 1)).clamp_max(len(place) - 1)
        return self._replace(
            texts=self.texts.gather(2, source.expand_as(self.texts)),
            lengths=(self.lengths - counts.unsqueeze(1)).clamp_min(0),  # an absent one has none
            num_emitted=self.num_emitted + counts,
            logprobs=None if self.logprobs is None else self.logprobs.emit(counts),
        )


class ParticleTable:
    """The populations between rounds, one row a request.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        num_particles: N.
        max_tail: the longest tail, in tokens.
    """

    def __init__(self, num_rows: int, num_particles: int, max_tail: int, device: str) -> None:
        shape = (num_rows, num_particles)
        self.num_particles = num_particles
        self._columns = Population(
            texts=torch.zeros(*shape, max_tail + _NO_TAIL, dtype=torch.int64, device=device),
            lengths=torch.zeros(shape, dtype=torch.int64, device=device),
            ended=torch.zeros(shape, dtype=torch.bool, device=device),
            log_weights=torch.zeros(shape, dtype=torch.float64, device=device),
            num_emitted=torch.zeros(num_rows, dtype=torch.int64, device=device),
            log_evidence=torch.zeros(num_rows, dtype=torch.float64, device=device),
            present=torch.zeros(shape, dtype=torch.bool, device=device),
            roots=torch.zeros(shape, dtype=torch.int64, device=device),
            unread=torch.zeros(num_rows, dtype=torch.bool, device=device),
            fidelity=torch.zeros(*shape, len(NAMES), dtype=torch.float64, device=device),
        )

    def gather(self, rows: torch.Tensor, num_particles: int, max_tail: int) -> Population:
        """The populations of the requests in ``rows`` ``[G]``, no larger than they need.

        Args:
            num_particles: the most that any of them has.
            max_tail: the longest tail that any of them can have when the round ends.
        """
        views = self._views(num_particles, max_tail)
        return Population(*(view[rows] for view in views), logprobs=None, judged=None)

    def scatter(self, rows: torch.Tensor, population: Population) -> None:
        """Store the populations of the requests in ``rows`` ``[G]``, but what only some carry."""
        _, num_particles, width = population.texts.shape
        *columns, _, _ = population
        views = self._views(num_particles, width - _NO_TAIL)
        for view, values in zip(views, columns, strict=True):
            view[rows] = values

    def _views(self, num_particles: int, max_tail: int) -> list[torch.Tensor]:
        """The part of the table that populations of this size live in."""
        texts, *others, _, _ = self._columns
        small = (column[:, :num_particles] if column.dim() > 1 else column for column in others)
        return [texts[:, :num_particles, : max_tail + _NO_TAIL], *small]

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
        """Start particles behind the token that prefill sampled; arguments ``[G]``.

        Where particles begin with tokens of their own, ``first_tokens`` and ``ended`` are
        ``[G, N]``, for the table's N. ``fidelity`` is ``[G, 4]``, of a text that goes on.
        """
        columns = self._columns
        place = torch.arange(self.num_particles, device=rows.device)
        present = place < num_particles.unsqueeze(1)
        columns.present[rows] = present
        columns.roots[rows] = place
        columns.lengths[rows] = 0
        columns.ended[rows] = ~present if ended is None else ~present | ended
        columns.log_weights[rows] = torch.where(present, 0.0, -torch.inf).double()
        columns.texts[rows, :, 1] = first_tokens.view(len(rows), -1).expand_as(present)
        columns.num_emitted[rows] = num_emitted
        columns.log_evidence[rows] = log_evidence
        columns.unread[rows] = False
        columns.fidelity[rows] = 0.0 if fidelity is None else fidelity.unsqueeze(1)
