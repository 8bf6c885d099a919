"""Hold the particles of a batch of requests.

A particle is the request's emitted tokens plus a *tail* of tokens that are not emitted yet, because
the particles still differ in them.

Shapes: G groups in a batch, N particles per group, T places of a tail. A group with fewer particles
than others in its batch leaves places empty: these are not `present`, have ended, and have weight
zero.

Two parts are carried only in batches where some request needs them, and are copied with the tail:

- potential values (`Scores`). A particle's weight includes phi of the last prefix of its sequence
  that has a value; the next value replaces it, however many tokens were added since. An ended
  sequence is complete once it has a value as a whole: only then is its group's answer drawn.
- log-probabilities (`TailLogprobs`). Those of a token are computed in the round that appends it,
  and returned when it is emitted, in a later round or never.
"""

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from sglang_smc.smc import prefixes, weighing
from sglang_smc.smc.randomness import Purpose, particle_uniforms


class TailLogprobs(NamedTuple):
    """Log-probabilities along the tails of G * N particles; methods return new ones.

    Entries past a tail's length, or beyond the request's own widths, are undefined.
    """

    own: torch.Tensor  # [G, N, T] float32
    top: torch.Tensor  # [G, N, T, W] float32, descending
    top_ids: torch.Tensor  # [G, N, T, W] int64
    listed: torch.Tensor  # [G, N, T, M] float32

    def write(self, place: torch.Tensor, new: "TailLogprobs") -> "TailLogprobs":
        """Write ``new``, ``[G, N, J, ...]``, to places ``[G, N, J]`` of the tails."""
        pairs = zip(self, new, strict=True)
        return TailLogprobs._make(old.scatter(2, _like(place, more), more) for old, more in pairs)

    def emit(self, counts: torch.Tensor) -> "TailLogprobs":
        """Drop the first ``counts[g]`` entries of each tail."""
        place = torch.arange(self.own.shape[2], device=counts.device)
        source = (place + counts.view(-1, 1, 1)).clamp_max(len(place) - 1).expand_as(self.own)
        return TailLogprobs._make(column.gather(2, _like(source, column)) for column in self)


def copied(columns: Any, ancestors: torch.Tensor) -> Any:
    """Return a tree of tensors ``[G, N, ...]`` with those of ``ancestors[g, n]`` for n."""
    return tree_map_only(torch.Tensor, lambda of: of.gather(1, _like(ancestors, of)), columns)


def _like(index: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Expand an index over a column's first dimensions to all its trailing ones."""
    trailing = column.shape[index.dim() :]
    return index.view(*index.shape, *[1] * len(trailing)).expand(*index.shape, *trailing)


class Scores(NamedTuple):
    """Potential values of G * N particles."""

    log_values: torch.Tensor  # [G, N] float64: log phi; NaN, from the host, keeps the old value
    complete: torch.Tensor  # [G, N] bool: of the whole sequence, or of a request without potentials


# Columns of `Population.texts` beside the longest tail: two tokens before it, a spare one after it.
NO_TAIL = 3
_COPIED = "texts", "lengths", "ended", "roots", "fidelity", "logprobs", "scores"  # of a particle


class Population(NamedTuple):
    """Particles of the G groups in a batch, or of all rows of a table; methods return new ones.

    The kernels have a subclass of their own (`ops.triton_ops`).
    """

    texts: torch.Tensor  # [G, N, 2 + T] int64: the last two emitted tokens, and the tail: `tokens`
    lengths: torch.Tensor  # [G, N] int64: tail lengths
    ended: torch.Tensor  # [G, N] bool: absorbed; weight frozen, tail complete
    log_weights: torch.Tensor  # [G, N] float64
    num_emitted: torch.Tensor  # [G] int64: output tokens emitted so far
    log_evidence: torch.Tensor  # [G] float64: log Z-hat accumulated at resampling steps
    present: torch.Tensor  # [G, N] bool: the particles that the group has
    roots: torch.Tensor  # [G, N] int64: the first ancestor of each, among the initial particles
    unread: torch.Tensor  # [G] bool: the draft has not read the second last token
    fidelity: torch.Tensor  # [G, N, 4] float64: sums of each sequence, by `smc.fidelity`
    logprobs: TailLogprobs | None = None  # of the tails' tokens, where some request returns them
    scores: Scores | None = None  # potential values, where some request has potentials

    @property
    def tokens(self) -> torch.Tensor:
        """Return the tails, ``[G, N, T]``; entries past a tail's length are stale."""
        return self.texts[:, :, 2:]

    @property
    def last_emitted(self) -> torch.Tensor:
        """Return the last emitted token, or each particle's own in its place, ``[G, N]``."""
        return self.texts[:, :, 1]

    @property
    def last_two(self) -> torch.Tensor:
        """Return the last two tokens of each particle, ``[G, N, 2]``, in order."""
        pairs = self.texts.unfold(2, 2, 1)  # [G, N, 1 + T, 2], a view
        at = self.lengths.view(*self.lengths.shape, 1, 1).expand(-1, -1, 1, 2)
        return pairs.gather(2, at).squeeze(2)

    @property
    def last_tokens(self) -> torch.Tensor:
        """Return the last token of each particle, ``[G, N]``."""
        return self.texts.gather(2, self.lengths.unsqueeze(2) + 1).squeeze(2)

    @property
    def output_lengths(self) -> torch.Tensor:
        """Return the output length of each particle, emitted tokens included, ``[G, N]``."""
        return self.num_emitted.unsqueeze(1) + self.lengths

    @property
    def round_position(self) -> torch.Tensor:
        """Return the output position that keys a round's uniforms, ``[G, 1]``.

        The shortest particle advances in every round; of verified proposals the longest may go.
        """
        lengths = self.output_lengths
        return torch.where(self.ended, lengths.amax(1, True), lengths).amin(1, True)

    def cut(self, num_particles: int, width: int) -> "Population":
        """Return views of the first particles of each group, and of ``width`` tokens of texts."""
        cut = slice(None), slice(num_particles)
        few = tree_map_only(torch.Tensor, lambda column: column[cut[: column.dim()]], self)
        return few._replace(texts=few.texts[:, :, :width])

    def gather(
        self, rows: torch.Tensor, num_particles: int, width: int
    ) -> tuple["Population", torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `cut` would of the ``rows`` ``[G]`` of a table, copied.

        With its output lengths ``[G, N]``, last two tokens ``[G, N, 2]``, and the output position
        that keys a round's uniforms ``[G, 1]``.
        """
        few = self.cut(num_particles, width)
        found = tree_map_only(torch.Tensor, lambda view: view[rows], few)
        return found, found.output_lengths, found.last_two, found.round_position

    def store(self, table: "Population", rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Store in ``rows`` ``[G]`` of a table, without the first ``counts`` ``[G]`` tokens.

        These are emitted. The return value is the last emitted token, ``[G]``.
        """
        after = self.emit(counts)._replace(logprobs=None)
        views = table.cut(*self.texts.shape[1:])
        for view, of_batch in zip(tree_leaves(views), tree_leaves(after), strict=True):
            if of_batch is not None:
                view[rows] = of_batch
        return after.last_emitted[:, 0]

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> "Population":
        """Extend each tail by the first ``counts[g, n]`` of ``tokens`` ``[G, N, J]``.

        ``counts`` may be bool, as 0 and 1.
        """
        # Tokens beyond the tail's room go to the last place, which is never part of a tail.
        column = torch.arange(2, 2 + tokens.shape[2], device=tokens.device)
        place = (self.lengths.unsqueeze(2) + column).clamp_max(self.texts.shape[2] - 1)
        return self._replace(
            texts=self.texts.scatter(2, place, tokens), lengths=self.lengths + counts
        )

    def append_bonus(
        self, tokens: torch.Tensor, ends: torch.Tensor, failure: torch.Tensor
    ) -> "Population":
        """Append one of ``tokens`` ``[G, N]`` to each text that has not ended.

        Args:
            ends: ``[G, N]`` bool: the sequence ends with it.
            failure: ``[G]`` int64: groups where it is not 0 stop.
        """
        extended = self.append(tokens.unsqueeze(2), ~self.ended)
        return extended._replace(ended=self.ended | ends).stop(failure > 0)

    def descend(self, ancestors: torch.Tensor) -> "Population":
        """Make particle n a copy of ``ancestors[g, n]``; the caller sets the weights."""
        if ancestors.shape[1] == 1:
            return self
        return self._replace(**copied({name: getattr(self, name) for name in _COPIED}, ancestors))

    def resample(
        self, ancestors: torch.Tensor, log_weights: torch.Tensor, log_evidence: torch.Tensor
    ) -> "Population":
        """Descend to a resampling step's ancestors, with its weights and evidence."""
        return self.descend(ancestors)._replace(
            log_weights=log_weights, log_evidence=self.log_evidence + log_evidence
        )

    def extend(
        self, tokens: torch.Tensor, ends: torch.Tensor, decision: weighing.Decision
    ) -> "Population":
        """Append the kept draft tokens, and make each particle a copy of its ancestor.

        Args:
            tokens, ends: ``[G, N, K]`` of the drafts; the sequence ends with a token.
        """
        column = torch.arange(tokens.shape[2], device=tokens.device)
        kept = column < decision.num_kept.unsqueeze(2)  # [G, N, K]
        ended = self.ended | (ends & kept).any(2)
        extended = self.append(tokens, decision.num_kept)._replace(ended=ended)
        return extended.resample(decision.ancestors, decision.log_weights, decision.log_evidence)

    def narrow(
        self, seeds: torch.Tensor, lag: torch.Tensor, weighs: torch.Tensor, heaviest: torch.Tensor
    ) -> "Narrowed":
        """Resample the tokens beyond the lag, and the whole tails of finished groups.

        Args:
            seeds, lag: ``[G]`` int64.
            weighs: ``[G]`` bool; the others have no lag.
            heaviest: ``[G]`` bool, of `prefixes.narrow`.
        """
        longest = self.lengths.amax(1)
        finished = self.is_finished()
        late = (longest + 1 - lag).clamp_min(0) * weighs
        furthest = (self.num_emitted + longest).unsqueeze(1)  # [G, 1]
        ancestors, log_weights, log_mean, drops = prefixes.narrow(
            self.log_weights,
            self.texts[:, :, 1:],  # including the token before each tail
            self.lengths,
            # A particle may have no token but its own first one: that is drawn, too.
            torch.where(finished, longest.clamp_min(1), late),
            self.present,
            particle_uniforms(seeds, furthest, Purpose.SELECT)[:, 0],
            heaviest,
        )
        num_roots = weighing.num_distinct(self.roots, self.present)
        after = self.descend(ancestors)._replace(log_weights=log_weights)
        return Narrowed(
            population=after,
            ancestors=ancestors,
            dropped=drops & ~finished,
            log_evidence=self.log_evidence + log_mean,
            num_common=prefixes.common_tail(after.texts[:, :, 1:], after.lengths, self.present),
            num_roots=num_roots,
        )

    def is_finished(self) -> torch.Tensor:
        """Return which groups' answers may be drawn, ``[G]`` bool: all ended, with final values."""
        ended = self.ended.all(1)
        if self.scores is None:
            return ended
        return ended & (self.scores.complete | ~self.present).all(1)

    def resize(self, num_particles: torch.Tensor) -> "Population":
        """Keep the first ``num_particles`` ``[G]`` places of particles alone."""
        place = torch.arange(self.present.shape[1], device=num_particles.device)
        present = place < num_particles.unsqueeze(1)
        return self._replace(
            lengths=self.lengths.masked_fill(~present, 0),
            ended=self.ended | ~present,
            present=present,
        )

    def stop(self, where: torch.Tensor) -> "Population":
        """End groups ``where`` ``[G]`` bool, without their tails: they emit no more tokens."""
        all_of = where.unsqueeze(1)
        return self._replace(
            lengths=torch.where(all_of, 0, self.lengths),
            ended=self.ended | all_of,
            log_weights=torch.where(all_of & self.present, 0.0, self.log_weights),
        )

    def apply_potentials(self, scores: Scores) -> "Population":
        """Update the weights to new potential values; a group with no positive weight ends."""
        assert self.scores is not None, "carried where some request has scorers"
        log_before = self.scores.log_values
        log_weights, log_values = weighing.revalue(self.log_weights, log_before, scores.log_values)
        forbidden = (log_weights == -torch.inf).all(1)
        return self._replace(
            log_weights=log_weights,
            log_evidence=self.log_evidence.masked_fill(forbidden, -torch.inf),
            scores=scores._replace(log_values=log_values),
        ).stop(forbidden)

    def first_token(self) -> torch.Tensor:
        """Return the last emitted token of each group, ``[G]``; -1 where its particles differ.

        There no token after it is emitted.
        """
        shared = self.last_emitted[:, 0]
        alike = (self.last_emitted == shared.unsqueeze(1)) | ~self.present
        return torch.where(alike.all(1), shared, -1)

    def emit(self, counts: torch.Tensor) -> "Population":
        """Move the first ``counts[g]`` tokens, common to all tails, to the emitted output."""
        place = torch.arange(self.texts.shape[2], device=self.texts.device)
        source = (place + counts.view(-1, 1, 1)).clamp_max(len(place) - 1)
        return self._replace(
            texts=self.texts.gather(2, source.expand_as(self.texts)),
            lengths=(self.lengths - counts.unsqueeze(1)).clamp_min(0),  # absent particles have none
            num_emitted=self.num_emitted + counts,
            logprobs=None if self.logprobs is None else self.logprobs.emit(counts),
        )


class Narrowed(NamedTuple):
    """Particles at the end of a round, before emission."""

    population: Population
    ancestors: torch.Tensor  # [G, N] int64, in the last step
    dropped: torch.Tensor  # [G] bool: the lag bound dropped particles
    log_evidence: torch.Tensor  # [G] float64 log Z-hat, with the current mean weight
    num_common: torch.Tensor  # [G] int64 leading tokens that all tails share
    num_roots: torch.Tensor  # [G] int64 initial particles with descendants before this step

    def num_to_emit(self) -> torch.Tensor:
        """Return the common tokens ``[G]``, but none that ends a text before all have values."""
        after = self.population
        counts = self.num_common
        if after.scores is None:
            return counts
        shortest = after.lengths.masked_fill(~after.present, after.texts.shape[2]).amin(1)
        waits = after.ended.all(1) & ~after.is_finished()
        return torch.where(waits, torch.minimum(counts, shortest - 1).clamp_min(0), counts)
