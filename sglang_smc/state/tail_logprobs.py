"""Where log-probabilities wait while particles may still drop their tokens.

A token is scored when the target has seen its particle, and emitted rounds later, if ever. Until
then its log-probabilities lie beside the tail that it is in, and go where the tail goes. They are
carried only in batches where some request wants them.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

from sglang_smc.state.transfer import on_device

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

MOST_LISTED = 128
"""The most likeliest tokens, and the most tokens of its own choice, that a request may ask for
beside each generated one: what a tail holds is bounded."""


class LogprobWidths(NamedTuple):
    """How much is wanted in a batch, known to the host."""

    own: int  # 1 where some request wants log-probabilities at all
    top: int  # the most likeliest tokens beside each
    listed: int  # the most tokens of its own choice beside each

    @classmethod
    def of(cls, reqs: "list[Req]") -> "LogprobWidths":
        """The most that requests want of a round; scoring ones get theirs in prefill."""
        asking = [req for req in reqs if req.return_logprob]
        rounds = [req.logprob for req in asking if req.sampling_params.max_new_tokens]
        return cls(
            own=int(bool(asking)),
            top=max((books.top_logprobs_num for books in rounds), default=0),
            listed=max((len(books.token_ids_logprob or ()) for books in rounds), default=0),
        )


NO_LOGPROBS = LogprobWidths(0, 0, 0)


def recorded_logprobs(vocab_size: int) -> LogprobWidths:
    """What recorded rounds do: OpenAI's clients ask for 20 at most."""
    return LogprobWidths(own=1, top=min(20, vocab_size), listed=16)


class TailLogprobs(NamedTuple):
    """Log-probabilities along the tails of G * N particles; methods return new ones.

    Past a tail's length, and past what a request asked for, entries mean nothing.
    """

    own: torch.Tensor  # [G, N, T] float32
    top: torch.Tensor  # [G, N, T, W] float32, descending
    top_ids: torch.Tensor  # [G, N, T, W] int64
    listed: torch.Tensor  # [G, N, T, M] float32

    def descend(self, ancestors: torch.Tensor) -> "TailLogprobs":
        """Make particle n a copy of ``ancestors[g, n]``."""
        return TailLogprobs(*(column.gather(1, _like(ancestors, column, 2)) for column in self))

    def write(self, place: torch.Tensor, new: "TailLogprobs") -> "TailLogprobs":
        """Put ``new``, ``[G, N, J, ...]``, in places ``[G, N, J]`` of the tails."""
        pairs = zip(self, new, strict=True)
        return TailLogprobs(*(old.scatter(2, _like(place, more, 3), more) for old, more in pairs))

    def emit(self, counts: torch.Tensor) -> "TailLogprobs":
        """Drop the first ``counts[g]`` of each tail."""
        place = torch.arange(self.own.shape[2], device=counts.device)
        source = (place + counts.view(-1, 1, 1)).clamp_max(len(place) - 1).expand_as(self.own)
        return TailLogprobs(*(column.gather(2, _like(source, column, 3)) for column in self))


class Emitted(NamedTuple):
    """What a round shows of each group's first particle, whose tokens it emits."""

    tails: TailLogprobs  # [G, T, ...]
    first: torch.Tensor  # [G] float32, of the token that it began with


class LogprobTable:
    """Log-probabilities of tails between rounds, one row a request; made as the first request asks.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        num_particles: N.
        max_tail: the longest tail, in tokens.
    """

    def __init__(self, num_rows: int, num_particles: int, max_tail: int, device: str) -> None:
        self._shape = (num_rows, num_particles, max_tail + 1)
        self._device = device
        self._widths = NO_LOGPROBS
        self._columns: TailLogprobs | None = None
        self._ids = torch.zeros(num_rows, MOST_LISTED, dtype=torch.int64, device=device)
        self._first = torch.zeros(num_rows, num_particles, device=device)

    def begin(
        self,
        batch: "ScheduleBatch",
        log_p: torch.Tensor,
        tokens: torch.Tensor,
        output: "LogitsProcessorOutput",
    ) -> None:
        """Start requests, and let SGLang have what it asks of their first tokens.

        Args:
            batch: the requests that have been prefilled.
            log_p: ``[G, V]`` of the next token.
            tokens: ``[G, N]`` that particles begin with, or one for all, ``[G, 1]``.
            output: takes the log-probabilities, as a stock sampler leaves them.
        """
        num_top, listed = batch.top_logprobs_nums, batch.token_ids_logprobs
        assert num_top is not None and listed is not None, "there where a request asks for any"
        processor = OutputLogprobProcessor()
        found = processor.compute_logprobs(log_p, num_top, listed, tokens[:, 0])
        if found.token_ids_logprobs_val is not None:
            # SGLang leaves a list for who asked for none, and then takes all for tensors.
            values, none = found.token_ids_logprobs_val, log_p.new_empty(0)
            found.token_ids_logprobs_val = [row if len(row) else none for row in values]
        found.write_output_to(output)
        widths, rows = LogprobWidths.of(batch.reqs), batch.req_pool_indices
        self.make_room(widths)
        self._first[rows] = log_p.gather(1, tokens).expand(-1, self._shape[1])
        if widths.listed:
            lists = [(ids or [])[: widths.listed] for ids in listed]
            padded = [[*ids, *[0] * (widths.listed - len(ids))] for ids in lists]
            self._ids[rows, : widths.listed] = on_device(self._device, padded)

    @property
    def widths(self) -> LogprobWidths:
        """What there is room for. Recorded rounds write where the table was when they were made."""
        return self._widths

    def listed_ids(self, rows: torch.Tensor, num_listed: int) -> torch.Tensor:
        """Tokens of their own choice that the requests in ``rows`` listed, ``[G, num_listed]``."""
        return self._ids[rows, :num_listed]

    def emitted(self, rows: torch.Tensor, logprobs: TailLogprobs, roots: torch.Tensor) -> Emitted:
        """What each group's first particle shows, of roots ``[G]``."""
        tails = TailLogprobs(*(column[:, 0] for column in logprobs))
        # A particle began with what its first ancestor did.
        return Emitted(tails, self._first[rows, roots])

    def gather(
        self, rows: torch.Tensor, num_particles: int, max_tail: int, widths: LogprobWidths
    ) -> TailLogprobs:
        """The log-probabilities of the requests in ``rows`` ``[G]``, no more than they need.

        Args:
            num_particles, max_tail: sizes of the populations, as for `ParticleTable.gather`.
            widths: what is wanted of them.
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
        """The part of the table that this much needs."""
        assert self._columns is not None
        own, top, top_ids, listed = (column[:, :num_particles, :length] for column in self._columns)
        tops = top[..., :num_top], top_ids[..., :num_top]
        return TailLogprobs(own, *tops, listed[..., :num_listed])

    def make_room(self, widths: LogprobWidths) -> None:
        """Widen the table to what these requests want; it never shrinks.

        Once rounds are recorded, this leaves them a table that nobody reads any more: see `widths`.
        """
        had, before = self._widths, self._columns
        self._widths = LogprobWidths(*map(max, had, widths))
        if self._widths == had:
            return

        def zeros(*width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*self._shape, *width, dtype=dtype, device=self._device)

        num_top = self._widths.top
        self._columns = TailLogprobs(
            own=zeros(),
            top=zeros(num_top),
            top_ids=zeros(num_top, dtype=torch.int64),
            listed=zeros(self._widths.listed),
        )
        if before is not None:
            for view, values in zip(self._views(*self._shape[1:], *had[1:]), before, strict=True):
                view.copy_(values)


def _like(index: torch.Tensor, column: torch.Tensor, num_dims: int) -> torch.Tensor:
    """An index over a column's first dimensions, the same for all that lies behind them."""
    behind = column.shape[num_dims:]
    return index.view(*index.shape, *[1] * len(behind)).expand(*index.shape, *behind)
