"""Compute the log-probabilities that a request returns, as SGLang defines them.

They are the target's, after logit edits and at the request's temperature, but before top-k,
top-p and min-p (srt/layers/sampler.py:140, srt/layers/logprob_processor.py:276). With
SGLANG_RETURN_ORIGINAL_LOGPROB=1 the temperature is not applied either.
"""

from typing import NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_smc.kv.transfer import on_device
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import restrict
from sglang_smc.smc.population import Population, TailLogprobs

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
            log_p: ``[G, V]`` of the next token.
            tokens: ``[G, N]`` first tokens of the particles, or ``[G, 1]`` if all share one.
            output: receives the log-probabilities in the form of SGLang's sampler.
        """
        num_top = batch.top_logprobs_nums
        listed = batch.token_ids_logprobs
        assert num_top is not None and listed is not None, "there where a request asks for any"
        processor = OutputLogprobProcessor()
        found = processor.compute_logprobs(log_p, num_top, listed, tokens[:, 0])
        if found.token_ids_logprobs_val is not None:
            # SGLang leaves a list for a request without listed ids, but later expects tensors.
            values = found.token_ids_logprobs_val
            none = log_p.new_empty(0)
            found.token_ids_logprobs_val = [row if len(row) else none for row in values]
        found.write_output_to(output)
        self._first[batch.req_pool_indices] = log_p.gather(1, tokens).expand(-1, self._shape[1])
        self.prepare(batch)

    def prepare(self, batch: ScheduleBatch) -> None:
        """Make room for what new requests ask for, and store the ids that they list."""
        rows = batch.req_pool_indices
        listed = batch.token_ids_logprobs
        assert listed is not None, "there where a request asks for any"
        self.make_room(widths := LogprobWidths.of(batch.reqs))
        if widths.listed:
            lists = [(ids or [])[: widths.listed] for ids in listed]
            padded = [[*ids, *[0] * (widths.listed - len(ids))] for ids in lists]
            self._ids[rows, : widths.listed] = on_device(self._device, padded)

    def score_tails(
        self,
        rows: torch.Tensor,
        before: Population,
        population: Population,
        ancestors: torch.Tensor,
        p: TokenDistribution,
        temperature: torch.Tensor,
    ) -> Population:
        """Score the tokens that a round has appended, draft tokens and the target's own.

        The j-th of them is scored by column j of the ancestor's chain.

        Args:
            rows: ``[G]`` of the requests.
            before: population at the start of the round.
            population: population now.
            ancestors: ``[G, N]`` the earlier particle that each one continues.
            p: of all columns of all chains, edited and masked.
            temperature: ``[G]``.
        """
        logprobs = population.logprobs
        assert logprobs is not None, "gathered where some request returns them"
        num_groups, num_particles, width = population.tokens.shape
        starts = before.lengths.gather(1, ancestors)
        logits = p.scores.unflatten(0, (num_groups, -1))
        shown = logprob_distribution(type(p), logits, temperature)
        num_columns = shown.num_draws // ancestors.numel()
        column = torch.arange(num_columns, device=ancestors.device)
        # Places past a tail's new end are undefined, and the last is never part of a tail.
        place = (starts.unsqueeze(2) + column).clamp_max(width - 1)
        group = torch.arange(num_groups, device=ancestors.device).unsqueeze(1)
        chain = group * num_particles + ancestors  # [G, N]
        new = score(
            shown,
            population.tokens.gather(2, place),
            chain.unsqueeze(2) * num_columns + column,
            self._ids[rows, : logprobs.listed.shape[3]],
            logprobs.top.shape[3],
        )
        return population._replace(logprobs=logprobs.write(place, new))

    def emitted(self, rows: torch.Tensor, population: Population) -> Emitted:
        """Return the log-probabilities of each group's first particle."""
        assert population.logprobs is not None, "gathered where some request returns them"
        tails = TailLogprobs._make(column[:, 0] for column in population.logprobs)
        # A particle's first token is that of its first ancestor.
        return Emitted(tails, self._first[rows, population.roots[:, 0]])

    def gather(
        self, rows: torch.Tensor, population: Population, widths: LogprobWidths
    ) -> Population:
        """Return the population of the requests in ``rows`` ``[G]``, with log-probabilities."""
        _, num_particles, length = population.tokens.shape
        views = self._views(num_particles, length, widths.top, widths.listed)
        logprobs = TailLogprobs._make(view[rows] for view in views)
        return population._replace(logprobs=logprobs)

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
        top = top[..., :num_top]
        top_ids = top_ids[..., :num_top]
        return TailLogprobs(own, top, top_ids, listed[..., :num_listed])

    def make_room(self, widths: LogprobWidths) -> None:
        """Widen the table; graphs captured before write to the old `columns`, which none reads."""
        had = self.widths
        before = self.columns
        self.widths = LogprobWidths._make(map(max, had, widths))
        if self.widths == had:
            return

        def zeros(*width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((*self._shape, *width), dtype=dtype, device=self._device)

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


def reported_temperature(reqs: list[Req], temperature: torch.Tensor) -> torch.Tensor:
    """Return the temperatures ``[G]`` of the log-probabilities behind prompts; of scoring 1.

    A batch that only scores has no temperature in SGLang (srt/layers/logprob_processor.py:372);
    here the answer does not depend on the other requests of the batch.

    Args:
        temperature: ``[G]`` of the requests' samples.
    """
    scores = [req.sampling_params.max_new_tokens == 0 for req in reqs]
    if not any(scores):
        return temperature
    return temperature.masked_fill(on_device(temperature.device, scores), 1.0)


def logprob_distribution(
    kind: type[TokenDistribution],
    logits: torch.Tensor,
    temperature: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> TokenDistribution:
    """Return the distribution of the reported log-probabilities for logits.

    Args:
        kind: the class of the distribution, see `smc.ops`.
        logits: ``[G, ..., V]`` of the target, edited, with stop tokens that come too early masked.
        temperature: ``[G]``.
        allowed: ``[G, ..., V]`` bool mask of the requests' rules.
    """
    if envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        temperature = torch.ones_like(temperature)
    logits = logits.flatten(1, -2)
    if allowed is not None:
        logits, _ = restrict(logits, allowed.flatten(1, -2), temperature.unsqueeze(1))
    return kind(logits.flatten(0, 1), temperature)


def score(
    distribution: TokenDistribution,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    num_top: int,
) -> TailLogprobs:
    """Return log-probabilities of tokens, and of the likeliest and the listed tokens there.

    Args:
        distribution: of R rows, the same number for each group.
        tokens: ``[G, N, J]``.
        rows: ``[G, N, J]`` the row of each token.
        ids: ``[G, M]`` listed tokens of each group.
        num_top: W, the number of likeliest tokens.
    """
    lowest = torch.finfo(torch.float32).min  # SGLang's, in place of -inf
    own = distribution._replace(rows=rows.flatten()).score(tokens).clamp_min(lowest)
    if num_top == 0 and ids.shape[1] == 0:
        none = own.unsqueeze(3)[..., :0]
        return TailLogprobs(own, none, none.long(), none)
    log_p = distribution.log_probs()  # [R, V]
    top, top_ids = log_p.topk(num_top, dim=-1)
    by_group = log_p.unflatten(0, (len(ids), -1))
    listed = by_group.gather(2, ids.unsqueeze(1).expand(-1, by_group.shape[1], -1)).flatten(0, 1)
    top = top.clamp_min(lowest)
    listed = listed.clamp_min(lowest)
    return TailLogprobs(own, top[rows], top_ids[rows], listed[rows])
