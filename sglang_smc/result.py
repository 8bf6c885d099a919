"""The result of a round, and how the scheduler's books take it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_smc.adaptive import Policy
from sglang_smc.diagnostics import IntervalLog
from sglang_smc.draft_input import SMCDraftInput
from sglang_smc.particles import Population
from sglang_smc.rungs import Rung
from sglang_smc.runs import as_particle, first_is_open, running, settled_ids
from sglang_smc.smc.weights import normalized

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class Particles(NamedTuple):
    """All particles as they stood before the final draw."""

    anchor: torch.Tensor  # [G, N]
    tokens: torch.Tensor  # [G, N, T] tails
    lengths: torch.Tensor  # [G, N]
    log_weights: torch.Tensor  # [G, N]
    present: torch.Tensor  # [G, N]
    finished: torch.Tensor  # [G] all have ended

    @classmethod
    def of(cls, population: Population) -> "Particles":
        """Taken from a population."""
        return cls(
            population.anchor,
            population.tokens,
            population.lengths,
            population.log_weights,
            population.present,
            population.ended.all(1),
        )

    def of_group(self, group: int, req: "Req") -> list[dict[str, Any]] | None:
        """One request's particles for `meta_info`; None while some have not ended."""
        if not self.finished[group]:
            return None
        shared, is_open = settled_ids(req), first_is_open(req)
        rows = zip(
            self.anchor[group].tolist(),
            self.tokens[group].tolist(),
            self.lengths[group].tolist(),
            normalized(self.log_weights[group]).tolist(),
            self.log_weights[group].tolist(),
            self.present[group].tolist(),
            strict=True,
        )
        return [
            as_particle(
                [*shared, *([anchor] if is_open else []), *tail[:length]], weight, log_weight
            )
            for anchor, tail, length, weight, log_weight, present in rows
            if present
        ]


class Outcome(NamedTuple):
    """What a round leaves for the host, on the device; tables hold the rest."""

    tokens: torch.Tensor  # [G, T]: the first counts[g] are emitted
    counts: torch.Tensor  # [G]
    new_seq_lens: torch.Tensor  # [G]
    anchors: torch.Tensor  # [G] last emitted tokens
    num_kept_columns: torch.Tensor  # [G] drafted tokens that the round kept
    counters: torch.Tensor  # [G, len(Counters)] float64
    firsts: torch.Tensor | None  # [G] token that prefill drew, -1 while particles differ
    particles: Particles | None  # where some request wants them

    def first(self, size: int) -> "Outcome":
        """Copies of the first groups."""
        assert self.particles is None
        return Outcome(*(column if column is None else column[:size].clone() for column in self))


@dataclass
class SMCBatchResult(GenerationBatchResult):
    """A `GenerationBatchResult` with what SMC adds; filled by the worker, read on the host."""

    num_kept_columns: torch.Tensor | None = None  # [G] drafted tokens that the round kept
    counters: torch.Tensor | None = None  # [G, len(Counters)] float64
    particles: Particles | None = None  # where some request wants them
    firsts: torch.Tensor | None = None  # [G] token that prefill drew, -1 while particles differ
    log: IntervalLog | None = None
    rungs: list[Rung] | None = None  # N and K of each request in this round
    policy: Policy | None = None  # that learns from them

    @classmethod
    def of(cls, outcome: Outcome, log: IntervalLog) -> "SMCBatchResult":
        """As the scheduler takes it."""
        return cls(
            next_token_ids=outcome.tokens.flatten(),
            accept_lens=outcome.counts,
            new_seq_lens=outcome.new_seq_lens,
            next_draft_input=SMCDraftInput(outcome.anchors),
            speculative_num_draft_tokens=outcome.tokens.shape[1],
            num_kept_columns=outcome.num_kept_columns,
            counters=outcome.counters,
            firsts=outcome.firsts,
            particles=outcome.particles,
            log=log,
        )

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Copy our tensors along with SGLang's."""
        assert self.num_kept_columns is not None and self.counters is not None
        self.num_kept_columns = self.num_kept_columns.to("cpu", non_blocking=True)
        self.counters = self.counters.to("cpu", non_blocking=True)
        if self.firsts is not None:
            self.firsts = self.firsts.to("cpu", non_blocking=True)
        if self.particles is not None:
            copied = (column.to("cpu", non_blocking=True) for column in self.particles)
            self.particles = Particles(*copied)
        super().copy_to_cpu(*args, **kwargs)

    def resolve(
        self, batch: "ScheduleBatch", resolve: Callable[[], list[list[int]]]
    ) -> list[list[int]]:
        """Run SGLang's ``resolve`` of the emitted tokens, with SMC's statistics for its own.

        SGLang takes what a round emits, less one, for correct drafts. An SMC round may emit
        nothing, or several rounds' tokens at once; what is true is how many columns it kept.
        """
        assert self.num_kept_columns is not None and self.counters is not None
        assert self.log is not None
        kept = self.num_kept_columns.tolist()
        live = [not (req.is_retracted or req.finished()) for req in batch.reqs]
        before = [_set_aside(req) for req in batch.reqs]
        tokens = resolve()
        self.num_correct_drafts, self.num_correct_drafts_per_req_cpu = sum(kept), kept
        totals = self.counters.tolist()
        for i, req in enumerate(batch.reqs):
            req.spec_num_correct_drafts, req.spec_correct_drafts_histogram = before[i]
            if live[i]:
                req.spec_num_correct_drafts += kept[i]
                req.update_spec_correct_drafts_histogram(kept[i])
                run = running(req)
                self.log.add(run.counters, totals[i])
                if self.policy is not None and self.rungs is not None:
                    self.policy.learn(self.rungs[i], kept[i])
                run.take(totals[i])
                if self.particles is not None and run.config.return_particles:
                    run.particles = self.particles.of_group(i, req)
                if self.firsts is not None and run.open_at is not None and self.firsts[i] >= 0:
                    run.settle(req, int(self.firsts[i]))
        self.log.end_round()
        if self.policy is not None:
            self.policy.end_round()
        return tokens


def _set_aside(req: "Req") -> tuple[int, list[int]]:
    """Take a request's accept statistics, and leave a histogram that even -1 can index."""
    saved = req.spec_num_correct_drafts, req.spec_correct_drafts_histogram
    req.spec_correct_drafts_histogram = [0]
    return saved
