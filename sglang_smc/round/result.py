"""The result of a round, and how the scheduler's books take it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_smc import process
from sglang_smc.drafts.corpus import Corpus
from sglang_smc.options.budget import Budget
from sglang_smc.options.policy import Policy
from sglang_smc.requests import rules
from sglang_smc.requests.failures import end_failed
from sglang_smc.requests.logprob_books import deliver
from sglang_smc.requests.state import as_particle, has_open_token, settled_ids, state_of, tails_of
from sglang_smc.round.draft_input import SMCDraftInput, as_eagle
from sglang_smc.round.trace import Traced
from sglang_smc.smc.rounds import choose
from sglang_smc.smc.weights import normalized
from sglang_smc.state.counters import gained
from sglang_smc.state.monitor import Monitor, Played
from sglang_smc.state.population import Population
from sglang_smc.state.tail_logprobs import Emitted
from sglang_smc.state.transfer import each_tensor, on_host

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class Particles(NamedTuple):
    """All particles as they stood before the final draw, or as the lag left them."""

    last_emitted: torch.Tensor  # [G, N]
    tokens: torch.Tensor  # [G, N, T] tails
    lengths: torch.Tensor  # [G, N]
    log_weights: torch.Tensor  # [G, N]
    present: torch.Tensor  # [G, N]
    finished: torch.Tensor  # [G] all have ended

    @classmethod
    def of(cls, continued: Population, narrowed: Population) -> "Particles":
        """Take each group's particles from before a narrowing, where all had ended, or behind it.

        A short lag may draw the text of a particle that has ended while others have not. All that
        are left are copies of it then, and SGLang ends the request as it finds the end in what is
        emitted: no final draw follows.
        """
        before, behind = (
            cls(
                population.last_emitted,
                population.tokens,
                population.lengths,
                population.log_weights,
                population.present,
                population.ended.all(1),
            )
            for population in (continued, narrowed)
        )
        return choose(before.finished, before, behind)

    def of_group(self, group: int, req: "Req") -> list[dict[str, Any]] | None:
        """One request's particles for `meta_info`; None while some have not ended."""
        if not self.finished[group]:
            return None
        shared = settled_ids(req)
        rows = zip(
            tails_of(req, self, group),
            normalized(self.log_weights[group]).tolist(),
            self.log_weights[group].tolist(),
            self.present[group].tolist(),
            strict=True,
        )
        return [
            as_particle([*shared, *tail], weight, log_weight)
            for tail, weight, log_weight, present in rows
            if present
        ]


class Outcome(NamedTuple):
    """What a round leaves for the host, on the device; tables hold the rest."""

    tokens: torch.Tensor  # [G, T]: the first counts[g] are emitted
    counts: torch.Tensor  # [G]
    new_seq_lens: torch.Tensor  # [G]
    last_emitted: torch.Tensor  # [G] last emitted tokens
    num_correct_drafts: torch.Tensor  # [G] drafted tokens that the round kept
    counters: torch.Tensor  # [G, len(Counters)] float64
    failure: torch.Tensor  # [G] int64 `Failure`; such a request has emitted nothing
    first_tokens: torch.Tensor | None  # [G] token that prefill drew, -1 while particles differ
    particles: Particles | None  # where some request wants them
    logprobs: Emitted | None  # of tokens and first_tokens, where some request wants them
    trace: Traced | None = None  # where some request wants one

    def first(self, size: int) -> "Outcome":
        """Copies of the first groups."""
        return each_tensor(lambda column: column[:size].clone(), self)


_OF_SGLANG = {field.name for field in fields(GenerationBatchResult)}


@dataclass
class SMCBatchResult(GenerationBatchResult):
    """A `GenerationBatchResult` with what SMC adds; filled by the worker, read on the host."""

    correct_drafts: torch.Tensor | None = None  # [G] drafted tokens that the round kept
    counters: torch.Tensor | None = None  # [G, len(Counters)] float64
    failure: torch.Tensor | None = None  # [G] int64 `Failure`
    particles: Particles | None = None  # where some request wants them
    first_tokens: torch.Tensor | None = (
        None  # [G] token that prefill drew, -1 while particles differ
    )
    logprobs: Emitted | None = None  # of tokens and first_tokens, where some request wants them
    trace: Traced | None = None  # where some request wants one
    monitor: Monitor | None = None
    budgets: list[Budget] | None = None  # N and K of each request in this round
    policy: Policy | None = None  # that learns from them
    corpus: Corpus | None = None  # that reads what is emitted

    @classmethod
    def of(cls, outcome: Outcome, monitor: Monitor, replayed: bool = False) -> "SMCBatchResult":
        """A round's outcome, as the scheduler takes it.

        Args:
            outcome: of the round.
            monitor: that counts it.
            replayed: whether the round was a recorded graph.
        """
        tokens = outcome.tokens.flatten()
        return cls(
            next_token_ids=tokens,
            accept_lens=outcome.counts,
            new_seq_lens=outcome.new_seq_lens,
            next_draft_input=as_eagle(SMCDraftInput(outcome.last_emitted)),
            speculative_num_draft_tokens=outcome.tokens.shape[1],
            correct_drafts=outcome.num_correct_drafts,
            counters=outcome.counters,
            failure=outcome.failure,
            first_tokens=outcome.first_tokens,
            particles=outcome.particles,
            logits_output=None
            if outcome.logprobs is None
            else LogitsProcessorOutput(next_token_logits=None),
            logprobs=outcome.logprobs,
            trace=outcome.trace,
            can_run_cuda_graph=replayed,
            monitor=monitor,
            # SGLang drops these two batches later, when it has waited for the copies: until then
            # the memory must not be had by the next round, on the stream that made them.
            extra_keep_alive_refs=[outcome, tokens],
        )

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Copy what this class adds to the host along with SGLang's, on the stream for copies.

        All of it, so that no field is forgotten. What the next round reads on the device stands in
        SGLang's own fields.
        """
        for field in fields(self):
            if field.name not in _OF_SGLANG:
                setattr(self, field.name, on_host(getattr(self, field.name)))
        super().copy_to_cpu(*args, **kwargs)

    def resolve(
        self, batch: "ScheduleBatch", resolve: Callable[[], list[list[int]]]
    ) -> list[list[int]]:
        """Run SGLang's ``resolve`` of the emitted tokens, with SMC's statistics for its own.

        SGLang takes what a round emits, less one, for correct drafts. An SMC round may emit
        nothing, or several rounds' tokens at once; what is true is how many columns it kept.
        """
        assert self.correct_drafts is not None and self.counters is not None
        assert self.monitor is not None and self.failure is not None
        live = [not (req.is_retracted or req.finished()) for req in batch.reqs]
        before = [_set_aside(req) for req in batch.reqs]
        totals = self.counters.tolist()
        self._keep_particles(batch.reqs, live)
        self._settle(batch.reqs, live)
        self._end_stuck(batch.reqs, live, totals)
        tokens = resolve()
        process.check_ranks(tokens)
        kept = self.correct_drafts.tolist()
        self.num_correct_drafts, self.num_correct_drafts_per_req_cpu = sum(kept), kept
        if self.logprobs is not None:
            assert self.logits_output is not None
            deliver(self.logits_output, self.logprobs.tails, list(map(len, tokens)), batch.reqs)
        for i, req in enumerate(batch.reqs):
            req.spec_num_correct_drafts, req.spec_correct_drafts_histogram = before[i]
            if live[i]:
                self._take(i, req, kept[i], tokens[i], totals[i])
                if self.corpus is not None:
                    self.corpus.read(req, tokens[i])
        self.monitor.end_round()
        if self.policy is not None:
            self.policy.end_round()
        return tokens

    def _take(
        self, group: int, req: "Req", num_kept: int, emitted: list[int], totals: list[float]
    ) -> None:
        """Book one request's round."""
        assert self.monitor is not None and self.failure is not None
        state = state_of(req)
        req.spec_num_correct_drafts += num_kept
        req.update_spec_correct_drafts_histogram(num_kept)
        gains = gained(state.counters, totals)
        config, replayed = state.config, self.can_run_cuda_graph
        kinds = config.weighs, num_kept, len(emitted), replayed, config.greedy
        self.monitor.add(Played(gains, *kinds))
        if self.policy is not None and self.budgets is not None:
            self.policy.learn(self.budgets[group], num_kept)
        state.take(totals, replayed)
        end_failed(req, int(self.failure[group]))
        if self.trace is not None and config.trace:
            state.rounds.append(self.trace.record_of(group, state, emitted, totals[-1]))

    def _keep_particles(self, reqs: "list[Req]", live: list[bool]) -> None:
        """Show all particles to who wants them, while first tokens are still each one's own."""
        if self.particles is None:
            return
        for group, req in enumerate(reqs):
            state = state_of(req)
            if live[group] and state.config.return_particles:
                state.particles = self.particles.of_group(group, req)

    def _settle(self, reqs: "list[Req]", live: list[bool]) -> None:
        """Give open first tokens their values, before rules read what follows them."""
        if self.first_tokens is None:
            return
        each = zip(reqs, self.first_tokens.tolist(), live, strict=True)
        for i, (req, token, lives) in enumerate(each):
            if lives and token >= 0 and has_open_token(req):
                logprobs = self.logprobs if req.return_logprob else None
                rules.settle(req, token, None if logprobs is None else float(logprobs.first[i]))

    def _end_stuck(self, reqs: "list[Req]", live: list[bool], totals: list[list[float]]) -> None:
        """End requests whose particles all weigh nothing: their rules leave no text."""
        assert self.accept_lens is not None
        for i, req in enumerate(reqs):
            if live[i] and totals[i][-1] == -math.inf and rules.end_stuck(req):
                self.accept_lens[i], live[i] = 0, False


def _set_aside(req: "Req") -> tuple[int, list[int]]:
    """Take a request's accept statistics, and leave a histogram that even -1 can index."""
    saved = req.spec_num_correct_drafts, req.spec_correct_drafts_histogram
    req.spec_correct_drafts_histogram = [0]
    return saved
