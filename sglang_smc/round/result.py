"""Return the result of a round to SGLang's scheduler, and carry it to the next round.

SGLang carries only the batch's requests from round to round: the state of a round stays on the
device, in tables keyed by `req_pool_idx`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_smc import process, upstream
from sglang_smc.kv.transfer import each_tensor, on_host
from sglang_smc.options.policy import Policy
from sglang_smc.options.request import Budget
from sglang_smc.proposers.ngram import Corpus
from sglang_smc.round.trace import Stages
from sglang_smc.rules import registry
from sglang_smc.smc.population import Population
from sglang_smc.smc.weighing import choose
from sglang_smc.state.logprobs import Emitted
from sglang_smc.state.metrics import Monitor, Played, gained
from sglang_smc.state.request import deliver, has_open_token, particles_of, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.speculative.eagle_info import EagleDraftInput


class LengthRelay(FutureMap):
    """Relay of sequence lengths between rounds; the tokens are in this package's tables."""

    def _resolve_spec_extras(self, batch: "ScheduleBatch") -> None:
        """Do nothing; SGLang's own method also assumes that every device has streams."""


class SMCDraftInput(SpecInput):
    """`spec_info` of a running batch.

    Args:
        bonus_tokens: ``[bs]`` last emitted tokens, for SGLang's relay between rounds.
    """

    # Read by the relay; None as in SGLang's STANDALONE.
    topk_p = topk_index = hidden_states = dsa_topk_indices = None

    def __init__(self, bonus_tokens: torch.Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.future_indices: torch.Tensor | None = None  # set by the scheduler when it overlaps

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        self.bonus_tokens = self.bonus_tokens[new_indices]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: "SMCDraftInput") -> None:
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])


def as_eagle(draft_input: SMCDraftInput) -> "EagleDraftInput":
    """Cast to the only type in SGLang's annotations; its relay needs no more than ours has."""
    return cast("EagleDraftInput", draft_input)


def shown_particles(continued: Population, narrowed: Population) -> Population:
    """Return each group's particles before narrowing if all had ended there, else after it.

    A short lag may draw the sequence of a particle that has ended while others have not. Then
    all remaining particles are copies of it, and SGLang ends the request when it finds the end
    in the emitted tokens: no final draw follows.
    """
    finished = continued.ended.all(1)
    fields = {
        name: choose(finished, getattr(continued, name), getattr(narrowed, name))
        for name in Population._fields
        if name not in ("logprobs", "scores")
    }
    return Population(**fields)


class Outcome(NamedTuple):
    """Result of a round for the host, on the device; tables hold the rest."""

    tokens: torch.Tensor  # [G, T]: the first counts[g] are emitted
    counts: torch.Tensor  # [G]
    new_seq_lens: torch.Tensor  # [G]
    last_emitted: torch.Tensor  # [G] last emitted tokens
    num_correct_drafts: torch.Tensor  # [G] kept columns of draft tokens
    counters: torch.Tensor  # [G, len(Counters)] float64
    failure: torch.Tensor  # [G] int64 `Failure`; such a request has emitted nothing
    first_tokens: torch.Tensor | None  # [G] the first token of prefill, -1 while particles differ
    particles: Population | None  # before the final draw, where some request sets return_particles
    logprobs: Emitted | None  # of tokens and first_tokens, where some request sets return_logprob
    trace: Stages | None = None  # where some request sets trace
    # [G] int64 distinct texts of the rows that the target read; where N and K adapt, of chains
    num_nodes: torch.Tensor | None = None
    # KV slots [G, N, K + 1] and experts [G, N, K + 1, layers, experts a token], where kept
    experts: tuple[torch.Tensor, torch.Tensor] | None = None

    def first(self, size: int) -> "Outcome":
        """Return copies of the first ``size`` groups."""
        return each_tensor(lambda column: column[:size].clone(), self)


@dataclass(kw_only=True)
class SMCBatchResult(GenerationBatchResult):
    """`GenerationBatchResult` with a round's outcome, which the host reads."""

    outcome: Outcome
    monitor: Monitor  # counts the round
    budgets: list[Budget]  # N and K of each request in this round
    policy: Policy | None = None  # updated by them
    corpus: Corpus | None = None  # to which emitted tokens are added

    @classmethod
    def of(cls, outcome: Outcome, **others: Any) -> "SMCBatchResult":
        """Return a round's outcome in the scheduler's form; others are fields."""
        tokens = outcome.tokens.flatten()
        has_logprobs = outcome.logprobs is not None
        if outcome.experts is not None:
            slots, experts = outcome.experts
            by_slot = upstream.experts_by_slot(slots.flatten(), experts.flatten(0, 2))
            others["routed_experts_output"] = by_slot
        return cls(
            outcome=outcome._replace(experts=None),
            next_token_ids=tokens,
            accept_lens=outcome.counts,
            new_seq_lens=outcome.new_seq_lens,
            next_draft_input=as_eagle(SMCDraftInput(outcome.last_emitted)),
            speculative_num_draft_tokens=outcome.tokens.shape[1],
            logits_output=LogitsProcessorOutput(next_token_logits=None) if has_logprobs else None,
            # SGLang drops these two batches later, after it has waited for the copies: until then
            # the next round, on the stream that allocated the memory, must not reuse it.
            extra_keep_alive_refs=[outcome, tokens],
            **others,
        )

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Copy the outcome to the host, on the copy stream, then what else SGLang has."""
        if self.outcome.tokens.device.type != "cpu":
            self.outcome = on_host(self.outcome)
        self.next_token_ids = self.outcome.tokens.flatten()
        self.accept_lens = self.outcome.counts
        super().copy_to_cpu(*args, **kwargs)

    def resolve(
        self, batch: "ScheduleBatch", resolve: Callable[[], list[list[int]]]
    ) -> list[list[int]]:
        """Run SGLang's ``resolve`` of the emitted tokens, with SMC's accept statistics.

        SGLang counts the emitted tokens, less one, as accepted draft tokens. An SMC round may emit
        no token, or those of several rounds at once: its kept columns are counted instead.
        """
        outcome = self.outcome
        live = [not (req.is_retracted or req.finished()) for req in batch.reqs]
        before = [_set_aside(req) for req in batch.reqs]
        totals = outcome.counters.tolist()
        self._keep_particles(batch.reqs, live)
        self._close_tokens(batch.reqs, live)
        self._end_stuck(batch.reqs, live, totals)
        tokens = resolve()
        process.active.ranks.add(tokens)
        kept = outcome.num_correct_drafts.tolist()
        nodes = None if outcome.num_nodes is None else outcome.num_nodes.tolist()
        failures = outcome.failure.tolist()
        self.num_correct_drafts = sum(kept)
        self.num_correct_drafts_per_req_cpu = kept
        if outcome.logprobs is not None:
            assert self.logits_output is not None
            deliver(self.logits_output, outcome.logprobs.tails, list(map(len, tokens)), batch.reqs)
        for i, req in enumerate(batch.reqs):
            req.spec_num_correct_drafts, req.spec_correct_drafts_histogram = before[i]
            if live[i]:
                self._take(i, req, kept[i], tokens[i], totals[i])
                if self.policy is not None:
                    num_nodes = None if nodes is None else nodes[i]
                    self.policy.learn(self.budgets[i], kept[i], num_nodes)
                registry.end_failed(req, failures[i])
                if self.corpus is not None and self.budgets[i].num_steps:  # else when it matters
                    self.corpus.read(req, tokens[i])
        self.monitor.end_round()
        if self.policy is not None:
            self.policy.end_round()
        return tokens

    def _take(
        self, group: int, req: "Req", num_kept: int, emitted: list[int], totals: list[float]
    ) -> None:
        """Add one request's round to its state and to the server's statistics."""
        state = state_of(req)
        outcome = self.outcome
        req.spec_num_correct_drafts += num_kept
        req.update_spec_correct_drafts_histogram(num_kept)
        gains = gained(state.counters, totals)
        config = state.config
        replayed = self.can_run_cuda_graph
        played = Played(
            gained=gains,
            weighs=config.weighs,
            num_kept=num_kept,
            num_emitted=len(emitted),
            replayed=replayed,
            is_greedy=config.greedy,
            by_model=not config.ngram_matches,
        )
        self.monitor.add(played)
        state.take(totals, replayed)
        if outcome.trace is not None and config.trace:
            state.rounds.append(outcome.trace.traced_round(group, state, emitted, totals[-1]))

    def _keep_particles(self, reqs: "list[Req]", live: list[bool]) -> None:
        """Store the particles of requests that set ``return_particles``, with own first tokens."""
        if self.outcome.particles is None:
            return
        for group, req in enumerate(reqs):
            state = state_of(req)
            if live[group] and state.config.return_particles:
                state.particles = particles_of(req, self.outcome.particles, group)

    def _close_tokens(self, reqs: "list[Req]", live: list[bool]) -> None:
        """Close open first tokens, before rules read the tokens after them."""
        if self.outcome.first_tokens is None:
            return
        each = zip(reqs, self.outcome.first_tokens.tolist(), live, strict=True)
        for i, (req, token, lives) in enumerate(each):
            if lives and token >= 0 and has_open_token(req):
                logprobs = self.outcome.logprobs if req.return_logprob else None
                registry.close_token(
                    req, token, None if logprobs is None else float(logprobs.first[i])
                )

    def _end_stuck(self, reqs: "list[Req]", live: list[bool], totals: list[list[float]]) -> None:
        """End requests with only particles of weight zero: their rules allow no sequence."""
        assert self.accept_lens is not None
        for i, req in enumerate(reqs):
            if live[i] and totals[i][-1] == -math.inf and registry.end_stuck(req):
                self.accept_lens[i] = 0
                live[i] = False


def _set_aside(req: "Req") -> tuple[int, list[int]]:
    """Return a request's accept statistics, and set a histogram that index -1 can update."""
    saved = req.spec_num_correct_drafts, req.spec_correct_drafts_histogram
    req.spec_correct_drafts_histogram = [0]
    return saved
