"""Log-probabilities of the tokens that a request gets back, as SGLang defines them.

They are the target's, after what edits logits and at the request's temperature, but before top-k,
top-p and min-p cut tokens (srt/layers/sampler.py:140, srt/layers/logprob_processor.py:276). With
SGLANG_RETURN_ORIGINAL_LOGPROB=1 the temperature stays out of them, too.

A token is scored when the target has seen its particle, and emitted rounds later, if ever. Until
then its log-probabilities lie beside the tail that it is in, and go where the tail goes. They are
carried only in batches where some request wants them.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

from sglang_smc.ops.interface import Ops
from sglang_smc.smc.masking import restrict
from sglang_smc.state.distribution import TokenDistribution

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_smc.state.population import Population
    from sglang_smc.state.settings import FilterKinds, Settings

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
        """Of these requests; scoring ones get all that they ask for in prefill."""
        asking = [req for req in reqs if req.return_logprob]
        rounds = [req.logprob for req in asking if req.sampling_params.max_new_tokens]
        return cls(
            own=int(bool(asking)),
            top=max((books.top_logprobs_num for books in rounds), default=0),
            listed=max((len(books.token_ids_logprob or ()) for books in rounds), default=0),
        )


NO_LOGPROBS = LogprobWidths(0, 0, 0)


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
    first_tokens: torch.Tensor  # [G] float32, of the token that it began with

    def to_cpu(self) -> "Emitted":
        """Copies on the host, there once the device has come so far."""
        tails = (column.to("cpu", non_blocking=True) for column in self.tails)
        return Emitted(TailLogprobs(*tails), self.first_tokens.to("cpu", non_blocking=True))


def logprob_distribution(
    settings: "Settings",
    logits: torch.Tensor,
    positions: torch.Tensor,
    kinds: "FilterKinds",
    *,
    allowed: torch.Tensor | None = None,
) -> TokenDistribution:
    """What log-probabilities are taken from, for the ``G * M`` rows of the target's logits.

    Arguments as for `Settings.law`, the logits edited.
    """
    temperature = settings.temperature  # [G]
    if envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        temperature = torch.ones_like(temperature)
    if kinds.early or allowed is not None:
        logits = settings.without_early_ends(logits, positions)
    if allowed is not None:
        logits, _ = restrict(logits, allowed, temperature.unsqueeze(1))
    return TokenDistribution(logits.flatten(0, 1), temperature)


def score(
    ops: Ops,
    law: TokenDistribution,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    num_top: int,
) -> TailLogprobs:
    """Log-probabilities of tokens, and of the likeliest and the listed ones in their places.

    Args:
        law: of R rows, the same number for each group.
        tokens: ``[G, N, J]``.
        rows: ``[G, N, J]`` the row that each token was drawn from.
        ids: ``[G, M]`` listed tokens of each group.
        num_top: W.
    """
    lowest = torch.finfo(torch.float32).min  # SGLang's, in place of -inf
    own = law.of_rows(rows.flatten()).score(ops, tokens).clamp_min(lowest)
    if num_top == 0 and ids.shape[1] == 0:
        none = own.unsqueeze(3)[..., :0]
        return TailLogprobs(own, none, none.long(), none)
    log_p = law.log_probs()  # [R, V]
    top, top_ids = log_p.topk(num_top, dim=-1)
    by_group = log_p.unflatten(0, (len(ids), -1))
    listed = by_group.gather(2, ids.unsqueeze(1).expand(-1, by_group.shape[1], -1)).flatten(0, 1)
    top, listed = top.clamp_min(lowest), listed.clamp_min(lowest)
    return TailLogprobs(own, top[rows], top_ids[rows], listed[rows])


class LogprobTable:
    """Where they live between rounds, one row a request; made when the first request asks.

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
        wanted = batch.top_logprobs_nums, batch.token_ids_logprobs
        found = OutputLogprobProcessor().compute_logprobs(log_p, *wanted, tokens[:, 0])
        if found.token_ids_logprobs_val is not None:
            # SGLang leaves a list for who asked for none, and then takes all for tensors.
            values, none = found.token_ids_logprobs_val, log_p.new_empty(0)
            found.token_ids_logprobs_val = [row if len(row) else none for row in values]
        found.write_output_to(output)
        widths, rows = LogprobWidths.of(batch.reqs), batch.req_pool_indices
        self._make_room(widths)
        self._first[rows] = log_p.gather(1, tokens).expand(-1, self._shape[1])
        if widths.listed:
            lists = [(ids or [])[: widths.listed] for ids in batch.token_ids_logprobs]
            padded = torch.tensor([[*ids, *[0] * (widths.listed - len(ids))] for ids in lists])
            self._ids[rows, : widths.listed] = padded.to(self._device, non_blocking=True)

    def note(
        self,
        rows: torch.Tensor,
        before: "Population",
        population: "Population",
        ancestors: torch.Tensor,
        shown: TokenDistribution,
        ops: Ops,
    ) -> "Population":
        """Note what the target says of the tokens that a round has added, drafted or its own.

        The j-th of them was decided by column j of the ancestor's chain.

        Args:
            rows: ``[G]``.
            before: as the round began.
            population: as it is now.
            ancestors: ``[G, N]`` whose text each particle goes on with.
            shown: of all columns of all chains.
        """
        assert population.logprobs is not None
        num_groups, num_particles, width = population.tokens.shape
        starts = before.lengths.gather(1, ancestors)
        num_columns = shown.num_draws // ancestors.numel()
        column = torch.arange(num_columns, device=rows.device)
        # KVLocations past a tail's new end mean nothing, and the last is never part of a tail.
        place = (starts.unsqueeze(2) + column).clamp_max(width - 1)
        group = torch.arange(num_groups, device=rows.device).unsqueeze(1)
        chain = group * num_particles + ancestors  # [G, N]
        new = score(
            ops,
            shown,
            population.tokens.gather(2, place),
            chain.unsqueeze(2) * num_columns + column,
            self._ids[rows, : population.logprobs.listed.shape[3]],
            population.logprobs.top.shape[3],
        )
        return population._replace(logprobs=population.logprobs.write(place, new))

    def emitted(self, rows: torch.Tensor, population: "Population") -> Emitted | None:
        """Those of the groups' first particles; None where nobody wants any."""
        if population.logprobs is None:
            return None
        tails = TailLogprobs(*(column[:, 0] for column in population.logprobs))
        # A particle began with what its first ancestor did.
        return Emitted(tails, self._first[rows, population.roots[:, 0]])

    def gather(
        self, rows: torch.Tensor, num_particles: int, max_tail: int, widths: LogprobWidths
    ) -> TailLogprobs | None:
        """As `ParticleTable.gather`; None where nobody wants any."""
        if not widths.own:
            return None
        views = self._views(num_particles, max_tail + 1, widths.top, widths.listed)
        return TailLogprobs(*(view[rows] for view in views))

    def scatter(self, rows: torch.Tensor, logprobs: TailLogprobs) -> None:
        """As `ParticleTable.scatter`."""
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

    def _make_room(self, widths: LogprobWidths) -> None:
        """Widen the table to what these requests want; it never shrinks."""
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
