"""Return the result of a round to SGLang's scheduler, and carry it to the next round.

SGLang carries only the batch's requests from round to round: the state of a round stays on the
device, in tables keyed by `req_pool_idx`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_smc import process
from sglang_smc.kv.transfer import each_tensor, joined, on_device, on_host, padded_to_widest
from sglang_smc.options.policy import Policy
from sglang_smc.options.request import Budget
from sglang_smc.proposers.ngram import Corpus
from sglang_smc.round.extras import Extra, ReadRound
from sglang_smc.rules import registry
from sglang_smc.state.metrics import Monitor, Played, gained
from sglang_smc.state.request import state_of
from sglang_smc.state.texts import has_open_token

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
    # [G] int64 distinct texts of the rows that the target read; where N and K adapt, of chains
    num_nodes: torch.Tensor | None = None
    extras: Mapping[str, Any] = MappingProxyType({})  # what else the round returns, by its name

    @staticmethod
    def joined(parts: "Sequence[Outcome]", places: Sequence[int]) -> "Outcome":
        """Return the outcome of a batch from those of its rounds, in the order of its requests.

        Args:
            places: of the parts' groups in the batch.
        """
        if len(parts) == 1:
            return parts[0]
        whole = joined(padded_to_widest([part._filled() for part in parts]))
        order = on_device(whole.counts.device, places).argsort()
        return each_tensor(lambda column: column[order], whole)

    def _filled(self) -> "Outcome":
        """Return the outcome with all tensors: no first tokens, and no nodes, if there are none."""
        first = torch.full_like(self.counts, -1) if self.first_tokens is None else self.first_tokens
        nodes = torch.zeros_like(self.counts) if self.num_nodes is None else self.num_nodes
        return self._replace(first_tokens=first, num_nodes=nodes, extras=dict(self.extras))

    def first(self, size: int) -> "Outcome":
        """Return copies of the first ``size`` groups."""
        return each_tensor(lambda column: column[:size].clone(), self)


@dataclass(kw_only=True)
class SMCBatchResult(GenerationBatchResult):
    """`GenerationBatchResult` with a round's outcome, which the host reads."""

    outcome: Outcome
    monitor: Monitor  # counts the round
    budgets: list[Budget]  # N and K of each request in this round
    extras: Sequence[Extra] = ()  # which have returned `Outcome.extras`
    policy: Policy | None = None  # updated by them
    corpus: Corpus | None = None  # to which emitted tokens are added

    @classmethod
    def of(cls, outcome: Outcome, extras: Sequence[Extra] = (), **others: Any) -> "SMCBatchResult":
        """Return a round's outcome in the scheduler's form.

        Args:
            extras: of the server.
            others: fields.
        """
        tokens = outcome.tokens.flatten()
        returned = dict(outcome.extras)
        for extra in extras:
            if extra.name in returned:
                others |= extra.fields(returned)
        return cls(
            outcome=outcome._replace(extras=returned),
            extras=[extra for extra in extras if extra.name in returned],
            next_token_ids=tokens,
            accept_lens=outcome.counts,
            new_seq_lens=outcome.new_seq_lens,
            next_draft_input=as_eagle(SMCDraftInput(outcome.last_emitted)),
            speculative_num_draft_tokens=outcome.tokens.shape[1],
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
        no token, or those of several rounds at once: they are counted by `count_emitted`. The sum
        for SGLang's accept rate has those of the rounds before.
        """
        outcome = self.outcome
        live = [not (req.is_retracted or req.finished()) for req in batch.reqs]
        before = [_set_aside(req) for req in batch.reqs]
        totals = outcome.counters.tolist()
        for extra in self.extras:
            extra.keep(outcome.extras[extra.name], batch.reqs, live)
        self._close_tokens(batch.reqs, live)
        self._end_stuck(batch.reqs, live, totals)
        tokens = resolve()
        process.active.ranks.add(tokens)
        kept = outcome.num_correct_drafts.tolist()
        nodes = None if outcome.num_nodes is None else outcome.num_nodes.tolist()
        failures = outcome.failure.tolist()
        self.num_correct_drafts = self.monitor.take_correct_drafts()
        self.num_correct_drafts_per_req_cpu = kept
        read = ReadRound(batch.reqs, live, tokens, totals, self.logits_output)
        for extra in self.extras:
            extra.deliver(outcome.extras[extra.name], read)
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
        state.drafts.add_round(num_kept, len(emitted))
        gains = gained(state.counters, totals)
        req.spec_verify_ct += max(int(gains.rounds_ct) - 1, 0)  # beside the one of SGLang
        config = state.config
        replayed = self.can_run_cuda_graph
        played = Played(
            gained=gains,
            weighs=config.weighs,
            num_kept=num_kept,
            is_silent=not emitted,
            replayed=replayed,
            is_greedy=config.greedy,
            by_model=not config.ngram_matches,
            length=len(req.origin_input_ids) + len(req.output_ids),
        )
        self.monitor.add(played)
        state.take(totals, replayed)

    def _close_tokens(self, reqs: "list[Req]", live: list[bool]) -> None:
        """Close open first tokens, before rules read the tokens after them."""
        if self.outcome.first_tokens is None:
            return
        each = zip(reqs, self.outcome.first_tokens.tolist(), live, strict=True)
        for req, token, lives in each:
            if lives and token >= 0 and has_open_token(req):
                registry.close_token(req, token)

    def _end_stuck(self, reqs: "list[Req]", live: list[bool], totals: list[list[float]]) -> None:
        """End requests with only particles of weight zero: their rules allow no sequence."""
        assert self.accept_lens is not None
        for i, req in enumerate(reqs):
            if live[i] and totals[i][-1] == -math.inf and registry.end_stuck(req):
                self.accept_lens[i] = 0
                live[i] = False


def count_emitted(req: "Req", monitor: Monitor) -> None:
    """Count what a request's last round has put out, once SGLang has looked for the end in it."""
    drafts = state_of(req).drafts
    num_tokens = drafts.emit(len(req.output_ids) - len(req.output_ids_through_stop))
    if req.finished():
        drafts.cut()
    correct = drafts.take()
    for num_drafts in correct:
        req.spec_num_correct_drafts += num_drafts
        req.update_spec_correct_drafts_histogram(num_drafts)
    monitor.count_emitted(sum(correct), num_tokens)


def _set_aside(req: "Req") -> tuple[int, list[int]]:
    """Return a request's accept statistics, and set a histogram that index -1 can update."""
    saved = req.spec_num_correct_drafts, req.spec_correct_drafts_histogram
    req.spec_correct_drafts_histogram = [0]
    return saved
