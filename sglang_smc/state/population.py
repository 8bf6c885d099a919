"""Hold the particles of all requests in device tables.

One row of each table belongs to one request, under its index in SGLang's `req_to_token_pool`. A
particle is the request's emitted tokens plus a *tail* of tokens that are not emitted yet, because
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

from typing import NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from torch.utils._pytree import tree_leaves, tree_map_only

from sglang_smc.kv.transfer import on_device
from sglang_smc.smc import weighing
from sglang_smc.smc.fidelity import NAMES

MOST_LISTED = 128
"""Maximum of `top_logprobs_num`, and of listed token ids, per request: it bounds the memory of a
tail."""


class LogprobWidths(NamedTuple):
    """Widths of the log-probabilities that a batch needs, on the host."""

    own: int  # 1 where some request sets return_logprob
    top: int  # maximum of top_logprobs_num
    listed: int  # maximum number of listed token ids

    @classmethod
    def of(cls, reqs: list[Req], returned: bool = False) -> "LogprobWidths":
        """Return the widths that a round needs; scoring requests get theirs in prefill.

        Args:
            returned: SGLang reads some, though the request that asked may have failed since.
        """
        asking = [req for req in reqs if req.return_logprob]
        rounds = [req.logprob for req in asking if req.sampling_params.max_new_tokens]
        return cls(
            own=int(returned or bool(asking)),
            top=max((fields.top_logprobs_num for fields in rounds), default=0),
            listed=max((len(fields.token_ids_logprob or ()) for fields in rounds), default=0),
        )


NO_LOGPROBS = LogprobWidths(0, 0, 0)


def recorded_logprobs(vocab_size: int) -> LogprobWidths:
    """Return the widths of captured rounds; OpenAI clients may request at most 20 top tokens."""
    return LogprobWidths(own=1, top=min(20, vocab_size), listed=16)


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
        return TailLogprobs(*(old.scatter(2, _like(place, more), more) for old, more in pairs))

    def emit(self, counts: torch.Tensor) -> "TailLogprobs":
        """Drop the first ``counts[g]`` entries of each tail."""
        place = torch.arange(self.own.shape[2], device=counts.device)
        source = (place + counts.view(-1, 1, 1)).clamp_max(len(place) - 1).expand_as(self.own)
        return TailLogprobs(*(column.gather(2, _like(source, column)) for column in self))


class Emitted(NamedTuple):
    """Log-probabilities of each group's first particle, from which tokens are emitted."""

    tails: TailLogprobs  # [G, T, ...]
    first: torch.Tensor  # [G] float32, of the particle's first token


class LogprobTable:
    """Log-probabilities of tails between rounds, one row per request; allocated at first use.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        num_particles: N.
        max_tail: the longest tail, in tokens.
    """

    def __init__(self, num_rows: int, num_particles: int, max_tail: int, device: str) -> None:
        self._shape = (num_rows, num_particles, max_tail + 1)
        self._device = device
        self.widths = NO_LOGPROBS  # captured rounds write to the table of their capture time
        self.columns: TailLogprobs | None = None
        self._ids = torch.zeros(num_rows, MOST_LISTED, dtype=torch.int64, device=device)
        self._first = torch.zeros(num_rows, num_particles, device=device)

    def begin(
        self,
        batch: ScheduleBatch,
        log_p: torch.Tensor,
        tokens: torch.Tensor,
        output: LogitsProcessorOutput,
    ) -> None:
        """Start requests, and return the log-probabilities of their first tokens to SGLang.

        Args:
            batch: the requests that have been prefilled.
            log_p: ``[G, V]`` of the next token.
            tokens: ``[G, N]`` first tokens of the particles, or ``[G, 1]`` if all share one.
            output: receives the log-probabilities in the form of SGLang's sampler.
        """
        num_top, listed = batch.top_logprobs_nums, batch.token_ids_logprobs
        assert num_top is not None and listed is not None, "there where a request asks for any"
        processor = OutputLogprobProcessor()
        found = processor.compute_logprobs(log_p, num_top, listed, tokens[:, 0])
        if found.token_ids_logprobs_val is not None:
            # SGLang leaves a list for a request without listed ids, but later expects tensors.
            values, none = found.token_ids_logprobs_val, log_p.new_empty(0)
            found.token_ids_logprobs_val = [row if len(row) else none for row in values]
        found.write_output_to(output)
        self._first[batch.req_pool_indices] = log_p.gather(1, tokens).expand(-1, self._shape[1])
        self.prepare(batch)

    def prepare(self, batch: ScheduleBatch) -> None:
        """Make room for what new requests ask for, and store the ids that they list."""
        rows, listed = batch.req_pool_indices, batch.token_ids_logprobs
        assert listed is not None, "there where a request asks for any"
        self.make_room(widths := LogprobWidths.of(batch.reqs))
        if widths.listed:
            lists = [(ids or [])[: widths.listed] for ids in listed]
            padded = [[*ids, *[0] * (widths.listed - len(ids))] for ids in lists]
            self._ids[rows, : widths.listed] = on_device(self._device, padded)

    def listed_ids(self, rows: torch.Tensor, num_listed: int) -> torch.Tensor:
        """Return the token ids that the requests in ``rows`` list, ``[G, num_listed]``."""
        return self._ids[rows, :num_listed]

    def emitted(self, rows: torch.Tensor, logprobs: TailLogprobs, roots: torch.Tensor) -> Emitted:
        """Return the log-probabilities of each group's first particle, of roots ``[G]``."""
        tails = TailLogprobs(*(column[:, 0] for column in logprobs))
        # A particle's first token is that of its first ancestor.
        return Emitted(tails, self._first[rows, roots])

    def gather(
        self, rows: torch.Tensor, num_particles: int, max_tail: int, widths: LogprobWidths
    ) -> TailLogprobs:
        """Return the log-probabilities of the requests in ``rows`` ``[G]``, no more than needed.

        Args:
            num_particles, max_tail: sizes of the populations, as for `ParticleTable.gather`.
            widths: of the batch.
        """
        views = self._views(num_particles, max_tail + 1, widths.top, widths.listed)
        return TailLogprobs(*(view[rows] for view in views))

    def scatter(self, rows: torch.Tensor, logprobs: TailLogprobs) -> None:
        """Store the log-probabilities of the requests in ``rows`` ``[G]``."""
        _, num_particles, length, num_listed = logprobs.listed.shape
        views = self._views(num_particles, length, logprobs.top.shape[3], num_listed)
        for view, values in zip(views, logprobs, strict=True):
            view[rows] = values

    def _views(
        self, num_particles: int, length: int, num_top: int, num_listed: int
    ) -> TailLogprobs:
        """Return the part of the table with these sizes."""
        assert self.columns is not None
        own, top, top_ids, listed = (column[:, :num_particles, :length] for column in self.columns)
        tops = top[..., :num_top], top_ids[..., :num_top]
        return TailLogprobs(own, *tops, listed[..., :num_listed])

    def make_room(self, widths: LogprobWidths) -> None:
        """Widen the table; graphs captured before write to the old `columns`, which none reads."""
        had, before = self.widths, self.columns
        self.widths = LogprobWidths(*map(max, had, widths))
        if self.widths == had:
            return

        def zeros(*width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*self._shape, *width, dtype=dtype, device=self._device)

        num_top = self.widths.top
        self.columns = TailLogprobs(
            own=zeros(),
            top=zeros(num_top),
            top_ids=zeros(num_top, dtype=torch.int64),
            listed=zeros(self.widths.listed),
        )
        if before is not None:
            for view, values in zip(self._views(*self._shape[1:], *had[1:]), before, strict=True):
                view.copy_(values)


def _like(index: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Expand an index over a column's first dimensions to all its trailing ones."""
    trailing = column.shape[index.dim() :]
    return index.view(*index.shape, *[1] * len(trailing)).expand(*index.shape, *trailing)


class Scores(NamedTuple):
    """Potential values of G * N particles."""

    log_values: torch.Tensor  # [G, N] float64: log phi; NaN, from the host, keeps the old value
    complete: torch.Tensor  # [G, N] bool: of the whole sequence, or of a request without potentials


# Columns of `Population.texts` beside the longest tail: two tokens before it, a spare one after it.
_NO_TAIL = 3
_COPIED = "texts", "lengths", "ended", "roots", "fidelity", "logprobs", "scores"  # of a particle


class Population(NamedTuple):
    """Particles of the G groups in a batch. Every method returns a new one."""

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
    def uncounted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return starts, texts and lengths of `smc.edits.Edits`.

        The last emitted token is not in the counts: particles may differ in a first token.
        """
        return self.output_lengths, self.texts[:, :, 1:], self.lengths + 1

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

    def descend(self, ancestors: torch.Tensor) -> "Population":
        """Make particle n a copy of ``ancestors[g, n]``; the caller sets the weights."""
        if ancestors.shape[1] == 1:
            return self
        own = {name: getattr(self, name) for name in _COPIED}
        copies = tree_map_only(torch.Tensor, lambda of: of.gather(1, _like(ancestors, of)), own)
        return self._replace(**copies)

    def resample(
        self, ancestors: torch.Tensor, log_weights: torch.Tensor, log_evidence: torch.Tensor
    ) -> "Population":
        """Descend to a resampling step's ancestors, with its weights and evidence."""
        return self.descend(ancestors)._replace(
            log_weights=log_weights, log_evidence=self.log_evidence + log_evidence
        )

    def is_finished(self) -> torch.Tensor:
        """Return which groups' answers may be drawn, ``[G]`` bool: all ended, with final values."""
        ended = self.ended.all(1)
        if self.scores is None:
            return ended
        return ended & (self.scores.complete | ~self.present).all(1)

    def held_back(self, counts: torch.Tensor) -> torch.Tensor:
        """Limit common tokens ``counts`` ``[G]``: none ends a sequence before all have values."""
        shortest = self.lengths.masked_fill(~self.present, self.texts.shape[2]).amin(1)
        waits = self.ended.all(1) & ~self.is_finished()
        return torch.where(waits, torch.minimum(counts, shortest - 1).clamp_min(0), counts)

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
        held = self.scores.log_values
        log_weights, log_values = weighing.revalue(self.log_weights, held, scores.log_values)
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


class ParticleTable:
    """Populations between rounds, one row per request.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        num_particles: N.
        max_tail: the longest tail, in tokens.
    """

    def __init__(self, num_rows: int, num_particles: int, max_tail: int, device: str) -> None:
        shape = (num_rows, num_particles)

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.num_particles = num_particles
        self.logprobs = LogprobTable(num_rows, num_particles, max_tail, device)
        self._columns = Population(
            texts=zeros(*shape, max_tail + _NO_TAIL),
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
    ) -> Population:
        """Return the populations of the requests in ``rows`` ``[G]``, no larger than needed.

        Args:
            num_particles: the most that any of them has.
            max_tail: the longest tail that any of them can reach in the round.
            scored: whether they carry potential values.
        """
        views = self._views(num_particles, max_tail + _NO_TAIL, scored)
        return tree_map_only(torch.Tensor, lambda view: view[rows], views)

    def scatter(self, rows: torch.Tensor, population: Population) -> None:
        """Store the populations of ``rows`` ``[G]``, with what they carry."""
        _, num_particles, width = population.texts.shape
        views = self._views(num_particles, width, population.scores is not None)
        values = tree_leaves(population._replace(logprobs=None))
        for view, of_batch in zip(tree_leaves(views), values, strict=True):
            if of_batch is not None:
                view[rows] = of_batch
        if population.logprobs is not None:
            self.logprobs.scatter(rows, population.logprobs)

    def _views(self, num_particles: int, width: int, scored: bool) -> Population:
        """Return the part of the table for populations of this size."""
        columns = self._columns if scored else self._columns._replace(scores=None)
        cut = slice(None), slice(num_particles)
        few = tree_map_only(torch.Tensor, lambda column: column[cut[: column.dim()]], columns)
        return few._replace(texts=few.texts[:, :, :width])

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
